"""The real coordinator of a claimed attempt on an event loop of its own, and the calls of two members."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.actor import Coordinator
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.elastic.formation import GroupSize
from orchestrator.launch.start import run_preparation as starting
from orchestrator.records.membership import GenerationView, StillWaiting
from orchestrator.records.run_status import RunStatus
from orchestrator.records.steps import StateKey, StepRecord
from tests.checkpoint.samples import write_vote
from tests.coordinator.builders import JOIN

LIMIT_S = 60.0
MEMBERS = ("a", "b")


class Coordinated:
    """Two members of an attempt have joined."""

    def __init__(self, store: RunStore, attempt: Attempt, job: JobConfig) -> None:
        self.launch, self.number, self.store = attempt.launch, attempt.number, store
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = starting.coordinator_start(job, attempt, store.storage.root, GroupSize.fixed(2), fixed=True)
        self.coordinator = self.call(self._made(start))
        self.views = self.call(self._joined())

    def __enter__(self) -> Coordinated:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of it is left in this process."""

        async def drop_all() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self.call(drop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    async def _made(self, start: Any) -> Coordinator:
        return Coordinator(start, lambda info: None, store=self.store)

    async def _joined(self) -> list[GenerationView]:
        requests = [
            replace(JOIN, launch=self.launch, member=name, port=port) for port, name in enumerate(MEMBERS, 1)
        ]
        return await asyncio.gather(*map(self.coordinator.join, requests))

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call of the coordinator."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def report(self, records: Sequence[StepRecord]) -> None:
        self.call(self.coordinator.report(self.launch, "a", self.number, 1, tuple(records)))

    def save(self, at: StateKey) -> list[bool]:
        """The answers to the votes of both ranks."""
        votes = [write_vote(self.store.storage, at, rank) for rank in range(2)]

        async def both() -> list[bool]:
            return await asyncio.gather(*(self._answered(vote) for vote in votes))

        return self.call(both())

    async def _answered(self, vote: Any) -> bool:
        """Of a run that has ended, members hear that, and leave with the vote unanswered."""
        while isinstance(answer := await self.coordinator.vote(self.launch, vote), StillWaiting):
            if self.coordinator.has_ended:
                return False
        return answer

    def finished(self, at: StateKey, reason: str) -> None:
        """Both members have finished; the end is written."""
        for member in MEMBERS:
            self.call(self.coordinator.finished(self.launch, member, at, reason))
        assert self.ended().ended == reason

    def ended(self) -> RunStatus:
        """The status that says how the run ended."""
        status: RunStatus = self.call(self.coordinator.status((-1, -1), 0.0))
        while status.ended is None:
            status = self.call(self.coordinator.status((status.attempt, status.version), 1.0))
        return status

    def settle(self, limit_s: float = LIMIT_S) -> bool:
        return self.call(self.coordinator.settle(limit_s))
