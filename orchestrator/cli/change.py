"""The commands that change a run from outside: `pin`, `unpin`, `save`, `stop`, `rewind`, `fork`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Protocol, TypeVar

import typer

from orchestrator.cli.shared import (
    Json,
    PointName,
    RunUri,
    app,
    print_json,
    print_lines,
    print_reply,
    require_one,
    say,
)


@app.command()
def pin(
    run: RunUri,
    point: PointName,
    why: Annotated[str, typer.Option("--why", help="a note for people who see the pin")] = "",
    json: Json = False,
) -> None:
    """Keep a resume point until it is unpinned. Neither retention nor --prune deletes it."""
    from orchestrator.history.numbered_files import asker
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


REFUSED = 2


class Plan(Protocol):
    """A plan that a command shows before it acts."""

    @property
    def done(self) -> bool:
        """Whether it was carried out."""

    @property
    def stands_there(self) -> bool:
        """Whether its result existed before, so that nothing is left to do."""

    def lines(self) -> list[str]:
        """The plan for people."""

    def outcome(self) -> str:
        """The result for people, once it is carried out."""

    def to_json(self) -> dict[str, object]:
        """The plan as a JSON document."""


AnyPlan = TypeVar("AnyPlan", bound=Plan)

Yes = Annotated[bool, typer.Option("--yes", "-y", help="do it without asking")]
Step = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="N",
        help="the newest whole point at or before this step; attempt 2's step: a2:250",
    ),
]
Samples = Annotated[
    int | None, typer.Option("--samples", metavar="N", help="... at or before so many samples")
]
Tokens = Annotated[int | None, typer.Option("--tokens", metavar="N", help="... at or before so many tokens")]


@app.command()
def rewind(
    run: RunUri,
    to: Annotated[
        str | None, typer.Option("--to", metavar="POINT", help="a point of the run's history")
    ] = None,
    step: Step = None,
    samples: Samples = None,
    tokens: Tokens = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Go back to an older resume point. The next start continues from there. Shows what that sets aside, and
    asks. Nothing is deleted, and no launch may be at work on the run.
    """
    from orchestrator.inspect.run import open_run

    require_one({"--to": to, "--step": step, "--samples": samples, "--tokens": tokens})
    plan = open_run(run).rewind(
        to, step=step, samples=samples, tokens=tokens, agree=_asking(yes, json, "rewind the run"), say=say
    )
    _report(plan, json)


@app.command()
def fork(
    run: RunUri,
    new_run: Annotated[str, typer.Argument(help="the new run's folder, e.g. runs/higher-lr")],
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="POINT", help="a point's name, or latest: the newest whole one"),
    ] = None,
    step: Step = None,
    samples: Samples = None,
    tokens: Tokens = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Make a new run from another run's point. Shows the plan, and asks. The other run stays as it is, also
    while a launch works on it; its point is pinned there.
    """
    from orchestrator.inspect.run import open_run

    require_one({"--at": at, "--step": step, "--samples": samples, "--tokens": tokens})
    plan = open_run(run).fork(
        *(new_run, at),
        step=step,
        samples=samples,
        tokens=tokens,
        agree=_asking(yes, json, "make the fork"),
        say=say,
    )
    _report(plan, json)


def _asking(sure: bool, json: bool, what: str) -> Callable[[AnyPlan], bool]:
    """Shows the plan and asks on the terminal. Without a terminal the answer is no."""

    def agree(plan: AnyPlan) -> bool:
        if not json:
            print_lines(plan.lines())
        if sure or plan.stands_there:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            say(f"nothing is changed: there is no terminal to ask on; give --yes to {what}")
            return False
        if json:
            say("\n".join(plan.lines()))
        if not (yes := typer.confirm(f"{what}?", err=True)):
            say("nothing is changed")
        return yes

    return agree


def _report(plan: AnyPlan, json: bool) -> None:
    """Prints the result; a no ends with 2."""
    if json:
        print_json(plan.to_json())
    elif plan.done and not plan.stands_there:
        print_lines([plan.outcome()])
    if not plan.done:
        raise typer.Exit(REFUSED)
