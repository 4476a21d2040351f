"""The commands that make another history of a run's points: `rewind`, `fork`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Protocol, TypeVar

import typer

from orchestrator.cli.shared import Json, RunUri, app, print_json, print_lines, require_one, say

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
    int | None, typer.Option("--step", metavar="N", help="the newest whole point at or before this step")
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
    opened = open_run(run)
    places = {"step": step, "samples": samples, "tokens": tokens}
    _report(opened.rewind(to, **places, agree=_asking(yes, json, "rewind the run"), say=say), json)


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
    opened = open_run(run)
    places = {"step": step, "samples": samples, "tokens": tokens}
    _report(opened.fork(new_run, at, **places, agree=_asking(yes, json, "make the fork"), say=say), json)


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
