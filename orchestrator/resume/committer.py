"""Turns votes into resume points: drives the commit machine and carries out what it asks of storage and
journal.

It decides nothing. Its calls block (they wait for disks), so a coordinator makes them in a thread, one at a
time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from orchestrator.errors import FencedError, OrchestratorError, StorageError
from orchestrator.records import StateKey, StepRecord, Vote
from orchestrator.resume.commit import CommitMachine
from orchestrator.resume.events import (
    Acknowledge,
    CheckNewerClaim,
    ClaimChecked,
    CommitWritten,
    Deleted,
    DeletePoints,
    DiscardSave,
    Event,
    Failed,
    Fence,
    FlushJournal,
    Forming,
    GenerationFormed,
    GiveUp,
    JournalDurable,
    ReadyToForm,
    StoreAction,
    Tick,
    Verified,
    VerifyPoint,
    VoteCast,
    VoterGone,
    WriteCommit,
)
from orchestrator.resume.points import Point, newest_first
from orchestrator.resume.store import RunStore

Hook = Callable[[str, int, int], None]
VOTES_COMPLETE, COMMIT_SENT = (
    "votes_complete",
    "commit_sent",
)  # places of faults: COMMIT not sent; sent, not answered
VOTE_LIMIT_S = 600.0
RNG_RULE = (
    "every micro-batch seeds the generators with (train.seed, index of its first sample); nothing else draws"
)


class StepJournal(Protocol):
    """What committing needs of the journal."""

    def event(self, kind: str, **fields: Any) -> None:
        """Note an event."""

    def step(self, record: StepRecord) -> bool:
        """Note a record; an equal copy of a known one changes nothing."""

    def flush(self) -> StateKey | None:
        """Make all that was noted durable."""

    def covers(self, key: StateKey) -> bool:
        """Whether every step record of the attempt's chain up to `key` is durable."""


class StoreHands:
    """Carries out store actions, one at a time, and answers each with an event. A failure of storage is an
    answer, no exception.
    """

    def __init__(
        self,
        store: RunStore,
        journal: StepJournal,
        attempt: int,
        flat_config: Mapping[str, Any],
        clock: Callable[[], float],
        fault: Hook,
    ) -> None:
        self._store, self._journal, self._attempt = store, journal, attempt
        self._config, self._clock, self._fault = flat_config, clock, fault
        self.newest: Point | None = None

    def perform(self, action: StoreAction) -> Event | None:
        """Carry out `action`; its answer, or None where there is nothing to say."""
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
                return self._answered(None, lambda: self._store.discard(action.name))

    @staticmethod
    def _answered(key: StateKey | None, act: Callable[[], Event | None]) -> Event | None:
        """The answer of `act`. A failure that concerns no save (key None) is left to the next action of its
        kind.
        """
        try:
            return act()
        except OrchestratorError as error:
            return Failed(key=key, reason=str(error)) if key else None

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
        return ClaimChecked(key=action.key, newer=self._store.next_claim_exists(self._attempt))

    def _write(self, action: WriteCommit) -> Event:
        self._fault(VOTES_COMPLETE, action.key.step, -1)
        rng = {"rule": RNG_RULE, "train.seed": self._config.get("train.seed")}
        save_s = self._clock() - action.started_s
        point = self._store.commit_point(action.votes, self._config, rng, action.parent, save_s)
        self._fault(COMMIT_SENT, action.key.step, -1)
        self._journal.event(
            "point committed", step=point.key.step, point=point.name, bytes=point.num_bytes, save_s=save_s
        )
        if self.newest is None or point.key > self.newest.key:
            self.newest = point
        return CommitWritten(key=action.key)

    def _verify(self, action: VerifyPoint) -> Event:
        try:
            found = [str(damage) for damage in self._store.verify_point(action.name)]
        except OrchestratorError as error:
            found = [str(error)]
        if found:
            self._journal.event("point not verified", point=action.name, reasons=found)
        return Verified(name=action.name, healthy=not found)

    def _delete(self, action: DeletePoints) -> Event:
        gone: list[str] = []
        for name in action.names:
            try:
                self._store.delete_point(name)
            except StorageError as error:
                self._journal.event("point not deleted", point=name, reason=str(error))
                break  # tried again after the next commit; the order, oldest first, is kept
            gone.append(name)
        if gone:
            self._journal.event("points deleted", points=gone)
        return Deleted(names=tuple(gone), failed=action.names[len(gone) :])


