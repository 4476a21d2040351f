"""Commits in the coordinator: votes come in, the commit machine decides, a thread does what waits for
storage, and every voter is answered.

It knows neither who trains nor when a generation is formed; what others must hear it reports to its listener.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history import sentences
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.records.membership import StillWaiting
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.resume.commit_events import (
    Acknowledge,
    DeletePoints,
    DeletesFail,
    DeletesWork,
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
from orchestrator.resume.save_retries import MOST_S, SaveRetries
from orchestrator.resume.store_actions import PointCommitter, failure, note_committed

Result = TypeVar("Result")

TELL_S = 30.0  # after which the user hears that storage does not answer: far below the limit


class CommitListener(Protocol):
    """Who hears of it."""

    async def committed(self, point: Point, newest: bool) -> None:
        """`point` is committed; `newest`: there is no newer one."""

    async def gave_up(self, given_up: GiveUp, text: str) -> None:
        """A save was given up, which `text` says to the user."""

    def last_tried_s(self, key: StateKey) -> float | None:
        """For how many seconds it is tried to save the state of `key` where that is the run's last one; None:
        steps follow it, as far as is known.
        """

    async def warned(self, text: str) -> None:
        """What else the user should hear of: damage."""

    async def fenced(self, reason: str) -> None:
        """A newer attempt exists: this one ends."""

    async def broken(self, error: Exception) -> None:
        """What was done in the background ended with an error of ours; nothing can be relied on any more."""


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
        self.retries = SaveRetries()  # its user asks when one is due
        self.newest = newest  # the newest committed point on the lineage
        self._machine, self._committer, self._journal = machine, committer, journal
        self._listener, self._storage_limit_s = listener, storage_limit_s
        # while saves fail for storage's sake: the user was told what follows, of a last state (True) or not
        self._told: set[bool] = set()
        self._lost: StateKey | None = None  # the newest save of an older attempt that nobody decided
        # One thread for everything that waits for storage: its operations stay in order and the calls of
        # members are answered meanwhile.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage")
        self._hangs: tuple[Future[Any], float] | None = None  # what that thread was given up in, begun when
        self._told_hang = False
        self._votes: dict[tuple[StateKey, int], asyncio.Future[bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> bool:
        """Votes of some save are still missing, or it is being committed."""
        return bool(self._machine.saves)

    @property
    def took_s(self) -> float | None:
        """How long the newest point of this attempt took from the begin of its save to its commit."""
        return self._committer.last_took_s

    def is_hopeless(self, key: StateKey, world_size: int) -> bool:
        """See `CommitMachine`."""
        return self._machine.is_hopeless(key, world_size)

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

    def lost(self, key: StateKey) -> None:
        """The save of `key` was begun under an older attempt of this launch, and its coordinator is gone: if
        it is no point, it is given up. A copy changes nothing.
        """
        newest = max((each for each in (self._lost, self.newest and self.newest.key) if each), default=None)
        if newest is None or key > newest:
            self._lost = key
            self._in_background(partial(self._give_up_lost, key))

    async def _give_up_lost(self, key: StateKey) -> None:
        reason = "the coordinator ended before it was decided, and another one has taken over"
        async with self.lock:
            await self._answer(GiveUp(key=key, ranks=(), reason=reason))

    def notify_soon(self, event: Event) -> None:
        """`notify`, without waiting for it."""
        self._in_background(partial(self.notify, event))

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
                    case DeletesFail():
                        text = sentences.deletes_fail(action.name, action.reason, MOST_S)
                        await self._listener.warned(text)
                    case DeletesWork():
                        await self._listener.warned(sentences.deletes_work(action.name))
                    case Fence():
                        await self._listener.fenced(action.reason)
                    case VerifyPoint() | DeletePoints() | DiscardSave():
                        # reads a whole point, or deletes one: nobody waits for that
                        self._in_background(partial(self._perform_aside, action))
                    case _:
                        answer = await self._perform(action)
                        if answer is not None:
                            todo.append(answer)

    @property
    def hangs_since(self) -> float | None:
        """When that began which storage has not answered within its limit, and still does not; None if there
        is nothing like that.
        """
        return None if self._hangs is None or self._hangs[0].done() else self._hangs[1]

    async def on_disk(self, work: Callable[[], Result], limit_s: float | None = None) -> Result:
        """Runs `work` in the thread that waits for storage, after what was given to it before. Raises
        `StorageError` if it takes longer than `limit_s` (default: the limit of the storage); it may still be
        carried out then. By default it also raises, and carries out nothing, while storage `hangs_since`:
        whoever waited for the limit once more, one after the other, would keep the run from its end.
        """
        began = time.monotonic()
        if limit_s is None and self.hangs_since is not None:
            raise _unanswered(began - self.hangs_since)
        limit_s = self._storage_limit_s if limit_s is None else limit_s
        given = self._disk.submit(work)
        notice = asyncio.get_running_loop().call_later(TELL_S, self._tell_hang)
        try:
            # not `wait_for`, which in Python 3.11 forgets that it was cancelled if `given` has just ended
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(given)
        except TimeoutError as error:
            if not given.cancel() and self.hangs_since is None:
                self._hangs = given, began
            raise _unanswered(limit_s) from error
        finally:
            notice.cancel()
            if self._told_hang and given.done() and not given.cancelled():
                self._told_hang = False
                self._in_background(partial(self._listener.warned, "storage answers again"))

    def _tell_hang(self) -> None:
        if not self._told_hang:
            self._told_hang = True
            text = (
                f"{_unanswered(TELL_S)}. Training goes on; once it has not answered for "
                f"{self._storage_limit_s:g} s the run stops. Nothing that was committed is lost"
            )
            self._in_background(partial(self._listener.warned, text))

    async def settle(self, limit_s: float) -> bool:
        """Whether all that was begun in the background has come to its end, within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(set(self._tasks), timeout=deadline - time.monotonic())
        return not self._tasks

    def refuse_all(self) -> None:
        """No vote will be acknowledged any more."""
        for answer in self._votes.values():
            if not answer.done():
                answer.set_result(False)

    def _in_background(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._reporting(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reporting(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001  nobody awaits it, and a voter would be answered never
            await self._listener.broken(error)

    async def _perform(self, action: StoreAction) -> Event | None:
        try:
            return await self.on_disk(partial(self._committer.perform, action))
        except Exception as error:  # noqa: BLE001  whatever it is, the save's voters are answered
            return await self._failed(action, error)

    async def _perform_aside(self, action: StoreAction) -> None:
        try:
            answer = await in_daemon_thread(partial(self._committer.perform, action))
        except Exception as error:  # noqa: BLE001  the machine waits for an answer
            answer = await self._failed(action, error)
        for damage in self._committer.take_damages():
            self._journal.event(
                EventKind.DAMAGED_POINT, point=damage.point, file=damage.file, reason=damage.reason
            )
            await self._listener.warned(str(damage))
        if answer is not None:
            await self.notify(answer)

    async def _failed(self, action: StoreAction, error: Exception) -> Event | None:
        if not isinstance(error, OrchestratorError):
            what = f"{type(action).__name__} failed: {type(error).__name__}: {error}"
            await self._listener.warned(
                f"{what}. This is an error of ours; training goes on: please report it"
            )
        return failure(action, error)

    async def _answer(self, action: Acknowledge | GiveUp) -> None:
        if isinstance(action, Acknowledge) and not action.late:
            await self._note_commit(action.key)
        if isinstance(action, GiveUp) and not action.late:
            retry_s = self.retries.given_up(time.monotonic())
            self._journal.event(
                EventKind.SAVE_GIVEN_UP,
                point=action.key.point_name,
                reason=action.reason,
                retry_s=retry_s,
            )
            text = f"the save of {action.key.point_name} was given up: {action.reason}"
            await self._listener.gave_up(action, text)
            if action.by_storage:
                await self._tell_what_follows(action.key, retry_s)
        for rank in action.ranks:
            answer = self._votes.pop((action.key, rank), None)
            if answer is not None and not answer.done():
                answer.set_result(isinstance(action, Acknowledge))

    async def _tell_what_follows(self, key: StateKey, retry_s: float) -> None:
        last_s = self._listener.last_tried_s(key)
        if (last_s is not None) in self._told:
            return
        self._told.add(last_s is not None)
        if last_s is None:
            await self._listener.warned(sentences.saves_fail(retry_s, MOST_S))
        else:
            await self._listener.warned(sentences.last_save_fails(last_s))

    async def _note_commit(self, key: StateKey) -> None:
        """Journals it also where a newer save was quicker: that is how a COMMIT that is lost is missed."""
        failed, self._told = bool(self._told), set()
        self.retries.committed()
        point = self._committer.last_point
        assert point is not None, f"{key.point_name} is acknowledged, and nothing was committed"
        assert point.key == key, f"{key.point_name} is acknowledged, the last COMMIT is that of {point.name}"
        note_committed(self._journal, point, self._committer.last_peaks, self._committer.last_loss)
        if failed:
            await self._listener.warned(f"storage works again: {point.name} is saved")
        newest = self.newest is None or point.key > self.newest.key
        if newest:
            self.newest = point
        await self._listener.committed(point, newest)


def _unanswered(for_s: float) -> StorageError:
    return StorageError(f"storage has not answered for {for_s:.3g} s; check that it is mounted and reachable")


def in_daemon_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """`work` in a daemon thread of its own: where storage hangs, the process can end nevertheless."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  the future carries it
            failed = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="storage aside", daemon=True).start()
    return future
