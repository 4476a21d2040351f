"""Reads a snapshot of a run within a bound: its claims, its newest point and the tail of its journal.

They are read so that they fit together while the run continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore, point_fates
from orchestrator.coordinator.attempt.survey import LOOKS, require_known
from orchestrator.errors import OrchestratorError, ResumePointError, StorageError
from orchestrator.history.claims.claim_files import RESUME, REWIND, UNREADABLE, unreadable_claim
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.liveness import Busy, Free
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.status.integrity import (
    lost_points,
    missing_pieces,
    newest_there,
    newest_unwritten,
    on_history,
    read_names,
    wrong_sizes,
)
from orchestrator.inspect.status.snapshot import (
    GONE,
    OPEN,
    WAITING,
    NewestGeneration,
    NewestStep,
    Risk,
    RunSnapshot,
    Shortage,
    newest_evaluation,
    speed,
)
from orchestrator.inspect.status.tail import Tail, newest_generation, read_tail
from orchestrator.inspect.status.view import Quiet, RunView, view_of
from orchestrator.launch.doctor.storage_check import attributes_age_s, mount_at
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import EvalRecord


def look_at(store: RunStore, uri: str, watch_s: float, quiet_s: Quiet) -> RunView:
    """The view of the run in `store`, named `uri`.

    A run without an end is watched for a sign of life for at most `watch_s` seconds (0: not at all).
    `quiet_s` as in `inspect.status.view.view_of`. Raises `LaterFormatError` if a later version wrote what
    would be shown.
    """
    watched = None
    if watch_s > 0:
        watched = store.watch_busy(watch_s, time.monotonic, time.sleep)
    snapshot = SnapshotReader(store=store).read(watched, watch_s, watch_s)
    snapshot = as_proven(snapshot, attributes_kept_s(store.storage.root))
    return view_of(uri, snapshot, datetime.now(UTC), quiet_s)


def attributes_kept_s(root: str) -> float:
    """How long, in seconds, this machine may keep file sizes of a storage; 0 for a bucket."""
    return attributes_age_s(mount_at(root)) if "://" not in root else 0.0


def as_proven(snapshot: RunSnapshot, kept_s: float) -> RunSnapshot:
    """The snapshot, where a watch without a sign of life proves no death if it was shorter than this machine
    keeps file sizes.
    """
    if snapshot.alive is not False or snapshot.outcome or snapshot.watched_s > kept_s:
        return snapshot
    return replace(snapshot, alive=None, kept_s=kept_s)


@dataclass(kw_only=True)
class SnapshotReader:
    """Reads snapshots of one run, one after the other.

    `most_bytes` is the most to read of the journal at a time (None: enough for the whole view). The begin
    line of the newest step's generation may lie far back. It is searched for once, and only while a launch
    may be active on the run.
    """

    store: RunStore
    most_bytes: int | None = None
    _begun: dict[str, Any] | None = None

    def read(self, watched: Free | Busy | None, watched_s: float, watch_s: float) -> RunSnapshot:
        """`watched`: the result of watching for `watched_s` of `watch_s` seconds, None without a watch."""
        for _ in range(LOOKS):
            files, (parent, torn) = self.store.attempt_files(), _newest_parent(self.store)
            snapshot, wrong, there = _of_claims(self.store, watched, parent)
            tail = read_tail(self.store.storage, RewoundSteps(self.store), self.most_bytes)
            missing = _missing(self.store, tail, parent, torn, wrong, there)
            if files == self.store.attempt_files():
                break  # else an attempt was claimed between them; it proves nothing, so the last look will do
        else:
            missing = ()  # what seems so may only have come since
        number, inherited = (parent.attempt, parent.inherited) if parent is not None else (0, ())
        own = (k == EventKind.POINT_COMMITTED and line["attempt"] == number for k, line in tail.fates)
        no_point = not inherited and tail.whole_from <= number and not any(own)
        if tail.generation is None and tail.steps and not snapshot.outcome and snapshot.alive is not False:
            tail.generation = self._generation_of(tail.steps[0])
        self._begun = tail.generation
        snapshot = replace(
            snapshot, missing=missing, has_no_point=no_point, watched_s=watched_s, watch_s=watch_s
        )
        skipped = parent is not None and parent.skip is not None
        snapshot = _with_journal(snapshot, tail, is_counted=not skipped)
        return replace(snapshot, evaluation=newest_evaluation(_on_history(tail, parent)))

    def _generation_of(self, step: dict[str, Any]) -> dict[str, Any] | None:
        begun = self._begun
        if begun is not None and all(begun[name] == step[name] for name in ("attempt", "generation")):
            return begun
        return newest_generation(self.store.storage, step["attempt"])


def since_it_moved() -> Quiet:
    """For repeated looks: the seconds since this process saw a new generation or step, or began to look, by
    its own clock.
    """
    at, since = None, time.monotonic()

    def quiet_s(view: RunView, generation: int | None) -> float:
        nonlocal at, since
        found = (view.state, view.attempt, generation, view.step, view.last_step_at)
        if found != at:
            at, since = found, time.monotonic()
            return 0.0
        return time.monotonic() - since

    return quiet_s


def _newest_parent(store: RunStore) -> tuple[ClaimParent | None, frozenset[int]]:
    """The parent file of the newest attempt that has one, and the later attempts with a damaged one. The
    newest claim may have none yet, or never get one.
    """
    torn: set[int] = set()
    for number in reversed(store.claim_numbers()):
        parent = store.read_parent(number)
        if isinstance(parent, ClaimParent):
            return parent, frozenset(torn)
        if parent is not None:
            require_known(store.storage, [parent])
            torn.add(number)
    return None, frozenset(torn)


def _of_claims(
    store: RunStore, watched: Free | Busy | None, parent: ClaimParent | None
) -> tuple[RunSnapshot, tuple[str, ...], list[str]]:
    """What the claims and points say, the faulty files of points newer than `point`, and all committed
    points.
    """
    numbers, alive = store.claim_numbers(), None
    if watched is not None:
        # a claim made since is as alive as one made during the watch
        alive = isinstance(watched, Busy) or max(numbers, default=0) > watched.number
    number = numbers[-1] if numbers else None
    claim = None if number is None else store.read_claim(number)
    if claim is not None and claim.why == UNREADABLE:
        require_known(store.storage, [unreadable_claim(claim.number)])
    end, names = None if number is None else store.read_end(number), store.point_names()
    marked = store.quarantined()
    mine = on_history(parent, [name for name in names if name not in marked])
    point, wrong = newest_there(mine, partial(wrong_sizes, store))
    budgets = parent.budgets if parent is not None else None
    snapshot = RunSnapshot(
        number=number,
        outcome=end.outcome if end else "",
        reason=end.reason if end else "",
        since=_stamp(end.ended) if end else None,
        resumes=claim is not None and claim.why == RESUME,
        stop_tokens=budgets.stop_tokens if budgets else None,
        stop_samples=budgets.stop_samples if budgets else None,
        alive=False if end else alive,
        point=point,
        cursor=_cursor(store, point),
        num_points=len(names),
        quarantined=tuple(name for name in names if name in marked),
    )
    return snapshot, wrong, names


def _with_journal(snapshot: RunSnapshot, tail: Tail, is_counted: bool) -> RunSnapshot:
    """Adds what the tail says. `is_counted`: all tokens after the point are trained, and none is skipped."""
    point = tail.point if tail.point is not None and tail.point["point"] == snapshot.point else None
    newest = max(tail.steps, key=lambda s: (s["attempt"], s["generation"], s["step"]), default=None)
    risk = _risk_since(point, newest)
    if risk is None and is_counted:
        risk = _risk_since_resumed(snapshot, tail, newest)
    risk = risk or _risk_of_all(snapshot, newest)
    waits = tail.waiting
    shortage = None
    if waits is not None:
        shortage = Shortage(there=waits["there"], needed=waits["needed"], t=_stamp(waits["time"]))
    snapshot = replace(
        snapshot,
        point_t=_stamp(point["time"]) if point else None,
        generation=_generation(tail),
        step=_step(newest) if newest else None,
        wanted=tail.wanted,
        shortage=shortage,
        tokens_per_s=_tokens_per_s(tail.steps),
        risk=_timed(risk, tail.steps),
        fault=tail.fault,
        last_sign=_stamp(tail.wrote) if tail.wrote else None,
    )
    if snapshot.state in (GONE, OPEN):
        return replace(snapshot, since=snapshot.last_sign)
    return replace(snapshot, since=shortage.t) if snapshot.state == WAITING and shortage else snapshot


def _on_history(tail: Tail, parent: ClaimParent | None) -> Iterator[tuple[EvalRecord, float]]:
    """Yields the evaluations of states of the history, oldest first.

    The history is followed backwards: from the newest generation of the newest attempt, or from the state
    that this attempt continues if it has formed none, to the state that each generation continues.
    """
    newest = max((id_ for id_ in tail.parents if parent is None or id_[0] == parent.attempt), default=None)
    last: dict[tuple[int, int], float] = {}  # the label of the last state of each generation
    if newest is not None:
        last[newest], at = math.inf, tail.parents[newest]
    else:
        at = parent.parent if parent is not None else None
    while at is not None:
        id_ = at.attempt, at.generation
        last[id_], at = at.step, tail.parents.get(id_)
    for record, t in reversed(tail.evaluations):
        is_own = parent is None or record.attempt >= parent.attempt
        id_ = record.attempt, record.generation
        # what lies before the beginning of the only generation that was read is of that generation
        if record.step <= last.get(id_, math.inf if is_own and newest is None else -1):
            yield record, t


def _generation(tail: Tail) -> NewestGeneration | None:
    line, num_workers = tail.generation, tail.workers
    if line is None or num_workers is None:
        return None
    return NewestGeneration(
        attempt=line["attempt"],
        generation=line["generation"],
        world_size=line["world_size"],
        num_workers=num_workers,
        step=line["step"],
        consumed_samples=line["consumed_samples"],
        consumed_tokens=line["consumed_tokens"],
        global_batch_size=line["global_batch_size"],
        seq_len=line["seq_len"],
        num_shards=line.get("num_shards"),
    )


def _step(line: dict[str, Any]) -> NewestStep:
    return NewestStep(
        attempt=line["attempt"],
        generation=line["generation"],
        step=line["step"],
        consumed_samples=line["consumed_samples"],
        consumed_tokens=line["consumed_tokens"],
        loss=_finite(line["loss"]),
        lr=_finite(line["lr"]),
        t=_stamp(line["time"]),
    )


def _risk_since(point: dict[str, Any] | None, newest: dict[str, Any] | None) -> Risk | None:
    """What came after the newest point. None if a quick look cannot tell: another attempt may have labelled
    its steps anew.
    """
    key = parse_point_name(point["point"]) if point is not None else None
    if point is None or newest is None or key is None or key.attempt != newest["attempt"]:
        return None
    tokens = newest["consumed_tokens"] - point["cursor"]["consumed_tokens"]
    return Risk(steps=max(0, newest["step"] - key.step), tokens=max(0, tokens))


def _risk_since_resumed(snapshot: RunSnapshot, tail: Tail, newest: dict[str, Any] | None) -> Risk | None:
    """What came after a point of an older attempt, which the newest one continues. Its steps may be labelled
    anew, so they are counted by their tokens: all but the last step of a run are of one size.
    """
    begun = tail.generation
    if newest is None or begun is None or snapshot.cursor is None:
        return None
    if not newest["attempt"] == begun["attempt"] == snapshot.number:
        return None
    tokens = max(0, newest["consumed_tokens"] - snapshot.cursor.consumed_tokens)
    return Risk(steps=-(-tokens // (begun["global_batch_size"] * begun["seq_len"])), tokens=tokens)


def _risk_of_all(snapshot: RunSnapshot, newest: dict[str, Any] | None) -> Risk | None:
    """What would be lost before the first point of an attempt that began from nothing."""
    if newest is None or newest["attempt"] != snapshot.number or snapshot.num_points or snapshot.missing:
        return None
    return Risk(steps=newest["step"], tokens=newest["consumed_tokens"]) if snapshot.has_no_point else None


def _timed(risk: Risk | None, steps: Sequence[dict[str, Any]]) -> Risk | None:
    """The risk with its seconds. `steps`: the newest that were read, newest first; older ones are assumed to
    be as fast.
    """
    if risk is None:
        return None
    newest = [float(step["step_s"]) for step in steps[: risk.steps]]
    seconds = sum(newest) / len(newest) * risk.steps if newest else 0.0
    return replace(risk, seconds=round(seconds, 1))


def _tokens_per_s(steps: Sequence[dict[str, Any]]) -> float | None:
    """The speed over the newest steps of one generation, `steps` newest first."""
    if not steps:
        return None
    newest = (steps[0]["attempt"], steps[0]["generation"])
    same = [s for s in reversed(steps) if (s["attempt"], s["generation"]) == newest]
    return speed([s["consumed_tokens"] for s in same], [_finite(s["step_s"]) or 0.0 for s in same])


def _stamp(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _finite(value: Any) -> float | None:
    """None for what is not finite, because JSON cannot express it, and for a loss that a step does not
    have.
    """
    number = float(value) if value is not None else math.nan
    return number if math.isfinite(number) else None


def _missing(
    store: RunStore,
    tail: Tail,
    parent: ClaimParent | None,
    torn: frozenset[int],
    wrong: tuple[str, ...],
    before: list[str],
) -> tuple[str, ...]:
    """The missing parts, determined after the tail was read; see `missing_pieces`. `before`: the committed
    points that this look has seen, so that it checks each only once.
    """
    there, names = store.point_names(before), read_names(store)
    # a deletion may have been in a damaged line
    lost = frozenset[str]() if tail.damaged else lost_points(tail, names, parent, there)
    if lost:  # a running launch may have deleted them since
        lost -= point_fates(read_tail(store.storage).fates, ()).deleted | store.deletions()
    damaged = [tail.damaged] if tail.damaged else []
    unwritten = frozenset[int]() if damaged else newest_unwritten(tail, there)
    return missing_pieces(names, lost, torn, unwritten, bool(tail.steps), wrong, damaged)


def _cursor(store: RunStore, point: str | None) -> Cursor | None:
    """The cursor of a point; None if it has none."""
    try:
        return store.read_point(point).cursor if point is not None else None
    except ResumePointError:
        return None  # damaged, or deleted meanwhile


# ---------------------------------------------------------------------------------------------- rewound steps
class RewoundSteps:
    """Whether a step lies behind a point to which a later attempt went back: by a rewind, or by a start with
    `resume.from`, whatever continued from there since. What only a crash took is no such step: it is trained
    again.

    Reads only claims that are newer than the step, the newest first. `history.claims.lineage` has the whole
    history.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._claims = sorted(store.claim_numbers())  # not read yet
        self._went_back: list[tuple[int, tuple[int, int, int]]] = []  # attempt, its parent

    def __call__(self, step: Mapping[str, Any]) -> bool:
        """`step` is a line of the journal. Raises `StorageError`."""
        attempt, at = step["attempt"], (step["attempt"], step["generation"], step["step"])
        while self._claims and self._claims[-1] > attempt:
            self._look_at(self._claims.pop())
        return any(number > attempt and at > to for number, to in self._went_back)

    def _look_at(self, number: int) -> None:
        try:
            parent = self._store.read_parent(number)
            if not isinstance(parent, ClaimParent) or parent.parent is None:
                return
            if self._store.read_claim(number).why != REWIND:
                return
        except StorageError:
            raise
        except OrchestratorError:
            return  # damaged: its content is unknown, and others report it
        to = parent.parent
        self._went_back.append((number, (to.attempt, to.generation, to.step)))