class PointCommitter:
    """The saves and points of one attempt. Every call returns when all that it made possible is done.

    Raises `FencedError`, from any call, once a newer claim was seen: nothing is acknowledged or deleted any
    more.
    """

    def __init__(
        self,
        store: RunStore,
        journal: StepJournal,
        *,
        attempt: int,
        inherited: Sequence[str],
        keep_latest: int,
        flat_config: Mapping[str, Any],
        pinned: str | None,
        fault: Hook = lambda place, step, rank: None,
        clock: Callable[[], float] = time.monotonic,
        vote_limit_s: float = VOTE_LIMIT_S,
    ) -> None:
        """`inherited`: the points that the claim inherited; `pinned`: the claim's parent, if that is a point
        of this run.
        """
        self._hands = StoreHands(store, journal, attempt, flat_config, clock, fault)
        self._journal, self._clock, self._attempt = journal, clock, attempt
        self._machine = CommitMachine(
            attempt=attempt,
            keep_latest=keep_latest,
            vote_limit_s=vote_limit_s,
            points=tuple(newest_first(inherited)[::-1]),
            pinned=pinned,
        )
        self._answers: list[tuple[StateKey, int, bool]] = []

    @property
    def newest(self) -> Point | None:
        """The newest point that this attempt committed and that still counts; None before the first."""
        return self._hands.newest

    def vote(self, vote: Vote) -> None:
        """A rank's part of a save is written and synced."""
        self._feed(VoteCast(vote=vote, now_s=self._clock()))

    def voter_gone(self, generation: int, rank: int) -> None:
        """The member that was `rank` of `generation` is dead or left out."""
        self._feed(VoterGone(generation=generation, rank=rank))

    def forming(self) -> None:
        """No COMMIT is written from here to `generation_formed`: call it before the next generation's parent
        is chosen.
        """
        self._feed(Forming())

    def generation_formed(self, generation: int, parent: StateKey | None) -> bool:
        """The next generation continues `parent`: what is not on its path is given up, the rest goes on.

        False, and nothing changed, if a point committed meanwhile is not on that path: then the parent must
        be chosen again.
        """
        self.forming()
        if self._machine.outdates(generation, parent):
            return False
        self._feed(GenerationFormed(generation=generation, parent=parent))
        return True

    def advance(self) -> None:
        """Time goes on: give up saves that waited too long, and look for a newer claim every 5 s."""
        self._feed(Tick(now_s=self._clock()))

    def take_answers(self) -> list[tuple[StateKey, int, bool]]:
        """(key, rank, committed) of the votes decided since the last call; a repeated vote is answered again."""
        answers, self._answers = self._answers, []
        return answers

    def _feed(self, first: Event) -> None:
        events = deque([first])
        while events:
            event = events.popleft()
            self._machine, actions = self._machine.on(event)
            for action in actions:
                match action:
                    case Acknowledge():
                        self._answers += [(action.key, rank, True) for rank in action.ranks]
                    case GiveUp():
                        self._answers += [(action.key, rank, False) for rank in action.ranks]
                        self._journal.event(
                            "save given up",
                            step=action.key.step,
                            point=action.key.point_name,
                            reason=action.reason,
                        )
                    case ReadyToForm() | Fence():
                        pass  # calls are synchronous: no COMMIT is under way between them; the fence is told below
                    case _:
                        answer = self._hands.perform(action)
                        if answer is not None:
                            events.append(answer)
        if self._machine.fenced:
            raise FencedError(
                f"attempt {self._attempt + 1} of this run exists, this is attempt {self._attempt}; "
                "another launch has taken the run over, so this one ends"
            )
