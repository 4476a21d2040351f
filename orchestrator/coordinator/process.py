"""The gate before the coordinator: takes up an attempt, and then passes on every call.

Taking up the attempt is retried while storage fails, within a limit. Ray does not restart an actor whose
constructor raised, and the driver regards one that does not answer as frozen. Therefore only a thread waits
for storage here, and every call is answered meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from orchestrator.checkpoint.commit.commit_driver import in_daemon_thread
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.shield import end_without_raylet, outlive_sigterm
from orchestrator.coordinator import actor
from orchestrator.coordinator.actor import Coordinator
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.launch_driver import COORDINATOR_FAILED
from orchestrator.elastic.failure import AGAIN_S, until_storage_works
from orchestrator.errors import FencedError, OrchestratorError, StorageError, code_of
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import ControlRequests, Refusal, RunOver, StillWaiting
from orchestrator.records.run_status import MemberInfo, RunStatus
from orchestrator.storage.tries import TIMEOUT

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_reports import FeedNotes

# How long a status waits for a coordinator that is about to begin: less than the time after which the driver
# regards it as frozen.
STATUS_S = 5.0

OVER = ControlRequests(ended=True, save=False, stop=False, reform=False, acknowledged_step=-1)
P = ParamSpec("P")
Answer = TypeVar("Answer")
Over = TypeVar("Over")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferredCall:
    """A call of the supervisor, stored until the coordinator has begun."""

    call: Callable[..., Awaitable[None]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _of_members(
    call: Callable[Concatenate[Coordinator, P], Awaitable[Answer]],
    over: Callable[[CoordinatorProcess], Over],
) -> Callable[Concatenate[CoordinatorProcess, P], Coroutine[Any, Any, Answer | StillWaiting | Over]]:
    """A member's `call` of `Coordinator`, as the gate's method.

    The answer is `StillWaiting` before that has begun, and `over` if it never will.
    """

    @wraps(call)
    async def gated(
        self: CoordinatorProcess, /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer | StillWaiting | Over:
        if coordinator := await self._begun():
            return await call(coordinator, *args, **kwargs)
        return StillWaiting() if self._over is None else over(self)

    return gated


def _if_begun(
    call: Callable[Concatenate[Coordinator, P], Awaitable[None]],
) -> Callable[Concatenate[CoordinatorProcess, P], Coroutine[Any, Any, None]]:
    """The supervisor's `call` of `Coordinator`, which does nothing before that has begun."""

    @wraps(call)
    async def gated(self: CoordinatorProcess, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._coordinator is not None:
            await call(self._coordinator, *args, **kwargs)

    return gated


def _now_or_later(
    call: Callable[Concatenate[Coordinator, P], Awaitable[None]],
) -> Callable[Concatenate[CoordinatorProcess, P], Coroutine[Any, Any, None]]:
    """The supervisor's `call` of `Coordinator`, which is stored until that has begun.

    The supervisor waits for no answer, and repeats some calls. An equal call is stored once.
    """

    @wraps(call)
    async def gated(self: CoordinatorProcess, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._coordinator is not None:
            await call(self._coordinator, *args, **kwargs)
        elif (later := DeferredCall(call=call, args=args, kwargs=kwargs)) not in self._later:
            self._later.append(later)

    return gated


def _none(_: CoordinatorProcess) -> None:
    return None


class CoordinatorProcess:
    """Passes on each call to `Coordinator` once that has begun. For use on one event loop.

    Until then members get `StillWaiting`, and the
    supervisor's calls are stored for later. Failing storage is retried within
    `CoordinatorStart.storage_limit_s`. After that, or for any other reason (another launch has taken the run
    over), the next status reports that the run has failed, and why.
    """

    def __init__(
        self,
        start: CoordinatorStart,
        feeder_notes: Callable[[int], Awaitable[FeedNotes | None]] | None = None,
        why_dead: Callable[[MemberInfo], str | None] | None = None,
        store: RunStore | None = None,
    ) -> None:
        """Takes the arguments of `Coordinator`. Never waits."""
        self._start, self._why_dead, self._store = start, why_dead, store
        self._feeder_notes = feeder_notes
        self._claimed = set[int]()
        self._coordinator: Coordinator | None = None
        self._over: Exception | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._tried_at = 0.0
        self._later: list[DeferredCall] = []
        self._warnings: list[str] = []
        self._num_heard = 0  # the number of warnings that the supervisor has seen
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ calls of members
    join = _of_members(Coordinator.join, lambda self: self._no_place)
    check_machine = _of_members(Coordinator.check_machine, _none)  # the worker's join gets the answer
    watch = _of_members(Coordinator.watch, lambda _: OVER)
    report = _of_members(Coordinator.report, _none)
    digest = _of_members(Coordinator.digest, _none)
    evaluated = _of_members(Coordinator.evaluated, lambda _: False)
    computed_with = _of_members(Coordinator.computed_with, lambda _: False)
    offer_kernels = _of_members(Coordinator.offer_kernels, _none)
    offered_kernels = _of_members(Coordinator.offered_kernels, _none)
    callback_failed = _of_members(Coordinator.callback_failed, _none)
    ended = _of_members(Coordinator.ended, _none)
    phase = _of_members(Coordinator.phase, _none)
    loading = _of_members(Coordinator.loading, _none)
    doing = _of_members(Coordinator.doing, _none)
    vote = _of_members(Coordinator.vote, lambda _: False)
    save_failed = _of_members(Coordinator.save_failed, _none)
    is_given_up = _of_members(Coordinator.is_given_up, lambda _: False)
    finished = _of_members(Coordinator.finished, _none)
    failed = _of_members(Coordinator.failed, lambda _: False)
    settle = _of_members(Coordinator.settle, lambda _: True)

    # ------------------------------------------------------------ calls of the supervisor
    async def status(self, seen: tuple[int, int], wait_s: float) -> RunStatus:
        """Returns `Coordinator.status`.

        Before it has begun, the status is that of attempt 0, with warnings only.
        """
        num_seen = self._num_heard = seen[1] if seen[0] == 0 else 0
        here = await self._begun(STATUS_S, lambda: len(self._warnings) > num_seen)
        if here is not None:
            return await here.status(seen, wait_s)
        first = self._start.attempt
        return RunStatus(
            version=len(self._warnings),
            attempt=first.number if self._over else 0,
            generation=0,
            world_size=0,
            last_step=None,
            newest_point=first.point.name if first.point else None,
            committed=first.point.cursor if first.point else Cursor(),
            waiting_since=None,
            ended="failed" if self._over else None,
            reason=self._reason,
            code=(code_of(self._over) or COORDINATOR_FAILED) if self._over else None,
            left_out=(),
            members=(),
            failures=(),
            warnings=tuple(self._warnings[num_seen:]),
            stopping=any(later.call is Coordinator.stop for later in self._later),
            pid=os.getpid(),
        )

    # The supervisor repeats these to each attempt. A coordinator that has not begun misses no member.
    expect = _if_begun(Coordinator.expect)
    draining = _if_begun(Coordinator.draining)
    starved = _if_begun(Coordinator.starved)

    stop = _now_or_later(Coordinator.stop)
    save = _now_or_later(Coordinator.save)
    group_failed = _now_or_later(Coordinator.group_failed)
    died = _now_or_later(Coordinator.died)
    note = _now_or_later(Coordinator.note)
    end = _now_or_later(Coordinator.end)

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, and the end is written as far as possible."""
        return self._over is not None or (self._coordinator is not None and self._coordinator.has_ended)

    @property
    def was_called(self) -> bool:
        """Whether a call has made it begin."""
        return self._beginning is not None

    # ------------------------------------------------------------ inside
    @property
    def _reason(self) -> str:
        if self._over is None or isinstance(self._over, OrchestratorError):
            return str(self._over or "")
        return f"the coordinator failed: {type(self._over).__name__}: {self._over}"

    @property
    def _no_place(self) -> Refusal | RunOver:
        """The answer to a join when the run is over."""
        fenced = isinstance(self._over, FencedError)
        return Refusal(reason=self._reason) if fenced else RunOver(reason=self._reason)

    async def _begun(
        self, wait_s: float | None = None, or_else: Callable[[], bool] = lambda: False
    ) -> Coordinator | None:
        """Returns the coordinator as soon as it has begun. The first call makes it begin.

        Returns None if it has not begun within `wait_s`, never will, or `or_else` holds.
        """
        if self._coordinator is None and self._over is None:
            if self._beginning is None:
                self._beginning = asyncio.get_running_loop().create_task(self._begin())

            deadline = time.monotonic() + (actor.ANSWER_S if wait_s is None else wait_s)
            while self._coordinator is None and self._over is None and not or_else():
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._changed.wait()
                except TimeoutError:
                    return None
        return self._coordinator

    async def _begin(self) -> None:
        try:
            made = await self._take_up()
            for text in self._warnings[self._num_heard :]:
                await made.warned(text)
            while self._later:  # more may arrive meanwhile
                later = self._later.pop(0)
                await later.call(made, *later.args, **later.kwargs)
        except Exception as error:  # noqa: BLE001  after any error the launch ends with its reason
            self._over = error
        else:
            self._coordinator = made
        self._notify()

    async def _take_up(self) -> Coordinator:
        """Waits for the thread that takes up the attempt, but for no try longer than storage may fail."""
        loop, limit_s = asyncio.get_running_loop(), self._start.storage_limit_s

        def tell(text: str) -> None:
            with suppress(RuntimeError):  # the event loop may be closed
                loop.call_soon_threadsafe(self._warn, text)

        def attempt() -> Coordinator:
            self._tried_at = time.monotonic()
            return Coordinator(self._start, self._why_dead, self._feeder_notes, self._store, self._claimed)

        self._tried_at = time.monotonic()
        made = in_daemon_thread(
            lambda: until_storage_works(attempt, limit_s, "The coordinator waits for it", tell)
        )
        while not made.done():
            left_s = self._tried_at + limit_s + 2 * AGAIN_S - time.monotonic()
            if left_s <= 0:
                raise StorageError(
                    f"storage has not answered for {limit_s:g} s; check that it is mounted and reachable",
                    code=TIMEOUT,
                )
            await asyncio.wait([made], timeout=left_s)
        return made.result()

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._notify()

    def _notify(self) -> None:
        """Wakes all waiting calls."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class CoordinatorActor(CoordinatorProcess):
    """The same as an async Ray actor, in a process that outlives its Ray until the run has ended.

    It takes 0 CPU, is restartable, and has no retries.
    """

    def __init__(
        self,
        start: CoordinatorStart,
        feeder_notes: Callable[[int], Awaitable[FeedNotes | None]] | None = None,
    ) -> None:
        super().__init__(start, feeder_notes)
        outlive_sigterm()
        end_without_raylet(lambda: self.has_ended)
