"""Reads the current state of a run: its claims, its newest point and the tail of its journal.

They are read so that they fit together while the run continues. `inspect.status.view` interprets them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from orchestrator.checkpoint.points.point_status import point_fates
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import LOOKS, require_known
from orchestrator.errors import OrchestratorError, ResumePointError, StorageError
from orchestrator.history.claims.claim_files import RESUME, REWIND, UNREADABLE, unreadable_claim
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.liveness import Busy, Free
from orchestrator.inspect.status.missing import (
    lost_points,
    missing_pieces,
    newest_there,
    newest_unwritten,
    on_history,
    read_names,
    wrong_sizes,
)
from orchestrator.inspect.status.tail import Tail, newest_generation, read_tail
from orchestrator.inspect.status.view import AttemptFacts, Quiet, RunView, left_out, view_of
from orchestrator.launch.doctor.mount_check import attributes_age_s, mount_at
from orchestrator.records.cursor import Cursor


# Determines for a quick look which steps in a run's journal are no longer steps of the run.
#
# It reads only claims that are newer than these steps, the newest first. `history.claims.lineage` has the
# whole history.
class SetAside:
    """Whether a step lies behind a point to which a later attempt went back: by a rewind, or by a start with
    `resume.from`, whatever continued from there since. What only a crash took is no such step: it is trained
    again.
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


def look_at(store: RunStore, uri: str, watch_s: float, quiet_s: Quiet) -> RunView:
    """The view of the run in `store`, named `uri`.

    A run without an end is watched for a sign of life for at most `watch_s` seconds (0: not at all).
    `quiet_s` as in `inspect.status.view.view_of`. Raises `LaterFormatError` if a later version wrote what
    would be shown.
    """
    watched = None
    if watch_s > 0:
        watched = store.watch_busy(watch_s, time.monotonic, time.sleep)
    facts, tail = read_newest(store, watched, watch_s)
    facts = as_proven(facts, attributes_kept_s(store.storage.root))
    return view_of(uri, facts, tail, datetime.now(UTC), quiet_s)


def attributes_kept_s(root: str) -> float:
    """How long, in seconds, this machine may keep file sizes of a storage; 0 for a bucket."""
    return attributes_age_s(mount_at(root)) if "://" not in root else 0.0


def as_proven(facts: AttemptFacts, kept_s: float) -> AttemptFacts:
    """The facts, where a watch without a sign of life proves no death if it was shorter than this machine
    keeps file sizes.
    """
    if facts.alive is not False or facts.outcome or facts.watched_s > kept_s:
        return facts
    return replace(facts, alive=None, kept_s=kept_s)


def read_newest(
    store: RunStore,
    watched: Free | Busy | None,
    watch_s: float,
    most_bytes: int | None = None,
    begun: dict[str, Any] | None = None,
) -> tuple[AttemptFacts, Tail]:
    """Reads the input of `view_of`.

    `watched`: the result of watching for `watch_s` seconds, None without a watch. `most_bytes`: the most to
    read of the journal (None: enough for the whole view). The begin line of the newest step's generation may
    lie far back. It is searched for, unless it is given as `begun`, or no launch is active on the run.
    """
    for _ in range(LOOKS):
        files, (parent, torn) = store.attempt_files(), _newest_parent(store)
        facts, wrong, there = _facts(store, watched, watch_s, parent)
        tail = read_tail(store.storage, SetAside(store), most_bytes)
        missing = _missing(store, tail, parent, torn, wrong, there)
        if files == store.attempt_files():
            break  # else an attempt was claimed between them; it proves nothing, so the last look will do
    else:
        missing = ()  # what seems so may only have come since
    number, inherited = (parent.attempt, parent.inherited) if parent is not None else (0, ())
    no_point = not inherited and tail.whole_from <= number
    if tail.generation is None and tail.steps and not facts.outcome and facts.alive is not False:
        step = tail.steps[0]
        is_known = begun is not None and all(begun[k] == step[k] for k in ("attempt", "generation"))
        tail.generation = begun if is_known else newest_generation(store.storage, step["attempt"])
    return replace(facts, missing=missing, has_no_point=no_point), tail


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


def _facts(
    store: RunStore, watched: Free | Busy | None, watch_s: float, parent: ClaimParent | None
) -> tuple[AttemptFacts, tuple[str, ...], list[str]]:
    """The facts in the claims, the missing files of points newer than `point`, and the committed points."""
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
    budgets, cursor = parent.budgets if parent is not None else None, _cursor(store, point)
    skipped = parent is not None and parent.skip is not None
    facts = AttemptFacts(
        number=number,
        outcome=end.outcome if end else "",
        reason=end.reason if end else "",
        point=point,
        points=len(names),
        stop_tokens=budgets.stop_tokens if budgets else None,
        stop_samples=budgets.stop_samples if budgets else None,
        alive=False if end else alive,
        watched_s=watch_s,
        skipped=None if cursor is None else {n: at.bad_documents for n, at in cursor.sources.items()},
        left_out=None if cursor is None else left_out(cursor),
        quarantined=tuple(name for name in names if name in marked),
        resumes=claim is not None and claim.why == RESUME,
        point_tokens=None if cursor is None or skipped else cursor.consumed_tokens,
    )
    return facts, wrong, names


def _missing(
    store: RunStore,
    tail: Tail,
    parent: ClaimParent | None,
    torn: frozenset[int],
    wrong: tuple[str, ...],
    before: list[str],
) -> tuple[str, ...]:
    """The missing parts, determined after the tail was read; see `monitor.missing`. `before`: the committed
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
