"""The coordinator's work for a static group: journal, commits and heartbeat, in threads of rank 0's process.

It drives the same commits as the coordinator, without Ray. The members are fixed, so it makes no decisions.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.checkpoint.commit.commit_driver import Commits, in_daemon_thread
from orchestrator.checkpoint.commit.commit_events import GenerationFormed, GiveUp, PartFailed, Tick
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.points.pins import PinWatch, note_pins
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.attempt.attempt_journal import note_beginning, note_loaded, write_down_end
from orchestrator.coordinator.attempt.metric_sinks import measured
from orchestrator.coordinator.machine.outcome import end_text, ended_by, is_last
from orchestrator.coordinator.machine.requests import Answered, Requests, heard_sentence
from orchestrator.elastic.failure import STORAGE_LIMIT_S, StorageTrouble, until_storage_works
from orchestrator.elastic.roster import Roster
from orchestrator.errors import (
    ElasticError,
    FencedError,
    OrchestratorError,
    StorageError,
    UnsavedError,
    text_of,
)
from orchestrator.faults import hook
from orchestrator.history import sentences
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.claims.liveness import Pulse
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.request_files import SAVE, STOP, Request, RequestFiles
from orchestrator.json_form import encode
from orchestrator.launch.process.stop_signals import grace_left_s
from orchestrator.launch.start import run_preparation as starting
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Vote
from orchestrator.records.run_status import GroupChange, GroupMember, RunStatus
from orchestrator.records.steps import StateKey, StepRecord

if TYPE_CHECKING:
    from orchestrator.torchrun.membership import Start

FLUSH_EVERY_S = 0.5
HEARTBEAT_EVERY_S = 2.0
REQUESTS_EVERY_S = 1.0
VOTE_LIMIT_S = 600.0  # how long a save with missing votes may make no progress
END_WRITTEN_S = 15.0  # how long writing the end of a failed group is retried
SETTLE_LIMIT_S = 300.0  # how long a finished run waits for older points to be verified or deleted
TO_END_S = 5.0  # the part of a rank's grace time that it needs to end


class RankZeroRecorder:
    """`torchrun.membership.Recorder` of one claimed attempt.

    One thread writes: it takes votes, drives the commits, and keeps the journal durable meanwhile. Another
    one writes the heartbeat, and waits for nothing else. If a newer attempt appears, or storage fails for
    longer than its limit, every vote is answered with that error, and the next call of `records` raises it.
    """

    def __init__(
        self,
        store: RunStore,
        attempt: Attempt,
        job: JobConfig,
        say: Callable[[str], None],
        fault_plan: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` shows the user messages that are not errors of the run.

        `clock` (seconds) measures how long saves have failed.
        """
        self._clock = clock
        self._store, self._attempt, self._job, self._say = store, attempt, job, say
        self._fault = hook(fault_plan)
        point, number = attempt.point, attempt.number
        self._metrics = measured(job.flat(), store.storage.root, job.run.name, attempt)
        self._journal = JournalWriter(
            store.storage, number, job.run.name, run_id=attempt.run_id, listener=self._metrics
        )
        kept = KeptPoints(
            keep_latest=job.resume.keep_latest,
            keep_every=job.resume.keep_every,
            keep_best=job.resume.keep_best,
            names=attempt.inherited,
            losses=attempt.losses,
            pinned=point.name if point else None,
        )
        machine = CommitMachine(attempt=number, kept=kept, vote_limit_s=VOTE_LIMIT_S)
        rng = starting.rng_document(job)
        committer = PointCommitter(
            store, self._journal, number, job.flat(), rng, time.monotonic, self._fault, attempt.run_id
        )
        self._commits = Commits(machine, committer, self._journal, point, self, STORAGE_LIMIT_S)
        self._trouble = StorageTrouble()
        self._request_files = RequestFiles(store.storage, attempt.launch, attempt.run_id)
        self._pins = PinWatch(store)
        self._requests = Requests(known=(SAVE, STOP))  # torchrun ends its ranks at once by itself
        self._wants_save = self._wants_stop = False
        self._stop_by = self._save_by = ""
        self._given_up = ""  # the newest save that was given up, and why
        self._loop: asyncio.AbstractEventLoop | None = None  # of the writing thread, while it runs
        self._stopping, self._failed = asyncio.Event(), asyncio.Event()
        self._failure: Exception | None = None
        self._voting: set[asyncio.Task[bool]] = set()
        self._acknowledged, self._began_at = -1, 0.0
        self._generation, self._roster = 1, Roster(0)
        self._world_size = 0
        self.members: Sequence[GroupMember] = ()  # the ranks' processes, for messages
        self._loading = 0, 0
        self._last_step: StepRecord | None = None
        self._over = threading.Event()
        self._writer: threading.Thread | None = None
        self._pulse = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._pulse.start()

    # ---------------------------------------------------------------------- calls of the group
    def begin(self, world_size: int) -> Start:
        """Journals the attempt and its first generation, durably, and starts the writing thread."""
        attempt, self._world_size = self._attempt, world_size
        self._began_at = time.monotonic()
        self._roster = Roster(world_size, why=attempt.why)
        cursor = attempt.point.cursor if attempt.point else Cursor()
        note_beginning(self._journal, attempt, self._job.flat())
        change = self._note_generation(attempt.parent, attempt.step_label, cursor)
        until_storage_works(self._journal.flush, STORAGE_LIMIT_S, "Training has not begun", self._warn)
        self._fault("generation_journalled", attempt.step_label, -1)
        self._acknowledged = attempt.step_label
        began = threading.Event()
        self._writer = threading.Thread(
            target=lambda: asyncio.run(self._record(began)), name="recorder", daemon=True
        )
        self._writer.start()
        began.wait()
        self._say(sentences.group_change(change))
        return self._start(attempt.parent, attempt.step_label, cursor, attempt.point)

    def again(self, key: StateKey, cursor: Cursor | None) -> Start:
        """Journals another generation of the same ranks, durably.

        They hold the state `key`, which could not be saved.
        """
        assert self._loop is not None, "another generation follows the first"
        asyncio.run_coroutine_threadsafe(self._again(key, cursor or Cursor()), self._loop).result()
        return self._start(key, key.step, cursor or Cursor(), None)

    async def _again(self, key: StateKey, cursor: Cursor) -> None:
        async with self._commits.lock:
            self._generation += 1
            change = self._note_generation(key, key.step, cursor)
            while not await self._flush():
                if self._failure is not None:
                    raise self._failure
                await asyncio.sleep(FLUSH_EVERY_S)
            self._acknowledged = key.step
            await self._commits.advance(GenerationFormed(generation=self._generation, parent=key))
        self._say(sentences.group_change(change))

    def _note_generation(self, parent: StateKey | None, step: int, cursor: Cursor) -> GroupChange:
        """Journals the current generation, which continues `parent`; returns the change for reports."""
        attempt, world_size = self._attempt, self._world_size
        members = [str(rank) for rank in range(world_size)]
        layout = attempt.layout(world_size)
        self._journal.generation(
            GenerationStart(
                attempt=attempt.number,
                generation=self._generation,
                parent=parent,
                step=step,
                consumed_samples=cursor.consumed_samples,
                consumed_tokens=cursor.consumed_tokens,
                target_tokens=cursor.target_tokens,
                world_size=world_size,
                global_batch_size=self._job.train.global_batch_size,
                seq_len=self._job.pack.seq_len,
                cause=self._roster.cause(members),
                copies=layout.num_replicas,
                num_shards=layout.num_shards,
            )
        )
        change = self._roster.formed(attempt.number, self._generation, members, step, step, time.monotonic())
        self._journal.event(EventKind.GROUP_FORMED, **encode(change))
        return change

    def _start(self, parent: StateKey | None, step: int, cursor: Cursor, point: Point | None) -> Start:
        from orchestrator.torchrun.membership import Start

        return Start(
            launch=self._attempt.launch,
            attempt=self._attempt.number,
            generation=self._generation,
            parent=parent,
            point=point.name if point else None,
            cursor=cursor,
            step=step,
        )

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """Stores the progress for `status`."""
        self._loading = done_bytes, num_bytes

    def records(self, records: Sequence[StepRecord]) -> None:
        """Journals records, which are durable soon after. Raises the error that ended the
        recording, if any.
        """
        if self._failure is not None:
            raise self._failure
        for record in records:
            if self._last_step is None and self._attempt.point is not None:
                note_loaded(self._journal, self._attempt.point.name, time.monotonic() - self._began_at)
            self._journal.step(record)
            self._last_step = record

    def digest(self, key: StateKey, weights_digest: str) -> None:
        """Journals the digest of the weights of `key`."""
        self._journal.event(
            EventKind.STATE_DIGEST,
            generation=key.generation,
            step=key.step,
            weights_digest=weights_digest,
        )

    def acknowledged_step(self) -> int:
        """Returns the label up to which all records are durable."""
        return self._acknowledged

    def asked(self) -> tuple[bool, bool]:
        """Returns whether a save, and whether a stop, was requested from outside."""
        return self._wants_save, self._wants_stop

    def ask_save(self, by: str) -> None:
        """Requests a save, for a signal. Takes no lock, because the handler may have interrupted the lock's
        holder.
        """
        self._save_by = by

    def vote(self, vote: Vote) -> Future[bool]:
        """Passes a vote to the commit machine. True: the point is committed. False: the save was given up."""
        self._wants_save = False  # it has begun
        assert self._loop is not None, "a group votes after it has begun"
        if self._failure is None:
            with suppress(RuntimeError):  # the loop has just ended
                return asyncio.run_coroutine_threadsafe(self._vote(vote), self._loop)
        answer: Future[bool] = Future()
        answer.set_exception(self._failure or _ended("the attempt has ended"))
        return answer

    def save_failed(self, key: StateKey, rank: int, world_size: int, reason: str) -> None:
        """Gives up the save of `key`, because a rank could not write its part. Its votes are answered
        accordingly.
        """
        self._wants_save = False  # it has begun
        failed = PartFailed(key=key, rank=rank, world_size=world_size, reason=reason, now_s=time.monotonic())
        assert self._loop is not None, "a group saves after it has begun"
        with suppress(RuntimeError):  # the loop has just ended
            self._loop.call_soon_threadsafe(self._commits.notify_soon, failed)

    def finished(self, key: StateKey, reason: str, stop_by: str = "") -> None:
        """Waits until all pending work is done, and ends the attempt.

        The work includes deletions of older points, which may take `SETTLE_LIMIT_S`. Failing storage is
        retried for `STORAGE_LIMIT_S`. `stop_by`: the sender of a signal to stop ("": there was none).
        """
        self._stop_writing()
        if self._failure is not None:
            raise self._failure
        text = end_text(reason, key.step, trained=self._last_step is not None)
        self._end(reason, text, STORAGE_LIMIT_S, stop_by)

    # ---------------------------------------------------------------------- calls of who runs the group
    def failed(self, error: BaseException) -> None:
        """Records that the group ended with `error`, unless another launch has taken the run over."""
        self._stop_writing()
        if isinstance(error, FencedError) or isinstance(self._failure, FencedError):
            self._over.set()
            return
        # waiting for storage would prevent the report of why the group ended
        if self._commits.hangs_since is not None:
            self._warn(
                "the end of the run could not be written down: storage does not answer. Nothing that was "
                "committed is lost"
            )
            self._over.set()
            return
        reason = text_of(error)
        if isinstance(error, UnsavedError) and self._given_up:
            reason = f"{reason}. Why: {self._given_up}"  # the origin of the stop reads no more than this
        # if storage is what failed, `error` states it, and the end is not recorded
        with suppress(OrchestratorError):
            self._end("failed", reason, END_WRITTEN_S)

    def status(self) -> RunStatus:
        """Returns what is known now, for the progress line."""
        newest = self._commits.newest
        return RunStatus(
            version=0,
            attempt=self._attempt.number,
            generation=self._generation,
            world_size=self._world_size,
            last_step=self._last_step,
            newest_point=newest.name if newest else None,
            committed=newest.cursor if newest else Cursor(),
            waiting_since=None,
            ended=None,
            reason="",
            left_out=(),
            members=(),
            failures=(),
            loading=self._loading if self._last_step is None else (0, 0),
        )

    # ---------------------------------------------------------------------- inside
    def _end(self, outcome: str, reason: str, limit_s: float, stop_by: str = "") -> None:
        by = ended_by(outcome, stop_by or self._stop_by, self._attempt.budgets, self._last_step)
        self._note_answers(self._requests.ended(outcome, reason))
        try:
            write_down_end(
                self._store, self._journal, self._attempt, outcome, reason, by, limit_s, self._warn
            )
        finally:
            self._over.set()
        with suppress(StorageError):  # everything is durable
            self._journal.close()
        self._metrics.close()

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    def _beat(self) -> None:
        # a hint for other starts, which also watch the journal grow
        pulse = Pulse(self._store.heartbeat(self._attempt.number))
        pulse.beat()
        while not self._over.wait(HEARTBEAT_EVERY_S):
            pulse.beat()

    def _stop_writing(self) -> None:
        """Waits until all pending work has ended."""
        if self._writer is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._writer.join()

    async def _record(self, began: threading.Event) -> None:
        """Runs the writing thread: votes as they arrive, journal and time in between."""
        self._loop = asyncio.get_running_loop()
        began.set()
        hearing = asyncio.create_task(self._hear_requests())
        try:
            formed = GenerationFormed(generation=self._generation, parent=self._attempt.parent)
            await self._commits.notify(formed)
            next_s = time.monotonic()
            while self._failure is None and not self._stopping.is_set():
                if time.monotonic() >= next_s:
                    await self._flush()
                    next_s = time.monotonic() + self._journal.least_flush_s
                await self._commits.notify(Tick(now_s=time.monotonic()))
                with suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_EVERY_S):
                        await self._stopping.wait()
            limit_s = min(SETTLE_LIMIT_S, max(0.0, grace_left_s() - TO_END_S))
            if not await self._commits.settle(limit_s):
                self._warn(
                    f"storage has not verified or deleted older points for {limit_s:.0f} s; "
                    "the run ends without waiting for it. Nothing that was committed is lost"
                )
        except Exception as error:  # noqa: BLE001  after any error the votes must be answered
            self._fail(error)
        hearing.cancel()
        if self._voting:
            self._fail(_ended("the group ended before this save was decided"))
            await asyncio.wait(self._voting)

    async def _hear_requests(self) -> None:
        """Polls storage for request files. While that fails, requests are not received."""
        try:
            while True:
                with suppress(StorageError):
                    look = partial(self._request_files.read, self._requests.next_number)
                    if request := await in_daemon_thread(look):
                        self._hear(request)
                    note_pins(self._journal, await in_daemon_thread(self._pins.look))
                if by := self._save_by:
                    self._save_by, self._wants_save = "", True
                    self._journal.event(EventKind.CONTROL_REQUEST, what=SAVE, by=by, request=0)
                again = self._commits.retries.due(time.monotonic())
                self._wants_save = self._requests.wants_save(self._clock()) or again or self._wants_save
                await asyncio.sleep(REQUESTS_EVERY_S)
        except Exception as error:  # noqa: BLE001  no caller awaits it: requests would be lost silently
            self._fail(error)

    def _hear(self, request: Request) -> None:
        self._journal.event(
            EventKind.CONTROL_REQUEST, what=request.what, by=request.by, request=request.number
        )
        trained, newest = self._last_step.key if self._last_step else None, self._commits.newest
        answer = self._requests.heard(request, trained, newest.key if newest else None)
        self._say(heard_sentence(request, answer))
        if answer is not None:
            self._note_answers([answer])
        if request.what == STOP:
            self._wants_stop, self._stop_by = True, self._stop_by or request.by

    def _note_answers(self, answers: Iterable[Answered]) -> None:
        for answer in answers:
            self._journal.event(EventKind.REQUEST_ANSWERED, **answer.fields)

    async def _vote(self, vote: Vote) -> bool:
        answer = asyncio.create_task(self._commits.vote(vote))
        failed = asyncio.create_task(self._failed.wait())
        this = asyncio.current_task()
        assert this is not None, "a vote is a task"
        self._voting.add(this)
        try:
            await asyncio.wait({answer, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return answer.result() is True
        finally:
            self._voting.discard(this)
            for task in (answer, failed):
                task.cancel()

    async def _flush(self) -> bool:
        """Whether everything noted before is now durable."""
        began = time.monotonic()
        try:
            durable = await self._commits.on_disk(self._journal.flush)
        except StorageError as error:
            began = min(began, self._commits.hangs_since or began)  # the call that met the failure first
            text = self._trouble.failed(str(error), began)
            if reason := self._trouble.verdict(time.monotonic()):
                self._fail(StorageError(reason, code="storage.failing"))
            durable, worked = None, False
        else:
            text, worked = self._trouble.worked(), True
            if durable is not None and durable.generation == self._generation:
                self._acknowledged = durable.step
        for said in ([text] if text else []) + self._metrics.troubles():
            self._warn(said)
        return worked

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._failed.set()

    # ---------------------------------------------------------------------- what the commits report
    async def committed(self, point: Point, newest: bool) -> None:
        """See `CommitListener`: the next status includes it."""
        self._note_answers(self._requests.committed(point.key))

    async def gave_up(self, given_up: GiveUp, text: str) -> None:
        """See `CommitListener`: the group continues to train, unless its replicas differ.

        If they differ, the group ends, and torchrun's next start of it continues the newest resume point.
        """
        if given_up.differ is not None:
            text = given_up.differ.given_up(given_up.key, self._worker)
            self._fail(ElasticError(text, code="training.replicas_differ"))
        self._given_up = text
        await self.warned(text)
        self._roster.storage_failed(given_up.by_storage)
        self._requests.save_given_up(self._clock())

    def _worker(self, rank: int) -> str:
        """Returns the process of this rank, with its machine if known."""
        found = next((each for each in self.members if each.rank == rank), None)
        return f"rank {rank} (pid {found.pid} on {found.host})" if found else f"rank {rank}"

    def last_tried_s(self, key: StateKey) -> float | None:
        """See `CommitListener`."""
        last = is_last(key, self._last_step, self._attempt.budgets, self._wants_stop)
        return STORAGE_LIMIT_S if last else None

    async def warned(self, text: str) -> None:
        """See `CommitListener`."""
        self._warn(text)

    async def fenced(self, reason: str) -> None:
        """See `CommitListener`: the attempt ends, and writes nothing more."""
        self._fail(FencedError(reason))

    async def broken(self, error: Exception) -> None:
        """See `CommitListener`."""
        self._fail(error)


def _ended(text: str) -> ElasticError:
    """Builds the error with which a vote is answered that the attempt's end overtook."""
    return ElasticError(text, code="launch.attempt_ended")
