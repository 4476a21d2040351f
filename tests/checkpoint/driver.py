"""Drives the commit machine and the committer the way a coordinator does, in one thread, for the tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    Event,
    Fence,
    GenerationFormed,
    GiveUp,
    VoteCast,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from tests.checkpoint.samples import CONFIG, key, record, started_journal, write_vote


class Coordinator:
    """One attempt whose first generation has formed. `answers` are (key, rank, committed), in order;
    `reasons`: why saves were given up.
    """

    def __init__(
        self,
        store: RunStore,
        keep_latest: int = 2,
        num_records: int = 60,
        journal: JournalWriter | None = None,
        inherited: Sequence[str] = (),
        attempt: int = 1,
        **more: Any,
    ) -> None:
        """`journal`: one that has the records already. It continues the last one of the inherited points."""
        self.store = store
        self.journal: JournalWriter = journal or started_journal(store.storage)
        if journal is None:
            for step in range(1, num_records):
                self.journal.step(record(key(step)))
        name = inherited[-1] if inherited else None
        self.machine = CommitMachine(
            attempt=attempt,
            kept=KeptPoints(keep_latest=keep_latest, names=tuple(inherited), pinned=name),
            vote_limit_s=60,
        )
        rng = {"rule": "none"}
        self.committer = PointCommitter(store, self.journal, attempt, CONFIG, rng, lambda: 3.5, **more)
        self.answers: list[tuple[StateKey, int, bool]] = []
        self.reasons: list[str] = []
        self.fenced = False
        self.form(1, parse_point_name(name) if name else None)

    def form(self, generation: int, parent: StateKey | None) -> None:
        self.tell(GenerationFormed(generation=generation, parent=parent))

    def save(self, at: StateKey, ranks: tuple[int, ...] = (0, 1)) -> None:
        """The ranks write their parts and vote."""
        for rank in ranks:
            self.vote(write_vote(self.store.storage, at, rank))

    def vote(self, vote: Vote) -> None:
        self.tell(VoteCast(vote=vote, now_s=2.0))

    def tell(self, first: Event) -> None:
        events = deque([first])
        while events:
            self.machine, actions = self.machine.on(events.popleft())
            for action in actions:
                match action:
                    case Acknowledge():
                        self.answers += [(action.key, rank, True) for rank in action.ranks]
                    case GiveUp():
                        self.answers += [(action.key, rank, False) for rank in action.ranks]
                        self.reasons.append(action.reason)
                    case Fence():
                        self.fenced = True
                    case _:
                        answer = self.committer.perform(action)
                        if answer is not None:
                            events.append(answer)

    def take_answers(self) -> list[tuple[StateKey, int, bool]]:
        answers, self.answers = self.answers, []
        return answers
