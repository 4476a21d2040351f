"""The framework for actions on a run from the page: plan, confirm, done. Each entry of `ACTIONS` is one
action.

Pure, except for `Action.do`, which is called with the run when a plan was confirmed. Effects, refusals and
the basis of a plan are made from the data on the page. A plan's token is valid only while that basis does not
change: that of the run (`of_run`), that of the point for actions on one point (`of_point`), none for save and
stop (`of_nothing`). A finished step changes none of them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.inspect.status.snapshot import OPEN, UNREADABLE

if TYPE_CHECKING:
    from orchestrator.inspect.run import Run

EXPIRES_S = 120.0
ALIVE = ("running", "waiting")
Json = Mapping[str, Any]
Effect = tuple[str, str]  # an icon of the page, and a sentence
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionParameters:
    """The parameters of an action, which uses those that concern it.

    `point` is a resume point's name, `now` stops without saving, `why` goes into a pin, `new_run` is a fork's
    name.
    """

    point: str | None = None
    now: bool = False
    why: str = ""
    new_run: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """The page's data on a run when an action is planned: its summary, and the point's details."""

    uri: str
    summary: Json
    detail: Json | None = None

    @property
    def point(self) -> Json:
        """The asked point's row."""
        assert self.detail is not None, "an action that needs a point is planned with one"
        row: Json = self.detail["point"]
        return row


class WrongFound(str):
    """The message of an action that was done and found a fault."""

    __slots__ = ()


def of_run(sight: Sight) -> dict[str, Any]:
    """The basis of a plan for the whole run."""
    newest = sight.summary.get("point")
    return {
        **{name: sight.summary.get(name) for name in ("attempt", "generation")},
        "newest_point": newest["name"] if newest else None,
        "state": sight.summary["state"],
    }


def of_nothing(sight: Sight) -> dict[str, Any]:
    """The basis of a plan for the active launch: empty, as nothing that changes while it trains matters."""
    del sight
    return {}


def of_point(sight: Sight) -> dict[str, Any]:
    """The basis of a plan for one point: its existence and its pin."""
    assert sight.detail is not None, "an action that needs a point is planned with one"
    pin = sight.point.get("pin")
    return {
        "point": sight.point["name"] if sight.detail.get("files") else None,
        "pin": f"by {pin['by']}, {pin['created']}" if pin else None,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action.

    `verb` is on the button that confirms it; `is_grave` colours it. `do` executes it and returns the message
    for the user. It raises what a command would, and reports why it takes long. `basis` is what a plan of it
    depends on.
    """

    verb: str
    title: Callable[[Sight, ActionParameters], str]
    effects: Callable[[Sight, ActionParameters], Sequence[Effect]]
    command: Callable[[Sight, ActionParameters], str]
    do: Callable[[Run, ActionParameters, Tell], str]
    basis: Callable[[Sight], dict[str, Any]] = of_run
    refusals: Callable[[Sight, ActionParameters], Sequence[str]] = lambda sight, asked: ()
    needs_point: bool = False
    needs_alive: bool = False
    is_grave: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedAction:
    """The planned effects of an action. Without `token` it is refused."""

    action: str
    verb: str
    is_grave: bool
    point: str | None
    title: str
    effects: tuple[Effect, ...]
    refusals: tuple[str, ...]
    command: str
    basis: dict[str, Any]
    token: str | None
    expires_s: float = EXPIRES_S

    def to_json(self) -> dict[str, Any]:
        """The document."""
        effects = [{"icon": icon, "text": text} for icon, text in self.effects]
        return {**asdict(self), "effects": effects, "refusals": list(self.refusals)}


def plan(
    name: str, action: Action, asked: ActionParameters, sight: Sight, secret: bytes, now: float
) -> PlannedAction:
    """Plans the action of this name, at `now` seconds on the server's clock."""
    refusals = list[str]()
    state = sight.summary["state"]
    # if a run's journal cannot be read, its signs of life still can
    is_alive = state in ALIVE or (state == UNREADABLE and sight.summary.get("alive"))
    if action.needs_alive and not is_alive:
        refusals.append(
            "the run is still being watched for a sign of life: ask again in a few seconds"
            if state == OPEN or (state == UNREADABLE and sight.summary.get("alive") is None)
            else f"nothing of this run is alive ({state}): there is nobody to ask"
        )
    refusals += action.refusals(sight, asked)
    return PlannedAction(
        action=name,
        verb=action.verb,
        is_grave=action.is_grave,
        point=asked.point,
        title=action.title(sight, asked),
        effects=() if refusals else tuple(action.effects(sight, asked)),
        refusals=tuple(refusals),
        command=action.command(sight, asked),
        basis=action.basis(sight),
        token=None if refusals else _token(name, action, asked, sight, secret, now),
    )


def is_stale(
    name: str, action: Action, asked: ActionParameters, sight: Sight, secret: bytes, now: float, token: str
) -> bool:
    """Whether a plan's token is no longer valid.

    What it depends on has changed, the plan is too old, or it was made for something else.
    """
    made, _, _ = token.partition(".")
    if not made.isdecimal() or len(made) > 12 or not 0 <= now - int(made) <= EXPIRES_S:
        return True
    return not hmac.compare_digest(_token(name, action, asked, sight, secret, int(made)), token)


def _token(
    name: str, action: Action, asked: ActionParameters, sight: Sight, secret: bytes, now: float
) -> str:
    decisive = replace(asked, why="")  # a note
    parts = json.dumps([name, sight.uri, asdict(decisive), action.basis(sight), int(now)], sort_keys=True)
    return f"{int(now)}.{hmac.new(secret, parts.encode(), hashlib.sha256).hexdigest()}"
