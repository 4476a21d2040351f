"""The meaning of each command's exit codes, for `--help` and docs/reference.md."""

from __future__ import annotations

import typer

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
