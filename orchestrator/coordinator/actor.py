"""The coordinator actor: it carries out what the launch machine (who trains, when the run ends) and the
commit machine (which points exist) decide, keeps time for them, and is the only writer of the journal.

It decides nothing itself, knows neither model nor data, and is not on the step path.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.cluster.ray_state import NODE_DIED, ray_says
from orchestrator.coordinator.attempt import Attempt
from orchestrator.coordinator.attempt_journal import note_beginning, write_down_end
from orchestrator.coordinator.continue_launch import continue_launch
from orchestrator.coordinator.feeder_notes import NOT_SAID, FeederNotes, SkippedDocuments
from orchestrator.coordinator.launch_machine import (
    Action,
    Answer,
    End,
    Fenced,
    Kill,
    LaunchMachine,
    Note,
    Say,
    Warn,
)
from orchestrator.coordinator.measuring import measured
from orchestrator.elastic.cause import Cause
from orchestrator.elastic.failure_budget import FailureBudget
from orchestrator.elastic.formation import Form, Formation, RendezvousSettings
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.elastic.roster import Roster
from orchestrator.elastic.storage_trouble import STORAGE_LIMIT_S, StorageTrouble
from orchestrator.errors import FencedError, StorageError, text_of
from orchestrator.faults import hook
from orchestrator.history import sentences
from orchestrator.history.claims import GenerationStart
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.history.request_files import STOP, RequestFiles
from orchestrator.records import (
    ControlRequests,
    Cursor,
    GenerationView,
    GroupChange,
    JoinRequest,
    MemberInfo,
    Refusal,
    RunOver,
    RunStatus,
    StateKey,
    StepRecord,
    StillWaiting,
    Vote,
    encode,
)
from orchestrator.resume.commit_driver import Commits, in_daemon_thread
from orchestrator.resume.commit_events import GenerationFormed, PartFailed, Tick, VoterGone
from orchestrator.resume.commit_machine import CommitMachine
from orchestrator.resume.pin_watch import PinWatch, note_pins
from orchestrator.resume.points import Point
from orchestrator.resume.store import RunStore
from orchestrator.resume.store_actions import PointCommitter
from orchestrator.storage.files import Storage

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_notes import FeedNotes

TICK_S = 0.05
FLUSH_EVERY_S = 1.0
HEARTBEAT_EVERY_S = 2.0
REQUESTS_EVERY_S = 1.0
VOTE_LIMIT_S = 600.0  # how long a save waits for the votes that are missing
LIVENESS_EVERY_S = 0.05
# an open call is answered at least this often: a dead caller does not leave it open, and a caller knows a
# coordinator that is frozen from one that waits
ANSWER_S = 10.0
END_WRITTEN_S = 15.0  # how long each of the two documents that say how a run ended is tried to be written


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorStart:
    """What the driver hands to coordinator: the attempt it claimed, and what the run needs from then on."""

    attempt: Attempt
    storage: str
    min_workers: int
    max_workers: int
    expected: int
    max_failures: int
    keep_latest: int
    run: str
    global_batch_size: int
    seq_len: int
    flat_config: dict[str, Any]
    rng: dict[str, Any]
    fault_plan: str = ""
    keep_every: int | None = None
    keep_best: int = 0
    stop_by: str = ""  # who wants the launch to stop before its budgets are spent
    storage_limit_s: float = STORAGE_LIMIT_S
    rendezvous: RendezvousSettings = RendezvousSettings()


class Coordinator:
    """One attempt's coordinator; lives in a `coordinator.process.CoordinatorProcess`. Every call carries the
    launch id; one of another launch is refused.

    A restarted one claims the next attempt of its launch, adopts nothing half-collected, and has the members
    meet again at their next step boundary (membership rules 8 and 10). Where the launch had ended before, it
    writes nothing, and only answers.
    """

    def __init__(
        self,
        start: CoordinatorStart,
        why_dead: Callable[[MemberInfo], str | None] | None = None,
        feeder_notes: Callable[[int], Awaitable[FeedNotes | None]] | None = None,
        store: RunStore | None = None,
        claimed: set[int] | None = None,
    ) -> None:
        """Takes up the attempt, or claims the next one when this process is a restarted one (then the attempt
        has a journal already). `why_dead` says how the process of a member ended that is surely gone; by
        default Ray does. `feeder_notes` asks the launch's feeder; see `FeederNotes`. `store`: that of
        `start.storage`. `claimed`: see `mine` of `continue_launch`.

        Waits for storage. Raises `StorageError`, after which another one may be made, and `FencedError`.
        """
        self._start, self._fault = start, hook(start.fault_plan)
        self._why_dead = why_dead or ray_says
        self._store = store or RunStore(Storage(start.storage))
        attempt = self._attempt = continue_launch(
            self._store, start.attempt, socket.gethostname(), self._fault, claimed
        )
        self._metrics = measured(start.flat_config, start.storage, start.run, attempt)
        self._journal = JournalWriter(
            self._store.storage, attempt.number, start.run, run_id=attempt.run_id, listener=self._metrics
        )
        if attempt.earlier.ended is None:
            note_beginning(self._journal, attempt, start.flat_config)
            self._journal.flush()
        skipped = SkippedDocuments(start.storage, attempt.number)
        self._feeder_notes = FeederNotes(feeder_notes, self._journal, skipped, self.warned)
        self._heartbeat = self._store.heartbeat(attempt.number)
        point = attempt.point
        rendezvous = Rendezvous(
            attempt=attempt.number,
            launch=attempt.launch,
            min_workers=start.min_workers,
            max_workers=start.max_workers,
            expected=start.expected,
            settings=start.rendezvous,
            previous=attempt.earlier.previous,
            first_attempt=start.attempt.number,
            rebase=lambda parent, cursor: attempt.step_label,  # noqa: ARG005
        )
        if point is not None:
            rendezvous.set_newest_point(point.key, point.cursor, point.name)
        self._launch = LaunchMachine(
            rendezvous,
            FailureBudget(start.max_failures, attempt.earlier.failures, attempt.step_label),
            StorageTrouble(start.storage_limit_s),
            last_step=attempt.earlier.last_step,
            previous=attempt.earlier.previous.members if attempt.earlier.previous else (),
            infos=attempt.earlier.members,
            finished={member: (reason, step) for member, reason, step in attempt.earlier.finished},
            ended=attempt.earlier.ended,
            saved=attempt.parent,
            answered=attempt.earlier.answered,
            budgets=attempt.budgets,
            stop_by=start.stop_by,
        )
        self._requests = RequestFiles(self._store.storage, attempt.launch, attempt.run_id)
        self._pins = PinWatch(self._store)
        machine = CommitMachine(
            attempt=attempt.number,
            keep_latest=start.keep_latest,
            keep_every=start.keep_every,
            keep_best=start.keep_best,
            losses=attempt.losses,
            vote_limit_s=VOTE_LIMIT_S,
            points=attempt.inherited,
            pinned=point.name if point else None,
        )
        committer = PointCommitter(
            self._store,
            self._journal,
            attempt.number,
            start.flat_config,
            start.rng,
            time.monotonic,
            self._fault,
            attempt.run_id,
        )
        self._commits = Commits(machine, committer, self._journal, point, self, start.storage_limit_s)
        # The sign of life must not wait behind a long commit: another start would think that this attempt is
        # dead.
        self._pulse = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heartbeat")
        self._beating: Future[bool] | None = None
        self._joins: dict[str, asyncio.Future[Any]] = {}
        self._journalled: dict[str, JoinRequest] = {}  # the newest join of each member, without its records
        self._end_is_written = attempt.earlier.ended is not None
        self._view: GenerationView | None = None
        self._acknowledged = -1
        self._version = 0
        # what the supervisor has to hear, with the version in which it came; what the first attempt's start
        # found, it has seen itself
        restarted = attempt.number != start.attempt.number
        self._warnings = [(1, str(file)) for file in attempt.found.unreadable if restarted]
        self._notices: list[tuple[int, str]] = []
        self._kills: list[tuple[int, MemberInfo]] = []
        self._changes: list[tuple[int, GroupChange]] = []
        self._roster = Roster(start.max_workers, attempt.earlier.members, attempt.why)
        self._changed = asyncio.Condition()
        # generations whose end is waited for, apart from the rest: a thousand members are not woken for less
        self._overs: dict[tuple[int, int], asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ calls of members
    async def join(self, request: JoinRequest) -> GenerationView | Refusal | RunOver | StillWaiting:
        """Waits until the member is in a generation; `RunOver` when the run has ended, `Refusal` when it has
        no place here, `StillWaiting` after a while: it asks again.
        """
        self._ensure_running()
        if request.launch != self._attempt.launch:
            return Refusal(reason=self._other_launch(request.launch))
        member = request.member
        old = self._joins.pop(member, None)
        if old is not None and not old.done():
            old.set_result(StillWaiting())  # a call that nobody waits for any more
        future = self._joins[member] = asyncio.get_running_loop().create_future()
        self._take_records(request.records)
        self._roster.came(request, time.monotonic())
        self._note_join(replace(request, records=()))
        await self._do(self._launch.join(request, time.monotonic()))
        self._wake.set()
        await asyncio.wait([future], timeout=ANSWER_S)
        if not future.done():
            return StillWaiting()
        found: GenerationView | Refusal | RunOver = future.result()
        return found

    async def watch(
        self, launch: str, attempt: int, generation: int, known: ControlRequests | None
    ) -> ControlRequests:
        """Rank 0's open call: answered when the control requests for this generation differ from `known`, and
        at least every few seconds.
        """
        self._check(launch)
        deadline = time.monotonic() + ANSWER_S
        while True:
            wanted = self._launch.control_requests(attempt, generation, self._acknowledged)
            if wanted != known or time.monotonic() > deadline:
                return wanted
            await self._wait_for_change(deadline - time.monotonic())

    async def ended(self, launch: str, attempt: int, generation: int) -> StillWaiting | None:
        """The open call of every other rank: answered once the generation is over, and then at once.
        `StillWaiting` after a while: it asks again.
        """
        self._check(launch)
        if not self._launch.control_requests(attempt, generation, -1).ended:
            over = self._overs.setdefault((attempt, generation), asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await over.wait()
            if not over.is_set():
                return StillWaiting()
        return None

    async def report(
        self, launch: str, member: str, attempt: int, generation: int, records: tuple[StepRecord, ...]
    ) -> None:
        """Step records of a running generation, in batches by one member. Equal copies of what came before
        change nothing.
        """
        self._check(launch)
        self._take_records(records)
        if attempt == self._attempt.number and records:
            self._launch.rendezvous.applied(generation, records[-1].step, time.monotonic())
        await self._notify()

    async def digest(self, launch: str, key: StateKey, weights_digest: str) -> None:
        """What the weights of a state are; of an older attempt's it is left out."""
        self._check(launch)
        if key.attempt == self._attempt.number:
            self._journal.event(
                EventKind.STATE_DIGEST,
                generation=key.generation,
                step=key.step,
                weights_digest=weights_digest,
            )

    async def phase(self, launch: str, member: str, limit_s: float) -> None:
        """`member` has begun or left a phase: from now on the others may have to wait `limit_s` for it."""
        self._check(launch)
        self._launch.busy(member, time.monotonic() + limit_s)

    async def vote(self, launch: str, vote: Vote) -> bool | StillWaiting:
        """One rank's part of a save is written; answers True once the point is committed, False if the save
        was given up, `StillWaiting` after a while: it asks again.
        """
        self._check(launch)
        if vote.key.attempt != self._attempt.number or self._attempt.earlier.ended is not None:
            return False  # no half-collected save is adopted from an older coordinator
        self._take_records(vote.records)
        self._launch.voted()
        return await self._commits.vote(vote, ANSWER_S)

    async def save_failed(self, launch: str, key: StateKey, rank: int, world_size: int, reason: str) -> None:
        """A rank could not write its part of the save of `key`; it trains on."""
        self._check(launch)
        self._launch.voted()
        self._commits.notify_soon(
            PartFailed(key=key, rank=rank, world_size=world_size, reason=reason, now_s=time.monotonic())
        )

    async def finished(self, launch: str, member: str, key: StateKey, reason: str) -> StillWaiting | None:
        """A member's part of the run is over (`done` or `stopped`); it may go when that is durable, and asks
        again until then.
        """
        self._check(launch)
        await self._do(self._launch.finished(member, key, reason, time.monotonic()))
        was_over = self._attempt.earlier.ended is not None
        if was_over or await self._flush(ANSWER_S) or self._launch.ended is not None:
            return None
        await asyncio.sleep(FLUSH_EVERY_S)
        return StillWaiting()

    async def failed(self, launch: str, member: str, kind: str, text: str, fatal: bool) -> None:
        """What ended a member. `fatal`: an error of ours, which another try would only repeat, ends run."""
        self._check(launch)
        self._roster.gone(member, sentences.failure(kind, text))
        await self._do(self._launch.failed(member, kind, text, fatal))

    # ------------------------------------------------------------ calls of the supervisor
    async def status(self, seen: tuple[int, int], wait_s: float) -> RunStatus:
        """The run's status, as soon as it is newer than `seen` (attempt and version of the last answer), at
        latest after `wait_s` seconds.
        """
        self._ensure_running()
        version = seen[1] if seen[0] == self._attempt.number else -1
        deadline = time.monotonic() + wait_s
        while self._version <= version and time.monotonic() < deadline:
            await self._wait_for_change(deadline - time.monotonic())
        view, newest, launch = self._view, self._commits.newest, self._launch
        # whoever hears of the end may end this process
        news = range(version + 1, self._version + 1)
        ended, reason = launch.ended if launch.ended and self._end_is_written else (None, "")
        below = launch.rendezvous.below_minimum_since
        return RunStatus(
            version=self._version,
            attempt=self._attempt.number,
            generation=launch.rendezvous.generation,
            world_size=view.world_size if view else 0,
            last_step=launch.last_step,
            newest_point=newest.name if newest else None,
            committed=newest.cursor if newest else Cursor(),
            waiting_since=None if below is None else time.monotonic() - below,
            ended=ended,
            reason=reason,
            left_out=tuple(info for at, info in self._kills if at in news),
            members=tuple(launch.infos[m] for m in (view.members if view else ()) if m in launch.infos),
            failures=tuple((failure.step, failure.reason) for failure in launch.failures),
            warnings=tuple(text for at, text in self._warnings if at in news),
            stopping=launch.stopping,
            changes=tuple(change for at, change in self._changes if at in news),
            lost=self._roster.losses,
            notices=tuple(text for at, text in self._notices if at in news),
            pid=os.getpid(),
        )

    async def expect(self, num_workers: int) -> None:
        """How many workers the supervisor has started or is starting."""
        self._ensure_running()
        self._launch.rendezvous.expect(num_workers)
        self._wake.set()

    async def stop(self, by: str) -> None:
        """Save and stop at the next step boundary; `by` is who wants it."""
        self._ensure_running()
        if self._launch.stopping:
            return
        self._journal.event(EventKind.CONTROL_REQUEST, what=STOP, by=by, request=0)
        self._launch.request_stop(by)
        self._wake.set()
        await self._notify()

    async def group_failed(self, node: str, reason: str) -> None:
        """The group of a node ended without having been asked to."""
        self._ensure_running()
        await self._do(self._launch.group_failed(node, reason))

    async def note(self, kind: EventKind, fields: dict[str, Any]) -> None:
        """An event of the supervisor for the journal, whose only writer is here."""
        self._ensure_running()
        self._journal.event(kind, **fields)
        if kind == EventKind.GROUP_STOPPED:
            self._roster.node_gone(fields["node"])

    async def end(self, outcome: str, reason: str) -> None:
        """The supervisor ends the run (`failed`, `stopped`): no member is waited for."""
        self._ensure_running()
        await self._do(self._launch.end(outcome, reason))

    # ------------------------------------------------------------ inside
    def _check(self, launch: str) -> None:
        self._ensure_running()
        if launch != self._attempt.launch:
            raise FencedError(self._other_launch(launch))

    def _other_launch(self, launch: str) -> str:
        current = self._attempt.launch
        return f"this is a call of launch {launch}, the run is now launch {current}; the caller exits"

    def _ensure_running(self) -> None:
        """The first call starts the loops: a restarted actor has no caller that would."""
        if not self._tasks:
            at_work = (self._keep_journal, self._beat, self._hear_requests)
            writing = () if self._attempt.earlier.ended is not None else at_work
            loops = (self._act, self._watch_members, *writing)
            self._tasks = [asyncio.get_running_loop().create_task(self._guarded(loop)) for loop in loops]

    async def _guarded(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await loop()
        except Exception as error:  # noqa: BLE001  see `broken`
            await self.broken(error)

    async def _notify(self) -> None:
        self._version += 1
        for identity, over in list(self._overs.items()):
            if self._launch.control_requests(*identity, -1).ended:
                over.set()
                del self._overs[identity]
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, seconds: float) -> None:
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, seconds)):
                    await self._changed.wait()

    def _take_records(self, records: tuple[StepRecord, ...]) -> None:
        for record in records:
            self._journal.step(record)
            self._launch.recorded(record, time.monotonic())

    async def _do(self, actions: Iterable[Action]) -> None:
        """Carries out what the launch machine decided; `Form` is `_act`'s alone."""
        gone: list[VoterGone] = []
        for action in actions:
            match action:
                case Answer():
                    future = self._joins.pop(action.member, None)
                    if future is not None and not future.done():
                        future.set_result(action.answer)
                case Note():
                    self._journal.event(action.kind, **action.fields)
                case Kill():
                    self._kills.append((self._version + 1, action.member))
                    self._roster.gone(action.member.member, sentences.UNRESPONSIVE, Cause.LEFT_OUT)
                case Warn():
                    await self.warned(action.text)
                case Say():
                    self._notices.append((self._version + 1, action.text))
                case VoterGone():
                    gone.append(action)
                case End():
                    await self._write_end(action)
                case Fenced():
                    self._commits.refuse_all()
                    self._end_is_written = True
        await self._notify()
        for event in gone:
            # not awaited: a commit that waits for storage must keep nobody from joining
            self._commits.notify_soon(event)

    def _note_join(self, request: JoinRequest) -> None:
        if self._journalled.get(request.member) == request:
            return  # it asks again
        self._journalled[request.member] = request
        self._journal.event(
            EventKind.JOIN,
            member=request.member,
            actor=request.actor_id,
            node=request.node_id,
            pid=request.pid,
            host=request.host,
            key=_text(request.key),
            leaves=request.leaves,
            unreached=request.unreached,
            reason=request.reason,
        )

    async def _act(self) -> None:
        """Ticks the launch machine and forms the generations that it decides on."""
        while True:
            async with self._commits.lock:
                actions = self._launch.tick(time.monotonic())
                await self._do(action for action in actions if not isinstance(action, Form))
                for action in actions:
                    if isinstance(action, Form):
                        await self._form(action.formation)
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _form(self, formation: Formation) -> None:
        """Journals the generation durably, then answers its members (rule 2); saves that are not on its path
        are given up. While storage fails it tries again, until the launch machine ends the run.
        """
        cursor = formation.cursor or Cursor()
        self._journal.generation(
            GenerationStart(
                attempt=formation.attempt,
                generation=formation.generation,
                parent=formation.parent,
                step=formation.step,
                consumed_samples=cursor.consumed_samples,
                consumed_tokens=cursor.consumed_tokens,
                target_tokens=cursor.target_tokens,
                world_size=len(formation.members),
                global_batch_size=self._start.global_batch_size,
                seq_len=self._start.seq_len,
                members=formation.members,
                cause=self._roster.cause(formation.members),
                copies=len(formation.members),  # before its first step each gets the whole state
            )
        )
        while not await self._flush():
            await self._do(self._launch.tick(time.monotonic()))
            if self._launch.ended is not None:
                return
            await asyncio.sleep(FLUSH_EVERY_S)
        self._fault("generation_journalled", formation.step, -1)
        await self._commits.advance(
            GenerationFormed(generation=formation.generation, parent=formation.parent)
        )
        answers = self._launch.formed(formation, time.monotonic())
        self._acknowledged = formation.step
        for answer in answers:
            if isinstance(answer, Answer) and isinstance(answer.answer, GenerationView):
                self._view = answer.answer
        if answers:
            self._note_change(formation)
        await self._do(answers)

    def _note_change(self, formation: Formation) -> None:
        """For people: how this generation differs from the one before it."""
        before = self._launch.last_step
        change = self._roster.formed(
            formation.attempt,
            formation.generation,
            formation.members,
            formation.step,
            before.step if before else 0,
            time.monotonic(),
        )
        self._changes.append((self._version + 1, change))
        self._journal.event(EventKind.GROUP_FORMED, **encode(change))

    async def _watch_members(self) -> None:
        """Asks whether members live: a dead one is left out at once (liveness is a hint for speed only)."""
        while True:
            began = time.monotonic()
            for info in self._launch.to_ask(self._commits.under_way, began):
                why = await asyncio.to_thread(self._why_dead, info)
                if why is not None:
                    cause = Cause.NODE_LOST if why == NODE_DIED else Cause.WORKER_LOST
                    self._roster.gone(info.member, why, cause)
                    await self._do(self._launch.dead(info.member, why, time.monotonic()))
                    self._joins.pop(info.member, None)
                    self._wake.set()
            await asyncio.sleep(max(LIVENESS_EVERY_S, 5 * (time.monotonic() - began)))  # about 1 ms a member

    async def _keep_journal(self) -> None:
        """Keeps the journal durable, and looks for a newer claim."""
        while True:
            if self._launch.ended is None:
                await self._flush()
                await self._commits.notify(Tick(now_s=time.monotonic()))
            for text in self._metrics.troubles():
                await self.warned(text)
            await asyncio.sleep(FLUSH_EVERY_S)

    async def _flush(self, limit_s: float | None = None) -> bool:
        """Whether all that was noted before is durable now, within `limit_s` (default: storage's own)."""
        began = time.monotonic()
        try:
            durable = await self._commits.on_disk(self._journal.flush, limit_s)
        except StorageError as error:
            await self._do(self._launch.storage_failed(str(error), began))
            return False
        self._acknowledge(durable)
        await self._do(self._launch.storage_worked())
        return True

    def _acknowledge(self, durable: StateKey | None) -> None:
        view = self._view
        if view is None or durable is None:
            return
        if (durable.attempt, durable.generation) == (view.attempt, view.generation):
            self._acknowledged = max(self._acknowledged, durable.step)

    async def _beat(self) -> None:
        while True:
            if self._beating is None or self._beating.done():  # while storage hangs none queue up
                self._beating = self._pulse.submit(self._heartbeat.beat)
            await asyncio.sleep(HEARTBEAT_EVERY_S)

    async def _hear_requests(self) -> None:
        """Looks for what is asked by files in storage, and for pins; while that fails nobody is heard."""
        while self._launch.ended is None:
            with suppress(StorageError):
                look = partial(self._requests.read, self._launch.next_request)
                if request := await in_daemon_thread(look):
                    await self._do(self._launch.asked(request))
                    self._wake.set()
                    continue
                note_pins(self._journal, await in_daemon_thread(self._pins.look))
            await asyncio.sleep(REQUESTS_EVERY_S)

    async def _write_end(self, action: End) -> None:
        newest = self._commits.newest
        if not await self._feeder_notes.last(newest.cursor.consumed_samples if newest else 0):
            await self.warned(NOT_SAID)
        write = partial(
            write_down_end,
            self._store,
            self._journal,
            self._attempt,
            action.outcome,
            action.reason,
            action.by,
            END_WRITTEN_S,
        )
        try:
            await self._commits.on_disk(write, 2 * END_WRITTEN_S)
        except StorageError as error:
            await self.warned(
                f"the end of the run could not be written down: {error}. Nothing that was committed is lost"
            )
        finally:
            await in_daemon_thread(self._metrics.close)  # this process ends with the driver
            self._end_is_written = True  # as far as it can be: the driver ends

    # ------------------------------------------------------------ what the commits report
    async def committed(self, point: Point, newest: bool) -> None:
        """See `CommitListener`: members may be given the newest one to load."""
        self._roster.storage_failed(False)
        await self._do(self._launch.committed(point.key))
        if newest:
            self._launch.rendezvous.set_newest_point(point.key, point.cursor, point.name)
            self._feeder_notes.soon(point.cursor.consumed_samples)
        await self._notify()

    async def gave_up(self, text: str, by_storage: bool) -> None:
        """See `CommitListener`: goes out with the next status."""
        await self.warned(text)
        self._roster.storage_failed(by_storage)
        await self._do(self._launch.save_given_up(text, by_storage, time.monotonic()))

    async def warned(self, text: str) -> None:
        """See `CommitListener`: goes out with the next status."""
        self._warnings.append((self._version + 1, text))
        await self._notify()

    async def fenced(self, reason: str) -> None:
        """A newer attempt exists: acknowledge nothing, write nothing, end the members and the launch."""
        await self._do(self._launch.fence(reason))

    async def broken(self, error: Exception) -> None:
        """See `CommitListener`: whatever it is, the run must end with its reason instead of hanging."""
        reason = f"the coordinator failed: {text_of(error)}"
        await self._do(self._launch.end("failed", reason))


def _text(key: StateKey | None) -> str:
    return key.point_name if key else ""
