"""Carries out the commit machine's actions on storage and journal, and answers with events.

Its calls block (they wait for disks), so a coordinator makes them in a thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from orchestrator.checkpoint.commit.commit_events import (
    CheckNewerClaim,
    ClaimChecked,
    CommitWritten,
    Deleted,
    DeletePoints,
    DiscardSave,
    Event,
    Failed,
    FlushJournal,
    JournalDurable,
    StoreAction,
    Verified,
    VerifyPoint,
    WriteCommit,
)
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import OrchestratorError, StorageError, text_of
from orchestrator.faults import Hook, no_fault
from orchestrator.history.claims.claim_files import seal_starts
from orchestrator.history.claims.claims import GenerationId
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.records.points import Damage
from orchestrator.records.steps import StateKey

# Places of scripted faults: all votes are there and COMMIT is not sent; COMMIT is sent and no rank is
# answered.
VOTES_COMPLETE, COMMIT_SENT = "votes_complete", "commit_sent"


def note_committed(
    journal: JournalWriter,
    point: Point,
    peak_memory_bytes: Sequence[int] = (),
    mean_loss: float | None = None,
) -> None:
    """Journals a committed point with its cursor, which stays when the point is deleted. Audits begin there.

    `peak_memory_bytes`: of each rank that voted for it, by rank. `mean_loss` is that of the steps since the
    previous point, as far as this attempt trained them.
    """
    journal.event(
        EventKind.POINT_COMMITTED,
        point=point.name,
        bytes=point.num_bytes,
        save_s=point.commit.save_s,
        save_blocked_s=point.commit.save_blocked_s,
        cursor=encode(point.cursor),
        peak_memory_bytes=list(peak_memory_bytes),
        mean_loss=mean_loss,
    )


def failure(action: StoreAction, error: Exception) -> Event | None:
    """Returns the answer to an action that did not finish. Whether it had an effect is unknown."""
    match action:
        case VerifyPoint():
            return Verified(name=action.name, healthy=False)  # unknown now; the next commit asks again
        case DeletePoints():
            # points that are gone are found gone the next time
            return Deleted(names=(), failed=action.names, reason=text_of(error))
        case DiscardSave():
            return None
        case _:
            return failed(action.key, error)


def failed(key: StateKey | None, error: Exception) -> Event | None:
    """Returns the answer to a failed action for the save of `key`.

    A failure that concerns no save is left to the next such action.
    """
    return Failed(key=key, reason=text_of(error)) if key else None


class PointCommitter:
    """Performs the store actions of one attempt.

    `config` (flat) and `rng` are the documents that each point gets. `run_id` is run.json's. `clock` is that
    of the machine's events. `fault` is called where a scripted fault may strike. Actions run one after the
    other, except `VerifyPoint`, which may run concurrently. A failure of storage is an answer, never an
    exception.
    """

    def __init__(
        self,
        store: RunStore,
        journal: JournalWriter,
        attempt: int,
        config: Mapping[str, Any],
        rng: Mapping[str, Any],
        clock: Callable[[], float],
        fault: Hook = no_fault,
        run_id: str = "",
    ) -> None:
        self._store, self._journal, self._attempt, self._run_id = store, journal, attempt, run_id
        self._config, self._rng, self._clock, self._fault = config, rng, clock, fault
        self._damages: list[Damage] = []
        self._sealed: set[GenerationId] = set()
        self.last_loss: float | None = None  # the mean loss of the steps that led to the last point
        # the point that was committed last; its votes may not be answered yet
        self.last_point: Point | None = None
        self.last_took_s: float | None = None  # from the begin of its save, as seen by the slowest voter
        self.last_peaks: list[int] = []  # peak_memory_bytes of the ranks that voted for it

    def take_damages(self) -> tuple[Damage, ...]:
        """Returns what `VerifyPoint` found wrong since the last call, for the caller to report."""
        found, self._damages = tuple(self._damages), []
        return found

    def perform(self, action: StoreAction) -> Event | None:
        """Carries out `action`; returns its answer, or None if there is none."""
        match action:
            case FlushJournal():
                return self._answered(action.key, lambda: self._flush(action))
            case CheckNewerClaim():
                return self._answered(action.key, lambda: self._check(action))
            case WriteCommit():
                return self._answered(action.key, lambda: self._write(action))
            case VerifyPoint():
                return self._verify(action)
            case DeletePoints():
                return self._delete(action)
            case DiscardSave():
                return self._answered(None, lambda: self._discard(action))

    @staticmethod
    def _answered(key: StateKey | None, act: Callable[[], Event | None]) -> Event | None:
        """Returns the answer of `act`. A failure that concerns no save (key None) is left to the next such
        action.
        """
        try:
            return act()
        except OrchestratorError as error:
            return failed(key, error)

    def _flush(self, action: FlushJournal) -> Event:
        for record in action.records:
            self._journal.step(record)
        self._journal.flush()
        if not self._journal.covers(action.key):
            return Failed(
                key=action.key, reason="the journal lacks step records before it, and no voter brought them"
            )
        return JournalDurable(key=action.key)

    def _check(self, action: CheckNewerClaim) -> Event:
        newer = self._store.next_claim_exists(self._attempt)
        # run.json is read last: if the folder is replaced between the two, the reason names the other run
        journal_lost = self._journal.why_lost()
        lost = self._store.why_not_mine(self._run_id) or journal_lost
        marked = None
        with suppress(StorageError):  # only deletions need the marks; a failure must not prevent a commit
            marked = self._store.quarantined()
        return ClaimChecked(key=action.key, newer=newer, lost=lost, quarantined=marked)

    def _write(self, action: WriteCommit) -> Event:
        self._fault(VOTES_COMPLETE, action.key.step, -1)
        self._seal_starts(action.key)
        save_s = self._clock() - action.started_s
        point = self._store.commit_point(
            action.votes, self._config, self._rng, action.parent, save_s, self._run_id
        )
        before = self.last_point.key if self.last_point is not None else None
        self.last_loss = self._journal.mean_loss(action.key, before)
        self.last_point = point
        self.last_took_s = self._clock() - action.started_s + max(vote.part_s for vote in action.votes)
        self.last_peaks = [vote.peak_memory_bytes for vote in sorted(action.votes, key=lambda v: v.rank)]
        self._fault(COMMIT_SENT, action.key.step, -1)
        return CommitWritten(key=action.key, mean_loss=self.last_loss)

    def _seal_starts(self, key: StateKey) -> None:
        """Makes the sealed copies of this attempt's generations that the point depends on (rule 2)."""
        starts = [each for each in self._journal.starts_up_to(key) if each.id not in self._sealed]
        if starts:
            seal_starts(self._store.storage, starts, self._run_id)
            self._sealed.update(start.id for start in starts)

    def _verify(self, action: VerifyPoint) -> Event:
        began = self._clock()
        try:
            damages = self._store.verify_point(action.name)
        except OrchestratorError:
            return Verified(name=action.name, healthy=False)  # unknown now; the next commit asks again
        self._damages += damages
        self._mark(action.name, damages)
        self._journal.event(
            EventKind.POINT_VERIFIED,
            point=action.name,
            checked="digests",
            healthy=not damages,
            seconds=self._clock() - began,
        )
        return Verified(name=action.name, healthy=not damages)

    def _mark(self, name: str, damages: Sequence[Damage]) -> None:
        """Makes a mark. A failure does not stop training: only commands that compare sizes miss the mark."""
        with suppress(StorageError):
            self._store.note_reading(name, damages, f"attempt {self._attempt}")

    def _delete(self, action: DeletePoints) -> Event:
        gone: list[str] = []
        try:
            names = [name for name in action.names if self._may_delete(name)]
            # A later claim may go back to one of these: see `pins`. Their holds stay.
            if not names or self._store.next_claim_exists(self._attempt):
                return Deleted(names=(), failed=action.names)
            # after a kill in the middle, it must not look as if points had vanished
            self._journal.event(EventKind.DELETING_POINTS, points=names)
            self._journal.flush()
        except StorageError as error:
            return self._not_deleted(action, gone, action.names[0], error)
        for name in names:
            try:
                self._store.delete_point(name)
                self._store.deleted(name)
            except StorageError as error:  # the others are retried together with it, in order, oldest first
                return self._not_deleted(action, gone, name, error)
            gone.append(name)
        return self._deleted(action, gone)

    def _discard(self, action: DiscardSave) -> None:
        self._store.discard(action.name)

    def _not_deleted(self, action: DeletePoints, gone: list[str], name: str, error: StorageError) -> Deleted:
        self._journal.event(EventKind.POINT_NOT_DELETED, point=name, reason=str(error))
        found = self._deleted(action, gone)
        rest = tuple(each for each in found.failed if each != name)
        return dataclasses.replace(found, failed=(name, *rest), reason=str(error))

    def _deleted(self, action: DeletePoints, gone: list[str]) -> Deleted:
        if gone:
            self._journal.event(EventKind.POINTS_DELETED, points=gone)
        return Deleted(names=tuple(gone), failed=tuple(name for name in action.names if name not in gone))

    def _may_delete(self, name: str) -> bool:
        """Whether the point is not pinned. Called before the deletion is journalled; a pin takes
        precedence.
        """
        by = f"attempt {self._attempt}"
        return self._store.may_delete(name, by, "resume.keep_latest", self._run_id)
