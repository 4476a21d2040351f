"""Drives the commits in the coordinator: collects votes, runs the commit machine, and answers every voter.

A thread does the work that waits for storage. Results are reported to a listener.
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

from orchestrator.checkpoint.commit.commit_events import (
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
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.pending_save import SaveRetries
from orchestrator.checkpoint.commit.store_actions import PointCommitter, failure, note_committed
from orchestrator.checkpoint.points.points import Point
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history import sentences
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.membership import StillWaiting
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.tries import MOST_RETRY_S, TIMEOUT

Result = TypeVar("Result")

TELL_S = 30.0  # the user learns after this time that storage does not answer; far below the limit


class CommitListener(Protocol):
    """Receives the results of commits."""

    async def committed(self, point: Point, newest: bool) -> None:
        """`point` is committed. `newest`: there is no newer one."""

    async def gave_up(self, given_up: GiveUp, text: str) -> None:
        """A save was given up; `text` is for the user."""

    def last_tried_s(self, key: StateKey) -> float | None:
        """Returns for how many seconds saving the state of `key` is retried if it is the run's last one.

        None: steps follow it, as far as is known.
        """

    async def warned(self, text: str) -> None:
        """Another message for the user: damage."""

    async def fenced(self, reason: str) -> None:
        """A newer attempt exists: this one ends."""

    async def broken(self, error: Exception) -> None:
        """Work in the background ended with an internal error. Nothing can be relied on any more."""


class Commits:
    """Drives the commit machine of one attempt. All methods run on one event loop.

    `lock` is held while the machine's actions are carried out. Code that forms a generation takes it, too. No
    COMMIT is thus in progress when the parent of a generation is chosen (membership rule 15). Points are read
    back and deleted outside the lock, because this work must not delay a generation.
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
        """`newest`: the point that the attempt continues.

        `storage_limit_s`: how long one storage operation may take before it counts as failed.
        """
        self.lock = asyncio.Lock()
        self.retries = SaveRetries()  # the caller asks when one is due
        self.newest = newest  # the newest committed point on the lineage
        self._machine, self._committer, self._journal = machine, committer, journal
        self._listener, self._storage_limit_s = listener, storage_limit_s
        # while saves fail because of storage: whether the user was told the consequences, for a last state
        # (True) or not
        self._told: set[bool] = set()
        self._lost: StateKey | None = None  # the newest undecided save of an older attempt
        # One thread for everything that waits for storage. Its operations stay in order, and calls of members
        # are answered meanwhile.
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage")
        # the abandoned operation that this thread still runs, and when it began
        self._hangs: tuple[Future[Any], float] | None = None
        self._told_hang = False
        self._votes: dict[tuple[StateKey, int], asyncio.Future[bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> bool:
        """Whether votes of some save are still missing, or it is being committed."""
        return bool(self._machine.saves)

    @property
    def took_s(self) -> float | None:
        """The time from the begin of the save of this attempt's newest point to its commit."""
        return self._committer.last_took_s

    def is_hopeless(self, key: StateKey, world_size: int) -> bool:
        """Returns `CommitMachine.is_hopeless`."""
        return self._machine.is_hopeless(key, world_size)

    async def vote(self, vote: Vote, wait_s: float | None = None) -> bool | StillWaiting:
        """Returns True once the point is committed, False if the save was given up.

        Returns `StillWaiting` after `wait_s`. A copy of a vote changes nothing.
        """
        slot = (vote.key, vote.rank)
        answer = self._votes.get(slot)
        if answer is None:
            answer = self._votes[slot] = asyncio.get_running_loop().create_future()
            self.notify_soon(VoteCast(vote=vote, now_s=time.monotonic()))
        await asyncio.wait([answer], timeout=wait_s)
        return answer.result() if answer.done() else StillWaiting()

    def lost(self, key: StateKey) -> None:
        """The coordinator of the save of `key`, an older attempt of this launch, is gone.

        If the save is not a point, it is given up. Repeated calls change nothing.
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
        """Like `notify`, without waiting for it."""
        self._in_background(partial(self.notify, event))

    async def notify(self, event: Event) -> None:
        """Reports an event to the machine and carries out its actions."""
        async with self.lock:
            await self.advance(event)

    async def advance(self, event: Event) -> None:
        """Like `notify`, for a caller that holds the lock."""
        todo = collections.deque([event])
        while todo:
            self._machine, actions = self._machine.on(todo.popleft())
            for action in actions:
                match action:
                    case Acknowledge() | GiveUp():
                        await self._answer(action)
                    case DeletesFail():
                        text = sentences.deletes_fail(action.name, action.reason, MOST_RETRY_S)
                        await self._listener.warned(text)
                    case DeletesWork():
                        await self._listener.warned(sentences.deletes_work(action.name))
                    case Fence():
                        await self._listener.fenced(action.reason)
                    case VerifyPoint() | DeletePoints() | DiscardSave():
                        # reads or deletes a whole point, which nothing waits for
                        self._in_background(partial(self._perform_aside, action))
                    case _:
                        answer = await self._perform(action)
                        if answer is not None:
                            todo.append(answer)

    @property
    def hangs_since(self) -> float | None:
        """When the operation began that exceeded storage's limit and still runs; None if there is none."""
        return None if self._hangs is None or self._hangs[0].done() else self._hangs[1]

    async def on_disk(self, work: Callable[[], Result], limit_s: float | None = None) -> Result:
        """Runs `work` in the thread that waits for storage, after earlier work.

        Raises `StorageError` if it takes longer than `limit_s` (default: the limit of the storage). It may
        still be carried out then. By default it also raises at once, without running `work`, while storage
        `hangs_since`: if each call waited for the limit again, one after the other, the run could not end.
        """
        began = time.monotonic()
        if limit_s is None and self.hangs_since is not None:
            raise _unanswered(began - self.hangs_since)
        limit_s = self._storage_limit_s if limit_s is None else limit_s
        given = self._disk.submit(work)
        notice = asyncio.get_running_loop().call_later(TELL_S, self._tell_hang)
        try:
            # Not `wait_for`, which in Python 3.11 loses its cancellation if `given` has just ended.
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
                f"{_unanswered(TELL_S)}. Training continues; once it has not answered for "
                f"{self._storage_limit_s:g} s the run stops. Nothing that was committed is lost"
            )
            self._in_background(partial(self._listener.warned, text))

    async def settle(self, limit_s: float) -> bool:
        """Waits up to `limit_s`; returns whether everything begun in the background has ended."""
        deadline = time.monotonic() + limit_s
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(set(self._tasks), timeout=deadline - time.monotonic())
        return not self._tasks

    def refuse_all(self) -> None:
        """Refuses all open votes. No vote is acknowledged any more."""
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
        except Exception as error:  # noqa: BLE001  no caller awaits it, and a voter would never be answered
            await self._listener.broken(error)

    async def _perform(self, action: StoreAction) -> Event | None:
        try:
            return await self.on_disk(partial(self._committer.perform, action))
        except Exception as error:  # noqa: BLE001  after any error the save's voters are answered
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
                f"{what}. This is an error of ours; training continues: please report it"
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
            await self._listener.warned(sentences.saves_fail(retry_s, MOST_RETRY_S))
        else:
            await self._listener.warned(sentences.last_save_fails(last_s))

    async def _note_commit(self, key: StateKey) -> None:
        """Journals the commit, also if a newer save was faster.

        A lost COMMIT is detected through the journal.
        """
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
    return StorageError(
        f"storage has not answered for {for_s:.3g} s; check that it is mounted and reachable", code=TIMEOUT
    )


def in_daemon_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs `work` in a daemon thread of its own, so that the process can end even if storage hangs."""
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
