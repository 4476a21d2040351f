"""The commands that follow a run: `watch`, `logs`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchestrator.cli.shared import Json, RunUri, app, print_json
from orchestrator.terminal_text import visible


@app.command()
def watch(run: RunUri, json: Json = False) -> None:
    """Show where the run stands until it ends. The same as `status --watch`. --json: a line each time."""
    from orchestrator.inspect.display import show
    from orchestrator.inspect.run import open_run

    opened = open_run(run)
    if json:
        for seen in opened.looks():
            print_json(seen.to_json(), lines=True)
    else:
        seen = show(opened.looks())
    if seen.is_broken:
        raise typer.Exit(1)


@app.command()
def logs(
    run: RunUri,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on as it grows, until the run has ended")
    ] = False,
) -> None:
    """Print the newest log file of the run. It has what a launch said, and what Ray said at length."""
    from orchestrator.inspect.run import open_run

    for text in open_run(run).logs(follow):
        sys.stdout.write(visible(text))
        sys.stdout.flush()
