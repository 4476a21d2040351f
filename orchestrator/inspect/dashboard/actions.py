"""The actions of the page: plan, confirm, done. Each entry of `ACTIONS` is one action, with its text before
confirmation, its refusals, and its execution.

Plans are pure; only `Action.do` acts, when a plan was confirmed. Effects, refusals and the basis of a plan
are made from the data on the page. A plan's token is valid only while that basis does not change: that of the
run (`of_run`), that of the point for actions on one point (`of_point`), none for save and stop
(`of_nothing`). A finished step changes none of them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.sections import NAME
from orchestrator.errors import RefusedError, StorageError, UnreachableNodeError
from orchestrator.history.numbered_files import VERIFY, asker, verify_result
from orchestrator.inspect.status.snapshot import OPEN, UNREADABLE
from orchestrator.storage.open import join, open_storage, split
from orchestrator.text import span, steps, workers

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


# ------------------------------------------------------------------------------------------------ the table
def _command(name: str, sight: Sight, *words: str | None) -> str:
    return shlex.join(["orchestrator", name, sight.uri, *filter(None, words)])


def _answered(reply: Any) -> str:
    if reply.outcome in ("refused", "failed"):
        code = "request.refused" if reply.outcome == "refused" else "request.failed"
        raise RefusedError(reply.text, code=code)
    return str(reply.text)


def _save_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    del asked
    risk = sight.summary.get("risk")
    effects = [("save", "The group saves at the next step boundary and trains on.")]
    if risk is not None:
        at_risk = f"Tokens at risk fall from {count(risk['tokens'])} to 0 when it is committed."
        effects.append(("risk", at_risk))
    return effects


def _stop_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    risk, size = sight.summary.get("risk"), sight.summary.get("world_size") or 0
    become = f"{workers(size)} {'becomes' if size == 1 else 'become'} free" if size else "Its workers end"
    free = ("stopped", f"{become}. The run stays as it is until somebody starts it again.")
    if not asked.now:
        return [
            ("save", "The group saves at the next step boundary, then all workers leave. Nothing is lost."),
            free,
        ]
    if risk is None:
        lost = "Nothing is saved: all steps after the newest resume point are trained again"
        return [("risk", f"{lost} when the run is started again."), free]
    lost = f"{steps(risk['steps'])} ({count(risk['tokens'])} tokens, {span(risk['seconds'])} of work)"
    are = "is" if risk["steps"] == 1 else "are"
    return [("risk", f"Nothing is saved: {lost} {are} trained again when the run is started again."), free]


def _pin_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    del asked
    return [
        ("pin", "Neither retention nor prune deletes this point until it is unpinned."),
        ("disk", f"It keeps {size_text(sight.point.get('bytes'))} of storage."),
    ]


def _unpin_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    del sight, asked
    return [("pin", "Retention may delete this point again, from the next commit on.")]


def _goes_on(sight: Sight) -> str:
    return "Training continues. " if sight.summary["state"] in ALIVE else ""


def _verify_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    del asked
    assert sight.detail is not None, "it needs a point"
    files = len(sight.detail.get("files") or ())
    return [
        (
            "verify",
            f"Reads {size_text(sight.point.get('bytes'))} in {files} files and compares every digest.",
        ),
        ("time", f"{_goes_on(sight)}No byte of the point is changed, whatever is found."),
        (
            "damaged",
            "It is marked as damaged now; the mark is lifted if every byte is right."
            if sight.point.get("quarantined")
            else "If a byte is wrong, the point is marked as damaged, and not used until it is found whole.",
        ),
    ]


def _verify(run: Run, asked: ActionParameters) -> str:
    began = time.monotonic()
    rows = run.verify(asked.point)
    with suppress(StorageError):  # the result is shown even if it cannot be stored
        run.note_finding(VERIFY, verify_result(rows, every=False), time.monotonic() - began)
    (row,) = rows
    if row["healthy"]:
        return f"{asked.point}: every digest is right."
    if row["away"]:
        raise RefusedError(f"{asked.point} was not read: {row['away']}", code=UnreachableNodeError.code)
    damages = "; ".join(f"{damage['file']} {damage['reason']}" for damage in row["damaged"])
    return WrongFound(f"{asked.point} is damaged: {damages}")


def _not_pinned(sight: Sight, asked: ActionParameters) -> Sequence[str]:
    return () if sight.point.get("pinned") else (f"{asked.point} is not pinned",)


def _why(asked: ActionParameters) -> Sequence[str]:
    return ("--why", asked.why) if asked.why else ()


def _pin(run: Run, asked: ActionParameters) -> str:
    return f"{run.pin(asked.point or '', asked.why).answer(asker(), asked.why)}."


def _unpin(run: Run, asked: ActionParameters) -> str:
    fork = run.without_pin(run.unpin(asked.point or ""))
    return f"{asked.point} is not pinned any more{'; ' if fork else ''}{fork}."


def _rewind_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    aside = (sight.detail or {}).get("aside") or {"steps": 0, "tokens": 0, "seconds": 0.0}
    amount = f"{count(aside['tokens'])} tokens, {span(aside['seconds'])} of work"
    tokens, are = sight.point["consumed_tokens"], "is" if aside["steps"] == 1 else "are"
    return [
        ("start", f"The next start continues from {asked.point}; nothing is started now."),
        ("branch", f"{steps(aside['steps'])} ({amount}) {are} set aside. Nothing is deleted."),
        ("cursor", f"Training continues after token {tokens:,} of the stream, with the data that follow it."),
    ]


def _rewind_refusals(sight: Sight, asked: ActionParameters) -> Sequence[str]:
    if sight.summary["state"] in (*ALIVE, "starting"):
        return ("a launch works on this run: stop it first, then rewind",)
    return _unfit(sight, asked, "it can be forked into a new run instead")


def _unfit(sight: Sight, asked: ActionParameters, orphan: str) -> Sequence[str]:
    """Why the point cannot be used; `orphan`: the advice for a point off the history, empty if that does not
    matter.
    """
    row = sight.point
    if row["state"] == "damaged":
        return (f"resume point {asked.point} is damaged: {row['reason']}",)
    if orphan and row.get("orphan_why"):
        return (f"resume point {asked.point} is not on this run's history ({row['orphan_why']}); {orphan}",)
    return ()


def _rewind(run: Run, asked: ActionParameters) -> str:
    found = run.rewind(asked.point)
    return f"The run stands at {found.point}; the command that started it continues from there."


def _new_run(sight: Sight, asked: ActionParameters) -> str:
    """The fork's folder, beside the run."""
    return f"{sight.uri}-fork" if asked.new_run is None else _beside(sight.uri, asked.new_run)


