"""Commits in the coordinator: votes come in, the commit machine decides, a thread does what waits for
storage, and every voter is answered.

It knows neither who trains nor when a generation is formed; what others must hear it tells its listener.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from orchestrator.monitor.journal import JournalWriter
from orchestrator.records import StateKey, Vote
from orchestrator.resume.commit import CommitMachine
from orchestrator.resume.committer import PointCommitter, note_committed
from orchestrator.resume.events import (
    Acknowledge,
    Event,
    Fence,
    GiveUp,
    ReadyToForm,
    VerifyPoint,
    VoteCast,
)
from orchestrator.resume.points import Point

Result = TypeVar("Result")


class CommitListener(Protocol):
    """Who hears of it."""

    async def committed(self, point: Point) -> None:
        """`point` is the newest committed one."""

    async def warned(self, text: str) -> None:
        """What the user should hear of: a save that was given up, damage."""

    async def fenced(self, reason: str) -> None:
        """A newer attempt exists: this one ends."""


class Commits:
    """Drives the commit machine of one attempt; all methods run on one event loop.

    `lock` is held while the machine's actions are carried out. Whoever forms a generation takes it, too: so
    no COMMIT is under way when the parent of a generation is chosen (MEMBERSHIP.md rule 15).
    """

    def __init__(
        self,
        machine: CommitMachine,
        committer: PointCommitter,
        journal: JournalWriter,
        newest: Point | None,
        listener: CommitListener,
    ) -> None:
        self.lock = asyncio.Lock()
        self.newest = newest  # the newest committed point on the lineage
        self._machine, self._committer, self._journal = machine, committer, journal
        self._listener = listener
        # One thread for everything that waits for storage: its operations stay in order and the calls of
        # members are answered meanwhile.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage")
        self._votes: dict[tuple[StateKey, int], asyncio.Future[bool]] = {}
        self._verifying: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> bool:
        """Votes of some save are still missing, or it is being committed."""
        return bool(self._machine.saves)

    async def vote(self, vote: Vote) -> bool:
        """True once the point is committed, False if the save was given up. A copy changes nothing."""
        slot = (vote.key, vote.rank)
        answer = self._votes.get(slot)
        if answer is None:
            answer = self._votes[slot] = asyncio.get_running_loop().create_future()
            await self.tell(VoteCast(vote=vote, now_s=time.monotonic()))
        return await asyncio.shield(answer)

    async def tell(self, event: Event) -> None:
        """Tells the machine what happened and does what it asks for."""
        async with self.lock:
            await self.advance(event)

    async def advance(self, event: Event) -> None:
        """`tell` for a caller that holds the lock."""
        todo = collections.deque([event])
        while todo:
            self._machine, actions = self._machine.on(todo.popleft())
            for action in actions:
                match action:
                    case Acknowledge() | GiveUp():
                        await self._answer(action)
                    case Fence():
                        await self._listener.fenced(action.reason)
                    case ReadyToForm():
                        pass  # the lock has seen to it
                    case VerifyPoint():
                        # reads a whole point back: nobody waits for that
                        task = asyncio.get_running_loop().create_task(self._verify(action))
                        self._verifying.add(task)
                        task.add_done_callback(self._verifying.discard)
                    case _:
                        answer = await self.on_disk(partial(self._committer.perform, action))
                        if answer is not None:
                            todo.append(answer)

    async def on_disk(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in the thread that waits for storage, after what was given to it before."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def refuse_all(self) -> None:
        """No vote will be acknowledged any more."""
        for answer in self._votes.values():
            if not answer.done():
                answer.set_result(False)

    async def _verify(self, action: VerifyPoint) -> None:
        answer = await asyncio.to_thread(self._committer.perform, action)
        for damage in self._committer.take_damages():
            self._journal.event("damaged point", point=damage.point, file=damage.file, reason=damage.reason)
            await self._listener.warned(str(damage))
        if answer is not None:
            await self.tell(answer)

    async def _answer(self, action: Acknowledge | GiveUp) -> None:
        committed, point = isinstance(action, Acknowledge), self._committer.last_point
        is_newer = point is not None and (self.newest is None or point.key > self.newest.key)
        if committed and point is not None and point.key == action.key and is_newer:
            self.newest = point
            note_committed(self._journal, point)
            await self._listener.committed(point)
        if isinstance(action, GiveUp):
            self._journal.event("save given up", point=action.key.point_name, reason=action.reason)
            text = f"the save of {action.key.point_name} was given up: {action.reason}"
            await self._listener.warned(text)
        for rank in action.ranks:
            answer = self._votes.pop((action.key, rank), None)
            if answer is not None and not answer.done():
                answer.set_result(committed)
