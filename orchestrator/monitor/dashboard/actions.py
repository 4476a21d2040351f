"""What can be done to a run from the page: plan, confirm, done. One entry of `ACTIONS` is one action.

Pure, but for `Action.do`, which is called with the run when a plan was confirmed: effects, refusals and the
basis of a plan are made from what the page shows. A plan's token holds only while that basis stands: attempt,
generation, newest resume point, state. A finished step changes none of them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.errors import RefusedError

if TYPE_CHECKING:
    from orchestrator.monitor.run import Run

EXPIRES_S = 120.0
ALIVE = ("running", "waiting")
Json = Mapping[str, Any]
Effect = tuple[str, str]  # an icon of the page, and a sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What an action is asked to do; an action heeds what concerns it. `point` is a resume point's name,
    `now` stops without saving, `why` goes into a pin, `new_run` is a fork's name.
    """

    point: str | None = None
    now: bool = False
    why: str = ""
    new_run: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What the page shows of a run when something is planned: its summary, and the point's details."""

    uri: str
    summary: Json
    detail: Json | None = None

    @property
    def point(self) -> Json:
        """The asked point's row."""
        assert self.detail is not None, "an action that needs a point is planned with one"
        row: Json = self.detail["point"]
        return row

    @property
    def basis(self) -> dict[str, Any]:
        """What a plan depends on."""
        newest = self.summary.get("point")
        return {
            **{name: self.summary.get(name) for name in ("attempt", "generation")},
            "newest_point": newest["name"] if newest else None,
            "state": self.summary["state"],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action. `verb` stands on the button that confirms it; `is_grave` colours it. `do` carries it out
    and returns what to say; it raises what a command would.
    """

    verb: str
    title: Callable[[Sight, Asked], str]
    effects: Callable[[Sight, Asked], Sequence[Effect]]
    command: Callable[[Sight, Asked], str]
    do: Callable[[Run, Asked], str]
    refusals: Callable[[Sight, Asked], Sequence[str]] = lambda sight, asked: ()
    needs_point: bool = False
    needs_alive: bool = False
    is_grave: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What an action would do. Without `token` it is refused."""

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


def plan(name: str, asked: Asked, sight: Sight, secret: bytes, now: float) -> Planned:
    """What the action of this name (of `ACTIONS`) would do now, `now` seconds on the server's clock."""
    action, refusals = ACTIONS[name], list[str]()
    state = sight.summary["state"]
    if action.needs_alive and state not in ALIVE:
        refusals.append(
            "the run is still being watched for a sign of life: ask again in a few seconds"
            if state == "open"
            else f"nothing of this run is alive ({state}): there is nobody to ask"
        )
    refusals += action.refusals(sight, asked)
    return Planned(
        action=name,
        verb=action.verb,
        is_grave=action.is_grave,
        point=asked.point,
        title=action.title(sight, asked),
        effects=() if refusals else tuple(action.effects(sight, asked)),
        refusals=tuple(refusals),
        command=action.command(sight, asked),
        basis=sight.basis,
        token=None if refusals else _token(name, asked, sight, secret, now),
    )


def is_stale(name: str, asked: Asked, sight: Sight, secret: bytes, now: float, token: str) -> bool:
    """Whether a plan's token does not hold any more: the run has moved on, the plan is too old, or it was
    made for something else.
    """
    made, _, _ = token.partition(".")
    if not made.isdecimal() or len(made) > 12 or not 0 <= now - int(made) <= EXPIRES_S:
        return True
    return not hmac.compare_digest(_token(name, asked, sight, secret, int(made)), token)


def _token(name: str, asked: Asked, sight: Sight, secret: bytes, now: float) -> str:
    decisive = replace(asked, why="")  # a note
    parts = json.dumps([name, sight.uri, asdict(decisive), sight.basis, int(now)], sort_keys=True)
    return f"{int(now)}.{hmac.new(secret, parts.encode(), hashlib.sha256).hexdigest()}"


# ---------------------------------------------------------------------------------------- words and numbers
def count(number: float | None) -> str:
    """A large number for people: 14.3 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if (number or 0) >= size:
            return f"{(number or 0) / size:.3g} {unit}"
    return f"{number or 0:.0f}"


def size_text(num_bytes: float | None) -> str:
    """A size for people."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if (num_bytes or 0) >= size:
            return f"{(num_bytes or 0) / size:.3g} {unit}"
    return f"{num_bytes or 0:.0f} bytes"


def span_text(seconds: float | None) -> str:
    """A duration for people."""
    s = seconds or 0.0
    for limit, unit, each in ((90, "s", 1), (5400, "min", 60), (129_600, "h", 3600)):
        if s < limit:
            return f"{s / each:.3g} {unit}"
    return f"{s / 86400:.3g} d"


# ------------------------------------------------------------------------------------------------ the table
def _command(name: str, sight: Sight, *words: str | None) -> str:
    return shlex.join(["orchestrator", name, sight.uri, *filter(None, words)])


def _answered(reply: Any) -> str:
    if reply.outcome in ("refused", "failed"):
        raise RefusedError(reply.text)
    return str(reply.text)


def _save_effects(sight: Sight, asked: Asked) -> Sequence[Effect]:
    del asked
    risk, newest = sight.summary["risk"], sight.summary.get("point")
    effects = [("save", "The group saves at the next step boundary and trains on.")]
    if newest and newest.get("bytes"):
        effects.append(
            ("disk", f"The newest resume point has {size_text(newest['bytes'])}; this one is alike.")
        )
    at_risk = f"Tokens at risk fall from {count(risk['tokens'])} to 0 when it is committed."
    return [*effects, ("risk", at_risk)]


def _stop_effects(sight: Sight, asked: Asked) -> Sequence[Effect]:
    risk, workers = sight.summary["risk"], sight.summary.get("world_size")
    free = (
        "stopped",
        f"{workers} workers become free. The run stays as it is until somebody starts it again.",
    )
    if not asked.now:
        return [
            ("save", "The group saves at the next step boundary, then all workers leave. Nothing is lost."),
            free,
        ]
    lost = f"{risk['steps']:,} steps ({count(risk['tokens'])} tokens, {span_text(risk['seconds'])} of work)"
    return [("risk", f"Nothing is saved: {lost} are trained again when the run is started again."), free]


def _pin_effects(sight: Sight, asked: Asked) -> Sequence[Effect]:
    del asked
    return [
        ("pin", "Neither retention nor prune deletes this point until it is unpinned."),
        ("disk", f"It keeps {size_text(sight.point.get('bytes'))} of storage."),
    ]


def _unpin_effects(sight: Sight, asked: Asked) -> Sequence[Effect]:
    del sight, asked
    return [("pin", "Retention may delete this point again, from the next commit on.")]


def _verify_effects(sight: Sight, asked: Asked) -> Sequence[Effect]:
    del asked
    assert sight.detail is not None, "it needs a point"
    files = len(sight.detail.get("files") or ())
    return [
        (
            "verify",
            f"Reads {size_text(sight.point.get('bytes'))} in {files} files and compares every digest.",
        ),
        ("time", "Training goes on. Nothing is changed, whatever is found."),
    ]


def _verify(run: Run, asked: Asked) -> str:
    (row,) = run.verify(asked.point)
    if row["healthy"]:
        return f"{asked.point}: every digest is right."
    damages = "; ".join(f"{damage['file']} {damage['reason']}" for damage in row["damaged"])
    return f"{asked.point} is damaged: {damages}"


def _not_pinned(sight: Sight, asked: Asked) -> Sequence[str]:
    return () if sight.point.get("pinned") else (f"{asked.point} is not pinned",)


def _pin(run: Run, asked: Asked) -> str:
    return f"{asked.point} is pinned by {run.pin(asked.point or '', asked.why).by}."


def _unpin(run: Run, asked: Asked) -> str:
    run.unpin(asked.point or "")
    return f"{asked.point} is not pinned any more."


ACTIONS: dict[str, Action] = {
    "save": Action(
        verb="Save now",
        title=lambda sight, asked: "Save a resume point now",
        effects=_save_effects,
        command=lambda sight, asked: _command("save", sight),
        do=lambda run, asked: _answered(run.save()),
        needs_alive=True,
    ),
    "stop": Action(
        verb="Stop",
        title=lambda sight, asked: "Stop the run at once" if asked.now else "Save and stop the run",
        effects=_stop_effects,
        command=lambda sight, asked: _command("stop", sight, "--now" if asked.now else ""),
        do=lambda run, asked: _answered(run.stop(asked.now)),
        needs_alive=True,
        is_grave=True,
    ),
    "pin": Action(
        verb="Pin",
        title=lambda sight, asked: f"Pin resume point {asked.point}",
        effects=_pin_effects,
        command=lambda sight, asked: _command("pin", sight, asked.point),
        do=_pin,
        needs_point=True,
    ),
    "unpin": Action(
        verb="Unpin",
        title=lambda sight, asked: f"Unpin resume point {asked.point}",
        effects=_unpin_effects,
        command=lambda sight, asked: _command("unpin", sight, asked.point),
        do=_unpin,
        refusals=_not_pinned,
        needs_point=True,
    ),
    "verify": Action(
        verb="Verify",
        title=lambda sight, asked: f"Verify resume point {asked.point}",
        effects=_verify_effects,
        command=lambda sight, asked: _command("verify", sight, asked.point),
        do=_verify,
        needs_point=True,
    ),
}