def _beside(uri: str, name: str) -> str:
    return join(split(uri)[0], name)


def _fork_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    return [
        ("branch", f"A new run {_new_run(sight, asked)} begins with this point. This run is not touched."),
        ("pin", "The point is pinned here for as long as the new run needs it."),
        ("disk", f"{size_text(sight.point.get('bytes'))} of storage are kept."),
    ]


def _fork_refusals(sight: Sight, asked: ActionParameters) -> Sequence[str]:
    name = asked.new_run
    if name is not None and not re.fullmatch(NAME, name):  # nor does it lead anywhere else
        return (f"{name!r} is no name of a run: letters, digits, `.`, `_`, `-`, not starting with `.`",)
    if _is_taken(target := _new_run(sight, asked)):
        return (f"{target} is there already; a fork needs a folder of its own: give it another name",)
    return _unfit(sight, asked, "")


def _is_taken(location: str) -> bool:
    storage = open_storage(location)
    return os.path.lexists(storage.root) if storage.folder is not None else bool(storage.list(""))


def _fork(run: Run, asked: ActionParameters) -> str:
    target = _beside(run.uri, asked.new_run) if asked.new_run else f"{run.uri}-fork"
    found = run.fork(target, asked.point)
    return f"{found.fork} begins with {found.point}."


