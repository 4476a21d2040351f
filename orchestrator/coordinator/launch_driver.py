"""Carries out the decisions of an attempt's launch machine, calls it in time, and keeps the journal durable.

It is the journal's only writer. The launch machine decides which members train and when the run ends. The
commit machine, which `checkpoint.commit.commit_driver.Commits` drives, decides which points exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from orchestrator.checkpoint.commit.commit_driver import CommitListener, Commits, in_daemon_thread
from orchestrator.checkpoint.commit.commit_events import Evaluated, GenerationFormed, GiveUp, Tick, VoterGone
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.points.pins import PinWatch, note_pins
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.ray_state import NODE_DIED
from orchestrator.coordinator.attempt.attempt import Attempt, note_loaded, write_down_end
from orchestrator.coordinator.coordinator_start import CoordinatorStart, commit_machine, launch_machine
from orchestrator.coordinator.journal_notes import (
    NOT_SAID,
    FeederNotes,
    NotFiniteValues,
    SkippedDocuments,
    of_objective,
)
from orchestrator.coordinator.machine.launch_actions import (
    Action,
    Answer,
    End,
    Fenced,
    Kill,
    Leave,
    Note,
    Say,
    Warn,
)
from orchestrator.coordinator.machine.launch_history import LossTrail
from orchestrator.coordinator.pending_calls import EventFeed, GenerationEnds, JoinAnswer, OpenJoins
from orchestrator.elastic.failure import STORAGE_LIMIT_S
from orchestrator.elastic.formation import Form, Formation
from orchestrator.elastic.roster import GenerationCause, Roster
from orchestrator.errors import StorageError, code_of, text_of
from orchestrator.faults import Hook
from orchestrator.history import sentences
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.claims.liveness import Pulse
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.metrics.metric_log import MetricLogs
from orchestrator.history.numbered_files import RequestFiles
from orchestrator.json_form import encode
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView, RunOver
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import EvalRecord, StateKey, StepRecord

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_reports import FeedNotes

TICK_S = 0.05
LATE_S = 0.5  # a tick that is this late shows that the process could not run
FLUSH_EVERY_S = 1.0
HEARTBEAT_EVERY_S = 2.0
REQUESTS_EVERY_S = 1.0
LIVENESS_EVERY_S = 0.05
COORDINATOR_FAILED = "internal.coordinator_failed"  # the code of a launch that ends with another error
END_WRITTEN_S = 15.0  # how long each of the two documents that record the end of a run is retried
LAST_TRY_S = 5.0  # how long an attempt that begins within that time may take


class LaunchDriver(CommitListener):
    """Drives one attempt. All methods run on one event loop. It is the `CommitListener` of its commits.

    For callers: `machine` (its answers go to `carry_out`), `commits`, `journal` (events), `roster`, `news`
    for the supervisor, `joins` and `ends` for members. `view` is the newest formed generation, `acknowledged`
    its newest durable step, and `end_is_written` whether everything is done.
    """

    def __init__(
        self,
        start: CoordinatorStart,
        attempt: Attempt,
        store: RunStore,
        journal: JournalWriter,
        metrics: MetricLogs,
        fault: Hook,
        why_dead: Callable[[MemberInfo], str | None],
        feeder_notes: Callable[[int], Awaitable[FeedNotes | None]] | None,
        losses: LossTrail | None,
    ) -> None:
        """`why_dead` and `feeder_notes` as in `Coordinator`. `metrics` listens to the journal.

        `losses`: of the steps so far, if a policy needs them.
        """
        self.machine, self.journal = launch_machine(start, attempt), journal
        self.joins, self.ends = OpenJoins(), GenerationEnds()
        self.roster = Roster(start.size.max_workers, attempt.earlier.members, attempt.why)
        # the supervisor itself has seen what the first attempt's start found
        restarted = attempt.number != start.attempt.number
        self.news = EventFeed(map(str, attempt.found.unreadable if restarted else ()))
        committer = PointCommitter(
            store,
            journal,
            attempt.number,
            start.flat_config,
            start.rng,
            time.monotonic,
            fault,
            attempt.run_id,
        )
        self.commits = Commits(
            commit_machine(start, attempt), committer, journal, attempt.point, self, start.storage_limit_s
        )
        self.view: GenerationView | None = None
        self.acknowledged = -1
        self.end_is_written = attempt.earlier.ended is not None
        self._start, self._attempt, self._store = start, attempt, store
        self._metrics, self._fault, self._why_dead, self._losses = metrics, fault, why_dead, losses
        skipped = SkippedDocuments(start.storage, attempt.number)
        self._feeder_notes = FeederNotes(feeder_notes, journal, skipped, self.warned)
        self._not_finite = NotFiniteValues(journal, self.news.warn, of_objective(start.flat_config))
        self._pulse = Pulse(store.heartbeat(attempt.number))
        self._requests = RequestFiles(store.storage, attempt.launch, attempt.run_id)
        self._pins = PinWatch(store)
        self._loaded, self._formed_at = "", 0.0  # the newest point that members have loaded
        self._taken: tuple[StateKey, str] | None = None  # the newest evaluation
        self._continues = dict[StateKey, StateKey]()  # the state of a generation's begin, and its parent
        self._evaluated = attempt.evaluated  # the newest step all of whose parts are evaluated
        self._evaluated_at = dict[int, int]()  # and what it was when the newest generation formed
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def ensure_running(self) -> None:
        """Starts the loops at the first call, because a restarted actor has no other trigger."""
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

    def look_soon(self) -> None:
        """Ticks the launch machine soon, because an event may change which members train."""
        self._wake.set()

    def take_records(self, records: tuple[StepRecord, ...]) -> None:
        """Takes step records of a report, a join or a vote. Copies change nothing."""
        for record in records:
            self._note_loaded(record)
            is_new = self.journal.step(record)
            if self._losses is not None:
                self._losses.recorded(record)
            if is_new and record.skipped is not None:
                self.news.say(sentences.step_skipped(record))
            if is_new and record.not_finite:
                self._not_finite.take(record.key, record.not_finite)
            self.machine.recorded(record, time.monotonic())

    async def take_evaluation(self, record: EvalRecord, is_last: bool) -> bool:
        """Takes the evaluation of one part, once; `is_last`: all parts of its step are evaluated.

        Returns whether it is durable.
        """
        if self._taken != (record.key, record.part):
            self._taken = record.key, record.part
            self._note_evaluation(record, is_last)
            self.news.say(sentences.evaluated(record))
            await self.notify()
        return await self.flush()

    def _note_evaluation(self, record: EvalRecord, is_last: bool) -> None:
        self.journal.event(
            EventKind.EVALUATED,
            generation=record.generation,
            step=record.step,
            part=record.part,
            loss=record.loss,
            perplexity=record.perplexity,
            targets=record.targets,
            samples=record.samples,
            per_source=dict(record.per_source),
            metrics=dict(record.metrics),
            seconds=record.seconds,
        )
        self._not_finite.take(record.key, record.not_finite, record.part)
        if f"eval.{record.part}.loss" == self._attempt.best_by:
            key = record.key
            while (before := self._continues.get(key)) is not None:  # a point has the first of its names
                self.commits.notify_soon(Evaluated(key=key, loss=record.loss))
                key = before
            self.commits.notify_soon(Evaluated(key=key, loss=record.loss))
        if is_last:
            self._evaluated = record.step

    def _with_evaluated(self, answer: JoinAnswer) -> JoinAnswer:
        """Tells the members of a generation what was evaluated when its first member was answered."""
        if not isinstance(answer, GenerationView):
            return answer
        if answer.generation not in self._evaluated_at:
            self._evaluated_at = {answer.generation: self._evaluated}
        return replace(answer, evaluated=self._evaluated_at[answer.generation])

    def _note_loaded(self, record: StepRecord) -> None:
        """Journals the loading of a point before the first step after it: all its digests were verified."""
        view = self.view
        if view is None or view.point is None or view.point == self._loaded:
            return
        if (record.attempt, record.generation) == (view.attempt, view.generation):
            self._loaded = view.point
            note_loaded(self.journal, view.point, time.monotonic() - self._formed_at)

    async def carry_out(self, actions: Iterable[Action]) -> None:
        """Carries out what the launch machine decided. Only `_act` handles `Form`."""
        gone: list[VoterGone] = []
        for action in actions:
            match action:
                case Answer():
                    answer = self._with_losses(self._with_evaluated(action.answer))
                    self.joins.answer(action.member, answer)
                case Note():
                    self.journal.event(action.kind, **action.fields)
                case Kill():
                    self.news.kill(action.member)
                    self.roster.gone(action.member.member, sentences.UNRESPONSIVE, GenerationCause.LEFT_OUT)
                case Leave():
                    self.joins.answer(action.member, RunOver(reason=sentences.DRAINED))
                    self.roster.gone(action.member, sentences.DRAINED, GenerationCause.NODE_DRAINED)
                case Warn():
                    await self.warned(action.text)
                case Say():
                    self.news.say(action.text)
                case VoterGone():
                    gone.append(action)
                case End():
                    await self._write_end(action)
                case Fenced():
                    self.commits.refuse_all()
                    self.end_is_written = True
        await self.notify()
        for event in gone:
            # Not awaited: a commit that waits for storage must not prevent members from joining.
            self.commits.notify_soon(event)

    def _with_losses(self, answer: JoinAnswer) -> JoinAnswer:
        """Adds the history before a generation's parent to its view."""
        if self._losses is None or not isinstance(answer, GenerationView):
            return answer
        return replace(answer, losses=self._losses.at(answer.parent))

    async def notify(self) -> None:
        """Wakes all waiting calls after a change."""
        asked = self.machine.control_requests
        self.ends.release(lambda attempt, number: asked(attempt, number, -1).ended)
        await self.news.publish()

    # ------------------------------------------------------------ generations
    async def _act(self) -> None:
        """Ticks the launch machine and forms the generations that it decides on."""
        ticked = time.monotonic()
        while True:
            if (late_s := time.monotonic() - ticked - TICK_S) > LATE_S:
                self.machine.judge_was_late(late_s)
            async with self.commits.lock:
                if self.commits.retries.due(time.monotonic()) and self.machine.ended is None:
                    self.machine.save_again()
                actions = self.machine.tick(time.monotonic())
                await self.carry_out(action for action in actions if not isinstance(action, Form))
                for action in actions:
                    if isinstance(action, Form):
                        await self._form(action.formation)
            ticked = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _form(self, formation: Formation) -> None:
        """Journals the generation durably, then answers its members (rule 2). Saves not on its path are given
        up.

        While storage fails it retries, until the launch machine ends the run.
        """
        for member in self.machine.leavers(formation):
            self.roster.gone(member, sentences.DRAINED, GenerationCause.NODE_DRAINED)
        cause = self.roster.cause(formation.members)
        start = _journalled(formation, self._start, self._attempt, cause)
        self.journal.generation(start)
        if self._losses is not None:
            self._losses.begun(start)
        if start.parent is not None:
            own = StateKey(attempt=start.attempt, generation=start.generation, step=start.step)
            self._continues[own] = start.parent
        while not await self.flush():
            await self.carry_out(self.machine.tick(time.monotonic()))
            if self.machine.ended is not None:
                return
            await asyncio.sleep(FLUSH_EVERY_S)
        self._fault("generation_journalled", formation.step, -1)
        await self.commits.advance(GenerationFormed(generation=formation.generation, parent=formation.parent))
        answers = self.machine.formed(formation, time.monotonic())
        self.acknowledged, self._formed_at = formation.step, time.monotonic()
        for answer in answers:
            if isinstance(answer, Answer) and isinstance(answer.answer, GenerationView):
                self.view = answer.answer
        if answers:
            self._note_change(formation)
        await self.carry_out(answers)

    def _note_change(self, formation: Formation) -> None:
        """Reports, for people, how this generation differs from the previous one."""
        before = self.machine.last_step
        change = self.roster.formed(
            formation.attempt,
            formation.generation,
            formation.members,
            formation.step,
            before.step if before else 0,
            time.monotonic(),
        )
        self.news.formed(change)
        self.journal.event(EventKind.GROUP_FORMED, **encode(change))

    async def _watch_members(self) -> None:
        """Checks whether members live. A dead one is left out at once (liveness is only a hint for speed)."""
        while True:
            began = time.monotonic()
            for info in self.machine.to_ask(self.commits.under_way, began):
                why = await asyncio.to_thread(self._why_dead, info)
                if why is not None:
                    await self.died(info.member, why)
            # about 1 ms per member
            await asyncio.sleep(max(LIVENESS_EVERY_S, 5 * (time.monotonic() - began)))

    async def died(self, member: str, why: str) -> None:
        """The process of `member` is gone."""
        self.roster.gone(
            member, why, GenerationCause.NODE_LOST if why == NODE_DIED else GenerationCause.WORKER_LOST
        )
        await self.carry_out(self.machine.dead(member, why, time.monotonic()))
        self.joins.forget(member)
        self._wake.set()

    # ------------------------------------------------------------ storage
    async def _keep_journal(self) -> None:
        """Keeps the journal durable, and checks for a newer claim."""
        next_s = time.monotonic()
        while True:
            if self.machine.ended is None:
                if time.monotonic() >= next_s:
                    await self.flush()
                    next_s = time.monotonic() + self.journal.least_flush_s
                await self.commits.notify(Tick(now_s=time.monotonic()))
            for text in self._metrics.troubles():
                await self.warned(text)
            await asyncio.sleep(FLUSH_EVERY_S)

    async def flush(self, limit_s: float | None = None) -> bool:
        """Whether everything noted before is now durable, within `limit_s` (default: the limit of
        storage).
        """
        began = time.monotonic()
        try:
            durable = await self.commits.on_disk(self.journal.flush, limit_s)
        except StorageError as error:
            began = min(began, self.commits.hangs_since or began)  # the call that met the failure first
            await self.carry_out(self.machine.storage_failed(str(error), began))
            return False
        self._acknowledge(durable)
        await self.carry_out(self.machine.storage_worked())
        return True

    def _acknowledge(self, durable: StateKey | None) -> None:
        view = self.view
        if view is None or durable is None:
            return
        if (durable.attempt, durable.generation) == (view.attempt, view.generation):
            self.acknowledged = max(self.acknowledged, durable.step)

    async def _beat(self) -> None:
        while True:
            self._pulse.beat()
            await asyncio.sleep(HEARTBEAT_EVERY_S)

    async def _hear_requests(self) -> None:
        """Polls storage for request files and pins. While that fails, requests are not received."""
        while self.machine.ended is None:
            with suppress(StorageError):
                look = partial(self._requests.read, self.machine.next_request)
                if request := await in_daemon_thread(look):
                    await self.carry_out(self.machine.asked(request))
                    self._wake.set()
                    continue
                note_pins(self.journal, await in_daemon_thread(self._pins.look))
            await asyncio.sleep(REQUESTS_EVERY_S)

    async def _write_end(self, action: End) -> None:
        newest = self.commits.newest
        if not await self._feeder_notes.last(newest.cursor.consumed_samples if newest else 0):
            await self.warned(NOT_SAID)
        write = partial(
            write_down_end,
            self._store,
            self.journal,
            self._attempt,
            action.outcome,
            action.reason,
            action.by,
            END_WRITTEN_S,
        )
        try:
            await self.commits.on_disk(write, 2 * (END_WRITTEN_S + LAST_TRY_S))
        except StorageError as error:
            await self.warned(
                f"the end of the run could not be written down: {error}. Nothing that was committed is lost"
            )
        else:
            with suppress(StorageError):  # everything is durable; a failed close leaves the journal in pieces
                await self.commits.on_disk(self.journal.close, END_WRITTEN_S)
        finally:
            await in_daemon_thread(self._metrics.close)  # this process ends with the driver
            self.end_is_written = True  # as far as possible: the driver ends

    # ------------------------------------------------------------ what the commits report
    @override
    async def committed(self, point: Point, newest: bool) -> None:
        """The newest point may now be given to members to load."""
        self.roster.storage_failed(False)
        await self.carry_out(self.machine.committed(point.key, self.commits.took_s))
        if newest:
            self.machine.rendezvous.set_newest_point(point.key, point.cursor, point.name)
            self._feeder_notes.soon(point.cursor.consumed_samples)
        await self.notify()

    @override
    async def gave_up(self, given_up: GiveUp, text: str) -> None:
        """The text is part of the next status."""
        key, now = given_up.key, time.monotonic()
        if given_up.differ is not None:
            await self.carry_out(self.machine.replicas_differ(key, given_up.differ, now))
            self._wake.set()
            return
        await self.warned(text)
        self.roster.storage_failed(given_up.by_storage)
        await self.carry_out(self.machine.save_given_up(key, text, now))

    @override
    def last_tried_s(self, key: StateKey) -> float | None:
        return STORAGE_LIMIT_S if self.machine.is_last(key) else None

    @override
    async def warned(self, text: str) -> None:
        """The text is part of the next status."""
        self.news.warn(text)
        await self.notify()

    async def fenced(self, reason: str) -> None:
        """A newer attempt exists: acknowledge nothing, write nothing, end the members and the launch."""
        await self.carry_out(self.machine.fence(reason))

    @override
    async def broken(self, error: Exception) -> None:
        """After any error the run must end with its reason instead of hanging."""
        reason = f"the coordinator failed: {text_of(error)}"
        code = code_of(error) or COORDINATOR_FAILED
        await self.carry_out(self.machine.end("failed", reason, code=code))


def _journalled(
    formation: Formation, start: CoordinatorStart, attempt: Attempt, cause: GenerationCause
) -> GenerationStart:
    cursor, layout = formation.cursor or Cursor(), attempt.layout(len(formation.members))
    return GenerationStart(
        attempt=formation.attempt,
        generation=formation.generation,
        parent=formation.parent,
        step=formation.step,
        consumed_samples=cursor.consumed_samples,
        consumed_tokens=cursor.consumed_tokens,
        target_tokens=cursor.target_tokens,
        world_size=len(formation.members),
        global_batch_size=start.global_batch_size,
        seq_len=start.seq_len,
        members=formation.members,
        cause=cause,
        copies=layout.num_replicas,  # the copies of each shard before the first step
        num_shards=layout.num_shards,
    )
