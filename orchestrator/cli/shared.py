"""The common parts of all commands: the program, shared arguments, the printing of results, and exit codes.

Exit codes: 0 done, 1 failure, 2 bad configuration or refusal, 130 interrupted. Logs and errors go to stderr.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from orchestrator import __version__
from orchestrator.errors import ConfigError, OrchestratorError, error_document
from orchestrator.launch.process.safe_output import OutputError, Screen
from orchestrator.text import visible, visible_json, visible_lines

if TYPE_CHECKING:
    from orchestrator.inspect.run_control import Reply
    from orchestrator.planning.resume.resume_plan import ResumePlan


INTERRUPTED = 130  # 128 + SIGINT, as shells have it
# what an interrupted command leaves behind, for those that leave something
LEAVES = {
    "watch": "the run is as it was",
    "status": "the run is as it was",
    "logs": "the run is as it was",
    "verify": "`verify RUN --resume` continues with the points that were not read to the end",
    "save": "what was asked for stands, and the run's journal will say what became of it",
    "stop": "what was asked for stands, and the run's journal will say what became of it",
    "replay": "nothing of it is left; with --to-point the same command continues",
}


# The commands whose first argument is a run's folder. This process imports no code that the run names.
# `audit` and `samples` call a run's transforms in processes of their own.
_READING = ("points", "verify", "audit", "samples", "status", "watch", "logs", "export")
_STEERING = ("pin", "unpin", "save", "stop", "rewind", "fork")


class Commands(TyperGroup):
    """The group of commands. One that Ctrl-C ends reports that in a line and ends with 130."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; see the class. A command with more to report has already done so."""
        try:
            return super().invoke(ctx)
        except TyperException as error:
            if isinstance(getattr(error, "message", None), str):  # it repeats what was typed: names of files
                error.message = visible(error.message)
            raise
        except KeyboardInterrupt as interrupt:
            leaves = LEAVES.get(ctx.invoked_subcommand or "")
            say(str(interrupt) or "interrupted" + (f": {leaves}" if leaves else ""))
            raise typer.Exit(getattr(interrupt, "exit_code", INTERRUPTED)) from None


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,  # plain text: it is quick, and a brace or a bracket stays what it is
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Elastic LLM training on Ray: a run survives anything and continues at exactly the next unread "
    "token.",
)

Config = Annotated[str, typer.Argument(help="YAML file of the job, e.g. configs/quickstart.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, e.g. train.global_batch_size=24", show_default=False)
]
RunUri = Annotated[str, typer.Argument(help="the run's folder or URI, e.g. runs/quickstart")]
JSON = "--json"
Json = Annotated[bool, typer.Option(JSON, help="print one JSON document on stdout and nothing else there")]
PointName = Annotated[str, typer.Argument(help="a point's name, e.g. 00000480-a0003-g0007")]


def _show_version(wanted: bool) -> None:
    if wanted:
        others = ", ".join(f"{name} {_version_of(name)}" for name in ("ray", "torch"))
        sys.stdout.write(f"orchestrator {__version__} ({others}, Python {platform.python_version()})\n")
        raise typer.Exit


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="print the versions and exit"),
    ] = False,
) -> None:
    """See the commands."""
    del version  # the callback has acted on it
    if context.invoked_subcommand in (*_READING, *_STEERING):
        from orchestrator.data.common.user_code import reading_only

        context.with_resource(reading_only())


