"""The commands that act on a run from outside: `pin`, `unpin`, `save`, `stop`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from orchestrator.cli.shared import Json, PointName, RunUri, app, print_json, print_lines, print_reply, say


@app.command()
def pin(
    run: RunUri,
    point: PointName,
    why: Annotated[str, typer.Option("--why", help="a note for people who see the pin")] = "",
    json: Json = False,
) -> None:
    """Keep a resume point until it is unpinned. Neither retention nor --prune deletes it."""
    from orchestrator.history.request_files import asker
    from orchestrator.inspect.run import open_run

    hold = open_run(run).pin(point, why)
    print_json(asdict(hold)) if json else print_lines([hold.answer(asker(), why)])


@app.command()
def unpin(run: RunUri, point: PointName, json: Json = False) -> None:
    """Give a pin back. The point may be deleted again."""
    from orchestrator.inspect.run import open_run

    opened = open_run(run)
    hold = opened.unpin(point)
    fork = opened.without_pin(hold)
    told = f"{point} is no longer pinned" + (f"; {fork}" if fork else "")
    print_json(asdict(hold)) if json else print_lines([told])


NoWait = Annotated[bool, typer.Option("--no-wait", help="ask, and do not wait for the answer")]


@app.command()
def save(run: RunUri, no_wait: NoWait = False, json: Json = False) -> None:
    """Ask the running launch for a resume point. It continues to train. Works from any machine that sees the
    run's storage.
    """
    from orchestrator.inspect.run import open_run

    print_reply(open_run(run).save(wait=not no_wait, tell=say), json)


@app.command()
def stop(
    run: RunUri,
    now: Annotated[
        bool, typer.Option("--now", help="without saving: steps after the newest resume point are lost")
    ] = False,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Ask the running launch to save and stop. The command that started it continues it later. Works from any
    machine that sees the run's storage.
    """
    from orchestrator.inspect.run import open_run

    print_reply(open_run(run).stop(now, wait=not no_wait, tell=say), json)
