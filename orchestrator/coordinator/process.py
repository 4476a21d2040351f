"""The actor that Ray starts and restarts. It takes up an attempt and then is that attempt's coordinator.

Taking up the attempt is retried while storage fails, within a limit. Ray does not restart an actor whose
constructor raised, and the driver regards one that does not answer as frozen. Therefore only a thread waits
for storage here, and every call is answered meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit.commit_driver import in_daemon_thread
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.shield import end_without_raylet, outlive_sigterm
from orchestrator.coordinator import actor
from orchestrator.coordinator.actor import Coordinator
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.launch_driver import COORDINATOR_FAILED
from orchestrator.elastic.failure import AGAIN_S, until_storage_works
from orchestrator.errors import FencedError, OrchestratorError, StorageError, code_of
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import (
    ControlRequests,
    GenerationView,
    JoinRequest,
    MachineProof,
    Refusal,
    RunOver,
    StillWaiting,
    Unfit,
)
from orchestrator.records.points import Damage, Vote
from orchestrator.records.run_status import Doing, MemberInfo, RunStatus
from orchestrator.records.steps import StateKey, StepRecord

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_reports import FeedNotes

# How long a status waits for a coordinator that is about to begin: less than the time after which the driver
# regards it as frozen.
STATUS_S = 5.0


class CoordinatorProcess:
    """An async Ray actor that forwards each call to `Coordinator` once that has begun.

    It takes 0 CPU, is restartable, and has no retries. Until then members get `StillWaiting`, and the
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
        """See `Coordinator`. Never waits."""
        self._start, self._why_dead, self._store = start, why_dead, store
        self._feeder_notes = feeder_notes
        self._claimed = set[int]()
        self._coordinator: Coordinator | None = None
        self._over: Exception | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._tried_at = 0.0
        self._later: list[tuple[str, tuple[Any, ...]]] = []  # calls of the supervisor
        self._warnings: list[str] = []
        self._num_heard = 0  # the number of warnings that the supervisor has seen
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ calls of members
    async def join(self, request: JoinRequest) -> GenerationView | Refusal | RunOver | StillWaiting:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.join(request)
        if self._over is None:
            return StillWaiting()
        fenced = isinstance(self._over, FencedError)
        return Refusal(reason=self._reason) if fenced else RunOver(reason=self._reason)

    async def check_machine(self, launch: str, proof: MachineProof) -> Unfit | StillWaiting | None:
        """See `Coordinator`. A run that is over needs no check: the worker's join gets that answer."""
        if here := await self._begun():
            return await here.check_machine(launch, proof)
        return self._unheard()

    async def watch(
        self, launch: str, attempt: int, generation: int, known: ControlRequests | None
    ) -> ControlRequests | StillWaiting:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.watch(launch, attempt, generation, known)
        if self._over is None:
            return StillWaiting()
        return ControlRequests(ended=True, save=False, stop=False, reform=False, acknowledged_step=-1)

    async def report(
        self, launch: str, member: str, attempt: int, generation: int, records: tuple[StepRecord, ...]
    ) -> StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            await here.report(launch, member, attempt, generation, records)
            return None
        return self._unheard()

    async def digest(self, launch: str, key: StateKey, weights_digest: str) -> StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            await here.digest(launch, key, weights_digest)
            return None
        return self._unheard()

    async def ended(self, launch: str, attempt: int, generation: int) -> StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.ended(launch, attempt, generation)
        return self._unheard()

    async def phase(self, launch: str, member: str, limit_s: float) -> StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            await here.phase(launch, member, limit_s)
            return None
        return self._unheard()

    async def loading(self, launch: str, member: str, done_bytes: int, num_bytes: int) -> StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            await here.loading(launch, member, done_bytes, num_bytes)
            return None
        return self._unheard()

    async def doing(
        self, launch: str, member: str, what: Doing
    ) -> tuple[tuple[str, int], ...] | StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.doing(launch, member, what)
        return self._unheard()

    async def vote(self, launch: str, vote: Vote) -> bool | StillWaiting:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.vote(launch, vote)
        return self._unheard() or False

    async def save_failed(
        self, launch: str, key: StateKey, rank: int, world_size: int, reason: str
    ) -> StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            await here.save_failed(launch, key, rank, world_size, reason)
            return None
        return self._unheard()

    async def is_given_up(
        self, launch: str, key: StateKey, rank: int, world_size: int, moved: bool
    ) -> bool | StillWaiting:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.is_given_up(launch, key, rank, world_size, moved)
        return self._unheard() or False

    async def finished(self, launch: str, member: str, key: StateKey, reason: str) -> StillWaiting | None:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.finished(launch, member, key, reason)
        return self._unheard()

    async def failed(
        self,
        launch: str,
        member: str,
        kind: str,
        text: str,
        fatal: bool,
        code: str | None = None,
        damages: tuple[Damage, ...] = (),
        place: MemberInfo | None = None,
    ) -> bool | StillWaiting:
        """See `Coordinator`."""
        if here := await self._begun():
            return await here.failed(launch, member, kind, text, fatal, code, damages, place)
        return self._unheard() or False

    # ------------------------------------------------------------ calls of the supervisor
    async def status(self, seen: tuple[int, int], wait_s: float) -> RunStatus:
        """See `Coordinator`. Before it has begun, the status is that of attempt 0, with warnings only."""
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
            stopping=any(method == "stop" for method, _ in self._later),
            pid=os.getpid(),
        )

    async def expect(self, num_workers: int) -> None:
        """See `Coordinator`. The supervisor repeats it to each attempt."""
        if self._coordinator is not None:
            await self._coordinator.expect(num_workers)

    async def draining(self, node: str, host: str, grace_s: float) -> None:
        """See `Coordinator`. The supervisor repeats it to each attempt."""
        if self._coordinator is not None:
            await self._coordinator.draining(node, host, grace_s)

    async def stop(self, by: str, grace_s: float = math.inf) -> None:
        """See `Coordinator`."""
        await self._now_or_later("stop", by, grace_s)

    async def save(self, by: str) -> None:
        """See `Coordinator`."""
        await self._now_or_later("save", by)

    async def starved(self, member: str, seconds: float) -> None:
        """See `Coordinator`. A coordinator that has not begun misses no member."""
        if self._coordinator is not None:
            await self._coordinator.starved(member, seconds)

    async def group_failed(self, node: str, reason: str) -> None:
        """See `Coordinator`."""
        await self._now_or_later("group_failed", node, reason)

    async def note(self, kind: EventKind, fields: dict[str, Any]) -> None:
        """See `Coordinator`."""
        await self._now_or_later("note", kind, fields)

    async def end(self, outcome: str, reason: str, code: str | None = None) -> None:
        """See `Coordinator`."""
        await self._now_or_later("end", outcome, reason, code)

    # ------------------------------------------------------------ inside
    @property
    def _reason(self) -> str:
        if self._over is None or isinstance(self._over, OrchestratorError):
            return str(self._over or "")
        return f"the coordinator failed: {type(self._over).__name__}: {self._over}"

    def _unheard(self) -> StillWaiting | None:
        return None if self._over else StillWaiting()

    async def _now_or_later(self, method: str, *arguments: Any) -> None:
        """Calls the coordinator, or stores the call. The supervisor waits for no answer, and repeats some
        calls.
        """
        if self._coordinator is not None:
            await getattr(self._coordinator, method)(*arguments)
        elif (method, arguments) not in self._later:
            self._later.append((method, arguments))

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
                method, arguments = self._later.pop(0)
                await getattr(made, method)(*arguments)
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
                    code="storage.timeout",
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
    """The same in a process that Ray started, which outlives that Ray until the run has ended."""

    def __init__(
        self,
        start: CoordinatorStart,
        feeder_notes: Callable[[int], Awaitable[FeedNotes | None]] | None = None,
    ) -> None:
        super().__init__(start, feeder_notes)
        outlive_sigterm()
        end_without_raylet(self._has_ended)

    def _has_ended(self) -> bool:
        return self._over is not None or (self._coordinator is not None and self._coordinator.has_ended)
