"""The program `orchestrator`: all its commands, and the rules for every one of them.

A command parses arguments, calls one function, prints its result for people or as one JSON document, and sets
the exit code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

import typer

from orchestrator.cli import change, inspect, start
from orchestrator.cli.shared import add_exit_codes, app, errors_as_json, say
from orchestrator.cluster.connection import leaving_ray_behind
from orchestrator.errors import ERROR_FILE, OrchestratorError, error_document
from orchestrator.launch.process.safe_output import ResultStream, let_go

# One or two examples for each command, as `--help` shows them, in the order of the commands' list.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "sample-corpus": ("corpus/", "corpus/ --from texts/"),
    "doctor": ("runs", "/data/runs --address http://head:8265"),
    "train": (
        "configs/quickstart.yaml",
        "configs/quickstart.yaml train.global_batch_size=24 pack.seq_len=128",
    ),
    "plan": ("configs/quickstart.yaml train.global_batch_size=24",),
    "submit": ("configs/quickstart.yaml run.storage=/data/runs --address http://head:8265",),
    "status": ("runs/quickstart", "runs/quickstart --json"),
    "watch": ("runs/quickstart",),
    "logs": ("runs/quickstart --follow",),
    "dashboard": ("runs --open",),
    "save": ("runs/quickstart",),
    "stop": ("runs/quickstart",),
    "points": ("runs/quickstart", "runs/quickstart --prune --dry-run"),
    "pin": ('runs/quickstart 00000100-a0001-g0001 --why "before the loss spike"',),
    "unpin": ("runs/quickstart 00000100-a0001-g0001",),
    "verify": ("runs/quickstart", "runs/quickstart --resume"),
    "audit": (
        "runs/quickstart",
        "runs/quickstart --steps 100:250",
        "runs/quickstart --processes 8 --reference",
    ),
    "samples": ("runs/quickstart --step 120", "runs/quickstart --step 120 --text"),
    "rewind": ("runs/quickstart --to 00000100-a0001-g0001", "runs/quickstart --step 120 --yes"),
    "fork": (
        "runs/quickstart runs/higher-lr --at latest",
        "runs/quickstart runs/higher-lr --step 120 --yes",
    ),
    "replay": (
        "runs/quickstart --step 120",
        "runs/quickstart --step 120 --to-point runs/at-120 cluster.num_workers=2",
    ),
    "evaluate": (
        "runs/quickstart",
        "runs/quickstart --point 00000100-a0001-g0001 eval.max_samples=1000",
    ),
    "export": (
        "runs/quickstart ./my-model",
        "runs/quickstart 00000100-a0001-g0001 ./my-model --dtype bfloat16",
    ),
}


def add_examples(app: typer.Typer) -> None:
    """Adds the examples to the help of each command, and sets the order of the commands' list."""
    order = list(EXAMPLES)
    for command in app.registered_commands:
        name = name_of(command)
        lines = [f"  orchestrator {name} {example}" for example in EXAMPLES.get(name, ())]
        if lines:
            command.epilog = "\n".join(["\b", "Examples:" if len(lines) > 1 else "Example:", *lines])
    app.registered_commands.sort(
        key=lambda c: order.index(name_of(c)) if name_of(c) in EXAMPLES else len(order)
    )


def name_of(command: typer.models.CommandInfo) -> str:
    """The command's name as it is typed."""
    assert command.callback is not None, "a command is a function"
    return command.name or command.callback.__name__.replace("_", "-")


# the modules declare the commands
__all__ = [
    "app",
    "change",
    "inspect",
    "main",
    "start",
]

add_examples(app)
add_exit_codes(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs the command (default: that of the process) and ends the process with its exit
    code.

    An error of ours is printed to stderr without a traceback, with `--json` also as the document. A standard
    stream that is closed early changes no exit code that a command has. Who started the process may have
    named a file for the error (`errors.ERROR_FILE`).
    """
    error_file = os.environ.pop(ERROR_FILE, "")
    with leaving_ray_behind():
        stdout, stderr = sys.stdout, sys.stderr
        sys.stdout = cast(TextIO, ResultStream(stdout))
        try:
            with errors_as_json(sys.argv[1:] if arguments is None else arguments):
                app(args=arguments)
        except OrchestratorError as error:
            say(f"error: {error}")
            if error_file:
                Path(error_file).write_text(json.dumps(error_document(error)), encoding="utf-8")
            sys.exit(error.exit_code)
        except Exception:  # noqa: BLE001  a fault of ours; texts of the run in it are made visible as well
            say(traceback.format_exc().rstrip())
            sys.exit(1)
        finally:
            sys.stdout = stdout
            for stream in (stdout, stderr):
                let_go(stream)


if __name__ == "__main__":
    main()
