"""Commits in the coordinator: votes come in, the commit machine decides, a thread does what waits for
storage, and every voter is answered.

It knows neither who trains nor when a generation is formed; what others must hear it reports to its listener.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from orchestrator.errors import StorageError
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.records import StateKey, StillWaiting, Vote
from orchestrator.resume.commit_events import (
    Acknowledge,
    DeletePoints,
    DiscardSave,
    Event,
    Fence,
    GiveUp,
    StoreAction,
    VerifyPoint,
    VoteCast,
)
from orchestrator.resume.commit_machine import CommitMachine
from orchestrator.resume.points import Point
from orchestrator.resume.store_actions import PointCommitter, failure, note_committed

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
    no COMMIT is under way when the parent of a generation is chosen (membership rule 15). Points are read
    back and deleted outside it: what nobody needs any more keeps no generation from forming.
    """

    def __init__(
        self,
        machine: CommitMachine,
        committer: PointCommitter,
        journal: JournalWriter,
        newest: Point | None,
        listener: CommitListener,
        storage_limit_s: float,
    ) -> None:
        """`newest`: the point that the attempt continues. `storage_limit_s`: how long one operation of the
        storage may take before it counts as failed.
        """
        self.lock = asyncio.Lock()
        self.newest = newest  # the newest committed point on the lineage
        self._machine, self._committer, self._journal = machine, committer, journal
        self._listener, self._storage_limit_s = listener, storage_limit_s
        # One thread for everything that waits for storage: its operations stay in order and the calls of
        # members are answered meanwhile.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage")
        self._votes: dict[tuple[StateKey, int], asyncio.Future[bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> bool:
        """Votes of some save are still missing, or it is being committed."""
        return bool(self._machine.saves)

    async def vote(self, vote: Vote, wait_s: float | None = None) -> bool | StillWaiting:
        """True once the point is committed, False if the save was given up; `StillWaiting` after `wait_s`. A
        copy changes nothing.
        """
        slot = (vote.key, vote.rank)
        answer = self._votes.get(slot)
        if answer is None:
            answer = self._votes[slot] = asyncio.get_running_loop().create_future()
            self.notify_soon(VoteCast(vote=vote, now_s=time.monotonic()))
        await asyncio.wait([answer], timeout=wait_s)
        return answer.result() if answer.done() else StillWaiting()

    def notify_soon(self, event: Event) -> None:
        """`notify`, without waiting for it."""
        self._in_background(self.notify(event))

    async def notify(self, event: Event) -> None:
        """Reports to the machine what happened and does what it asks for."""
        async with self.lock:
            await self.advance(event)

    async def advance(self, event: Event) -> None:
        """`notify` for a caller that holds the lock."""
        todo = collections.deque([event])
        while todo:
            self._machine, actions = self._machine.on(todo.popleft())
            for action in actions:
                match action:
                    case Acknowledge() | GiveUp():
                        await self._answer(action)
                    case Fence():
                        await self._listener.fenced(action.reason)
                    case VerifyPoint() | DeletePoints() | DiscardSave():
                        # reads a whole point, or deletes one: nobody waits for that
                        self._in_background(self._perform_aside(action))
                    case _:
                        answer = await self._perform(action)
                        if answer is not None:
                            todo.append(answer)

    async def on_disk(self, work: Callable[[], Result], limit_s: float | None = None) -> Result:
        """Runs `work` in the thread that waits for storage, after what was given to it before. Raises
        `StorageError` if it takes longer than `limit_s` (default: the limit of the storage); it may still be
        carried out then.
        """
        limit_s = self._storage_limit_s if limit_s is None else limit_s
        running = asyncio.get_running_loop().run_in_executor(self._disk, work)
        try:
            return await asyncio.wait_for(running, limit_s)
        except TimeoutError as error:
            raise StorageError(
                f"storage has not answered for {limit_s:g} s; check that it is mounted and reachable"
            ) from error

    async def settle(self) -> None:
        """Returns when all that was begun in the background has come to its end."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def refuse_all(self) -> None:
        """No vote will be acknowledged any more."""
        for answer in self._votes.values():
            if not answer.done():
                answer.set_result(False)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform(self, action: StoreAction) -> Event | None:
        try:
            return await self.on_disk(partial(self._committer.perform, action))
        except StorageError as error:
            return failure(action, error)

    async def _perform_aside(self, action: StoreAction) -> None:
        answer = await asyncio.to_thread(self._committer.perform, action)
        for damage in self._committer.take_damages():
            self._journal.event(
                EventKind.DAMAGED_POINT, point=damage.point, file=damage.file, reason=damage.reason
            )
            await self._listener.warned(str(damage))
        if answer is not None:
            await self.notify(answer)

    async def _answer(self, action: Acknowledge | GiveUp) -> None:
        committed, point = isinstance(action, Acknowledge), self._committer.last_point
        is_newer = point is not None and (self.newest is None or point.key > self.newest.key)
        if committed and point is not None and point.key == action.key and is_newer:
            self.newest = point
            note_committed(self._journal, point)
            await self._listener.committed(point)
        if isinstance(action, GiveUp):
            self._journal.event(EventKind.SAVE_GIVEN_UP, point=action.key.point_name, reason=action.reason)
            text = f"the save of {action.key.point_name} was given up: {action.reason}"
            await self._listener.warned(text)
        for rank in action.ranks:
            answer = self._votes.pop((action.key, rank), None)
            if answer is not None and not answer.done():
                answer.set_result(committed)
