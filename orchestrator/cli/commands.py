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

from orchestrator.cli import (
    control,
    dashboard,
    doctor,
    following,
    inspect,
    rewind_fork,
    submit,
    training,
    weights,
)
from orchestrator.cli.examples import add_examples
from orchestrator.cli.exit_codes import add_exit_codes
from orchestrator.cli.shared import app, errors_as_json, say
from orchestrator.cluster.connection import leaving_ray_behind
from orchestrator.errors import ERROR_FILE, OrchestratorError, error_document
from orchestrator.launch.process.safe_output import ResultStream, let_go

# the modules declare the commands
__all__ = [
    "app",
    "control",
    "dashboard",
    "doctor",
    "following",
    "inspect",
    "main",
    "rewind_fork",
    "submit",
    "training",
    "weights",
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
