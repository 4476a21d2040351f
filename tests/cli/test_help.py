"""Every command has examples in its help, and they are ones that it takes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import typer

from orchestrator.cli.commands import EXAMPLES, app, main, name_of

COMMANDS = {name_of(command): command for command in app.registered_commands}
PROGRAM = typer.main.get_command(app)
NO_RESULT = {"logs"}  # it prints a log


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_shows_its_examples_each_on_a_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    assert sum("example:" in line.lower() or "examples:" in line.lower() for line in shown) == 1
    assert EXAMPLES[name], f"give {name} an example in cli/commands.py"
    for example in EXAMPLES[name]:
        assert f"  orchestrator {name} {example}" in [line.removeprefix("  ") for line in shown]


@pytest.mark.parametrize(
    ("name", "example"), [(name, e) for name in COMMANDS for e in EXAMPLES.get(name, ())]
)
def test_an_example_is_a_command_line_that_is_taken(name: str, example: str) -> None:
    command = PROGRAM.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, shlex.split(example))


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - NO_RESULT))
def test_a_command_that_has_a_result_prints_it_as_json_too(name: str) -> None:
    assert "--json" in [opt for parameter in PROGRAM.commands[name].params for opt in parameter.opts]  # type: ignore[attr-defined]


def test_the_commands_are_listed_in_the_order_of_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.split("Commands:\n")[1].splitlines()]
    assert listed == [name for name in EXAMPLES if name in COMMANDS]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    words = {"COMP_WORDS": "orchestrator sta", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "orchestrator sta"}
    environment = {**os.environ, **words, "_ORCHESTRATOR_COMPLETE": f"complete_{shell}"}
    environment["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    code = "import sys; sys.argv = ['orchestrator']; from orchestrator.cli.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "status" in done.stdout, done.stderr
    assert "train" not in done.stdout


INTERRUPTED_AS_IT_LOADS = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "orchestrator.cli.commands":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from orchestrator.cli.entry import main
main()
"""


def test_a_command_that_is_interrupted_while_it_loads_shows_no_traceback() -> None:
    command = [sys.executable, "-c", INTERRUPTED_AS_IT_LOADS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