def require_one(options: Mapping[str, object]) -> None:
    """Raises `ConfigError`, naming all of them, unless exactly one of these options is given."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise ConfigError(
            f"give exactly one of {', '.join(options)}; {found}", code="command.not_exactly_one"
        )


def print_plan(found: ResumePlan, json: bool) -> None:
    """Prints the plan for people, or as JSON. A refusal ends with 2."""
    if json:
        print_json(found.to_json())
    else:
        from orchestrator.cli.tables import plan_lines

        print_lines(plan_lines(found))
    if found.action == "refuse":
        raise typer.Exit(2)


def print_reply(reply: Reply, json: bool) -> None:
    """Prints the result of a request. A refusal ends with 2, a failure with 1."""
    if json:
        print_json(reply.to_json())
    else:
        print_lines([f"{reply.what}: {reply.text}"])
    if reply.outcome in ("refused", "failed"):
        raise typer.Exit(2 if reply.outcome == "refused" else 1)


# The number of documents that this process has printed. The error's document is printed only if there is none
# yet.
_printed = 0


def print_json(value: Any, lines: bool = False) -> None:
    """Prints one document on stdout, indented, or on one line."""
    global _printed  # noqa: PLW0603  of the process, as stdout is
    _printed += 1
    sys.stdout.write(json_text(value, lines))
    sys.stdout.flush()


def json_text(value: Any, lines: bool = False) -> str:
    """The document as `print_json` prints it."""
    return visible_json(orjson.dumps(value, option=0 if lines else orjson.OPT_INDENT_2).decode()) + "\n"


@contextmanager
def errors_as_json(arguments: Sequence[str]) -> Iterator[None]:
    """Prints an error of ours that ends a command with `--json` as its document, if it has printed none."""
    before = _printed
    try:
        yield
    except OrchestratorError as error:
        if JSON in list(takewhile(lambda word: word != "--", arguments)) and _printed == before:
            with suppress(OSError, OutputError):  # stderr has it, too
                print_json({"error": error_document(error)})
        raise


def print_lines(lines: list[str]) -> None:
    """Prints lines for people on stdout."""
    sys.stdout.write(visible_lines(lines))
    sys.stdout.flush()


def say(text: str) -> None:
    """Prints a message for people on stderr."""
    Screen(sys.stderr).say(text)


COMMON = {
    0: "done",
    1: "failure",
    2: "bad command line or configuration, or a refusal: nothing was changed",
    130: "interrupted (Ctrl-C)",
}
OWN: dict[str, dict[int, str]] = {
    "train": {
        0: "done, or stopped on request: after saving, or at once where that was asked for",
        130: "a second Ctrl-C (143: a second SIGTERM): stopped without waiting for a save",
    },
    "submit": {1: "the job failed", 130: "Ctrl-C: the job runs on"},
    "dashboard": {0: "ended by Ctrl-C", 130: "Ctrl-C before it served"},
    "doctor": {1: "something would stop a run"},
    "status": {1: "the run failed, is not running without an end, or a piece of it is seen to be missing"},
    "watch": {1: "the run failed, is not running without an end, or a piece of it is seen to be missing"},
    "points": {1: "a point is damaged"},
    "verify": {1: "a point is damaged"},
    "audit": {
        1: "not exactly once, or records are missing; with --reference also: ids differ that no line of the "
        "journal names",
        2: "bad command line, or a refusal: files are not as they were at the run's start",
    },
    "samples": {
        1: "the files do not give the samples that the journal says were trained",
        2: "bad command line, or a refusal: files are not as they were at the run's start",
    },
    "rewind": {2: "bad command line, a refusal, or a no: nothing was changed"},
    "fork": {2: "bad command line, a refusal, or a no: nothing was changed"},
    "replay": {1: "what was trained again differs from what the run recorded"},
}


def exit_codes(command: str) -> dict[int, str]:
    """Each code that the command may end with, and its meaning there."""
    return dict(sorted({**COMMON, **OWN.get(command, {})}.items()))


def add_exit_codes(app: typer.Typer) -> None:
    """Adds the codes to the end of each command's help."""
    for command in app.registered_commands:
        assert command.callback is not None, "a command is a function"
        name = command.name or command.callback.__name__.replace("_", "-")
        lines = ["\b", "Exit codes:", *(f"  {code}  {what}" for code, what in exit_codes(name).items())]
        command.epilog = "\n\n".join(filter(None, [command.epilog, "\n".join(lines)]))