def _export_folder(uri: str, point: str | None) -> str:
    """The folder of an export. A browser cannot choose it."""
    return _beside(uri, f"exports/{split(uri)[1]}-{point}")


def _export_effects(sight: Sight, asked: ActionParameters) -> Sequence[Effect]:
    folder = _export_folder(sight.uri, asked.point)
    return [
        ("save", f"The weights alone are written to {folder}, for transformers' from_pretrained."),
        ("time", f"{_goes_on(sight)}Nothing of the run is changed."),
    ]


def _export(run: Run, asked: ActionParameters) -> str:
    found = run.export(_export_folder(run.uri, asked.point), asked.point)
    return f"{found['out']}: the weights of {found['point']}, {size_text(found['bytes'])}."


ACTIONS: dict[str, Action] = {
    "save": Action(
        verb="Save now",
        title=lambda sight, asked: "Save a resume point now",
        effects=_save_effects,
        command=lambda sight, asked: _command("save", sight),
        do=lambda run, asked, tell: _answered(run.save(tell=tell)),
        basis=of_nothing,
        needs_alive=True,
    ),
    "stop": Action(
        verb="Stop",
        title=lambda sight, asked: "Stop the run at once" if asked.now else "Save and stop the run",
        effects=_stop_effects,
        command=lambda sight, asked: _command("stop", sight, "--now" if asked.now else ""),
        do=lambda run, asked, tell: _answered(run.stop(asked.now, tell=tell)),
        basis=of_nothing,
        needs_alive=True,
        is_grave=True,
    ),
    "pin": Action(
        verb="Pin",
        title=lambda sight, asked: f"Pin resume point {asked.point}",
        effects=_pin_effects,
        command=lambda sight, asked: _command("pin", sight, asked.point, *_why(asked)),
        do=lambda run, asked, tell: _pin(run, asked),
        basis=of_point,
        needs_point=True,
    ),
    "unpin": Action(
        verb="Unpin",
        title=lambda sight, asked: f"Unpin resume point {asked.point}",
        effects=_unpin_effects,
        command=lambda sight, asked: _command("unpin", sight, asked.point),
        do=lambda run, asked, tell: _unpin(run, asked),
        basis=of_point,
        refusals=_not_pinned,
        needs_point=True,
    ),
    "verify": Action(
        verb="Verify",
        title=lambda sight, asked: f"Verify resume point {asked.point}",
        effects=_verify_effects,
        command=lambda sight, asked: _command("verify", sight, asked.point),
        do=lambda run, asked, tell: _verify(run, asked),
        basis=of_point,
        needs_point=True,
    ),
    "rewind": Action(
        verb="Rewind",
        title=lambda sight, asked: f"Rewind to step {sight.point['step']:,}",
        effects=_rewind_effects,
        command=lambda sight, asked: _command("rewind", sight, "--to", asked.point),
        do=lambda run, asked, tell: _rewind(run, asked),
        refusals=_rewind_refusals,
        needs_point=True,
        is_grave=True,
    ),
    "fork": Action(
        verb="Fork",
        title=lambda sight, asked: f"Fork at step {sight.point['step']:,} into a new run",
        effects=_fork_effects,
        command=lambda sight, asked: _command("fork", sight, _new_run(sight, asked), "--at", asked.point),
        do=lambda run, asked, tell: _fork(run, asked),
        refusals=_fork_refusals,
        needs_point=True,
    ),
    "export": Action(
        verb="Export",
        title=lambda sight, asked: f"Export the weights of step {sight.point['step']:,}",
        effects=_export_effects,
        command=lambda sight, asked: _command(
            "export", sight, asked.point, _export_folder(sight.uri, asked.point)
        ),
        do=lambda run, asked, tell: _export(run, asked),
        refusals=lambda sight, asked: _unfit(sight, asked, ""),
        needs_point=True,
    ),
}
