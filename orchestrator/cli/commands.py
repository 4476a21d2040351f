"""The program `orchestrator`: all its commands, and what holds for each of them.

A command parses arguments, calls one function, prints its result for people or as one JSON document, and
sets the exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestrator.cli import (
    branching,
    dashboard,
    doctor,
    following,
    looking,
    steering,
    submit,
    training,
    weights,
)
from orchestrator.cli.examples import add_examples
from orchestrator.cli.exit_codes import add_exit_codes
from orchestrator.cli.shared import app, say
from orchestrator.cluster.connection import leaving_ray_behind
from orchestrator.errors import OrchestratorError
from orchestrator.launch.screen import let_go

# the modules declare the commands
__all__ = [
    "app",
    "branching",
    "dashboard",
    "doctor",
    "following",
    "looking",
    "main",
    "steering",
    "submit",
    "training",
    "weights",
]

add_examples(app)
add_exit_codes(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs the command (default: that of the process) and ends the process with its exit
    code.

    An error of ours is printed to stderr without a traceback. A standard stream that is closed early changes
    no exit code that a command has.
    """
    with leaving_ray_behind():
        try:
            app(args=arguments)
        except OrchestratorError as error:
            say(f"error: {error}")
            sys.exit(error.exit_code)
        finally:
            for stream in (sys.stdout, sys.stderr):
                let_go(stream)


if __name__ == "__main__":
    main()
