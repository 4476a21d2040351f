"""The Feeder actor: packs token chunks and serves shares of steps to the ranks. `start_feeder` creates it.

It takes the chunks from the Ray Data pipeline in order. Everything that it returns is a pure function of the
run's data, a cursor and a step's range. It may therefore be killed and opened again at any time. Ray Data
itself is loaded only in the actor's process.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from orchestrator.cluster.shield import end_without_raylet, outlive_sigterm
from orchestrator.data.feed.buffers import TOGETHER_BYTES, Admission, HeldStep
from orchestrator.data.feed.feed_reports import FeederStats, FeedLog, FeedNotes, SignsOfWork
from orchestrator.data.feed.memory import MemoryShares
from orchestrator.data.feed.pipeline_thread import (
    PipelineSettings,
    PipelineThreads,
    TokenizerPool,
    num_pipeline_threads,
)
from orchestrator.data.feed.remote_feed import Reopen
from orchestrator.data.feed.stream_session import UNEXPECTED, EpochLists, Opening
from orchestrator.data.feed.window_scheduler import NoTask
from orchestrator.data.packing.step_samples import StepShare
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError, FeedError, FencedError, OrchestratorError
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import TokenChunk, WindowTask

# A window that was started this often is assumed to kill its tokenizer each time.
MAX_EXECUTIONS = 4
# A rank waited for samples and no tokenizer made progress for this long: there is no CPU for them, or storage
# hangs.
STALL_S = 600.0
# A pipeline that moves to another place has this long to finish the slots of the place before, each at most
# one chunk. Ray may wait forever for chunks that were lost with their machine.
ARRIVAL_S = 60.0
# An answer with later steps waits this long for more of them once its first step is ready. Each answer costs
# the feeder and Ray two milliseconds, whatever its size.
LINGER_S = 0.1
# The maximum number of concurrent calls of ranks and tokenizers.
MAX_CALLS = 20_000


class Feeder:
    """Serves the ranks and tokenizers of one launch. Create it with `start_feeder`.

    All methods run on one event loop. A thread reads the pipeline.

    Memory: the tokens of the next requested steps and one chunk, the pipeline's prefetch in the object store,
    and `replay_bytes` of steps that may be requested again. A data error is final: every later `get` returns
    it. After its process has died, the feeder is empty and answers `Reopen` until it is opened.
    """

    def __init__(
        self,
        launch: str,
        spec: bytes,
        tokenizers: TokenizerPool,
        replay_bytes: int,
        stall_s: float = STALL_S,
        memory: MemoryShares | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spec` is what `pinned` made of the `DataSpec`. Without `memory`, only the bounds above apply."""
        self._memory = memory
        self._launch, self._reference = launch, ray.cloudpickle.loads(spec)
        self._spec: DataSpec = ray.get(self._reference)
        self._num_tokenizers, self._replay_bytes, self._stall_s = tokenizers.num, replay_bytes, stall_s
        self._now, self._work = now, SignsOfWork(stall_s, now)
        self._threads = PipelineThreads(
            PipelineSettings(
                spec=self._reference,
                tokenizers=tokenizers,
                limits=None if memory is None else memory.limits,
            )
        )
        self._generation = (0, 0)
        self._run: Opening | None = None
        # the number of the running pipeline, if any; it is reused from place to place
        self._pipeline: int | None = None
        self._num_pipelines = 0
        self._error: OrchestratorError | None = None
        self._changed = asyncio.Condition()
        self._opens = self._waits = 0
        self._wait_s = 0.0
        # the event loop itself keeps only weak references
        self._arrivals: asyncio.Task[None] | None = None
        self._lists = EpochLists(self._spec)
        self._feed_log = FeedLog()

    # -------------------------------------------------------------------------------- for ranks
    async def open(self, launch: str, generation: tuple[int, int], cursor: Cursor) -> None:
        """Continues at `cursor`: from memory if those steps are held, else by opening the pipeline there.

        Returns before data is available. Idempotent. Ignores a call of an older generation, and a call for a
        place that this generation's opening will reach. Generation (attempt, 0) opens ahead of the first one.
        Raises `FencedError` for another launch.
        """
        if launch != self._launch:
            raise self._fenced(launch)
        async with self._changed:
            same = generation == self._generation
            if generation < self._generation:
                return
            self._generation = generation
            run = self._run
            held = run is not None and run.steps.serves(cursor)
            coming = (
                run is not None and same and cursor.consumed_samples > run.steps.next_cursor.consumed_samples
            )
            if not held and not coming:
                self._start(cursor)
            self._changed.notify_all()

    async def get(
        self,
        launch: str,
        generation: tuple[int, int],
        steps: tuple[StepRange, ...],
        rank: int,
        world_size: int,
        micro_batch_size: int,
        urgent: bool = True,
    ) -> tuple[StepShare, ...] | Reopen | OrchestratorError:
        """Waits for the rank's share of the first of `steps`, or for the part of it that the data still have.

        Also returns the shares of the following steps that are ready, about `TOGETHER_BYTES` in all. If not
        `urgent`, it waits up to `LINGER_S` for them. Returns `Reopen` if the first step lies before what is
        held.

        Errors are returned, not raised: the error of the data, `FeedError` if the pipeline stalls,
        `FencedError` for another launch.
        """
        if launch != self._launch:
            return self._fenced(launch)
        began, waited = self._now(), False
        async with self._changed:
            while (found := self._find(generation, steps[0])) is None:
                waited = True
                if not await self._await_change(began):
                    found = self._stalled(steps[0])
                    break
            if not isinstance(found, HeldStep):
                return found
            if self._run is not None and self._run.want(steps):
                self._changed.notify_all()
            mine = (rank, world_size, micro_batch_size)
            shares = [found.samples.share(*found.samples_of(*mine))]
            room, until = TOGETHER_BYTES - shares[0].nbytes, self._now() + (0.0 if urgent else LINGER_S)
            for step in steps[1:]:
                if room <= 0 or shares[-1].facts.end_of_data:
                    break
                while (more := self._there(step, steps[0])) is None and self._may_come(steps[0]):
                    if not await self._changes_before(until):
                        break
                if more is None:
                    break
                shares.append(more.samples.share(*more.samples_of(*mine)))
                room -= shares[-1].nbytes
                await self._let_others()
        self._waits += waited
        self._wait_s += self._now() - began
        return tuple(shares)

    async def committed(self, consumed_samples: int) -> None:
        """A resume point at `consumed_samples` is committed. Steps before it will not be requested again."""
        if self._run is not None:
            self._run.steps.committed(consumed_samples)

    async def notes(self, consumed_samples: int) -> FeedNotes:
        """Returns the notes up to `consumed_samples`, each once in the feeder's life.

        Notes that were not returned before the process died are lost. The counts in the cursor are not.
        """
        return self._feed_log.give(consumed_samples)

    async def stats(self) -> FeederStats:
        """Returns counts. A rank also uses it to check that a restarted feeder is alive."""
        run = self._run
        return FeederStats(
            pid=os.getpid(),
            generation=self._generation,
            opens=self._opens,
            steps_held=len(run.steps) if run else 0,
            bytes_held=run.steps.held_bytes if run else 0,
            first_sample_held=run.steps.first_sample if run else 0,
            next_sample=run.steps.next_cursor.consumed_samples if run else 0,
            buffered_tokens=run.buffered_tokens if run else 0,
            slots_taken=run.slots.taken if run else 0,
            slots_given=run.slots.given if run else 0,
            bytes_passed=self._work.bytes_passed,
            waits=self._waits,
            wait_s=self._wait_s,
            pipeline_threads=num_pipeline_threads(),
        )

    async def close(self) -> None:
        """Stops the pipeline and waits until its thread has ended. The feeder is empty afterwards."""
        self._run = self._pipeline = None
        await self._notify()
        await self._threads.joined()

    # -------------------------------------------------------------------------------- for tokenizers
    async def slot(self, pipeline: int, slot: int) -> WindowTask | None:
        """Waits until `slot` is known and has room, and returns its task. This bounds the prefetch.

        Returns None if the slot is no window, if it belongs to a place that was left, or if the pipeline is
        over.
        """
        async with self._changed:
            while (run := self._run_of(pipeline, slot)) is not None:
                task = run.begin(slot)
                self._lists.make(run.awaited, partial(self._listed, run))
                if task is not NoTask.NOT_YET:
                    break
                await self._changed.wait()
            else:
                return None
            self._work.note()
            self._changed.notify_all()  # the next slot may be ready now
            if not isinstance(task, WindowTask):
                return None
            if run.slots.executions(slot) > MAX_EXECUTIONS:
                self._end(
                    FeedError(
                        f"{MAX_EXECUTIONS} tokenizers died over block {task.block} of source {task.source} "
                        f"(epoch {task.epoch}, window {task.window}); most often it is memory: give the "
                        "tokenizers' machines more, or lower data.num_tokenizers; a smaller "
                        "data.window_bytes needs a new run (another run.name)",
                        code="feed.tokenizers_died",
                    )
                )
                return None
            return task

    async def read(self, pipeline: int, slot: int, task: WindowTask, num_windows: int | None) -> bool:
        """A tokenizer has read `task` for `slot`. `num_windows` as in `Slots.read`.

        Returns False if the task is no longer wanted.
        """
        async with self._changed:
            run = self._run_of(pipeline, slot)
            if run is None:
                return False
            self._work.note()
            try:
                run.slots.read(slot, task, num_windows)
            except DataIdentityError as error:
                self._end(error)
                return False
            self._changed.notify_all()
            return True

    async def working(self, pipeline: int, slot: int, bytes_passed: int) -> bool:
        """A tokenizer is working on `slot` and has skipped `bytes_passed` more bytes before its window.

        Returns False if the slot is no longer wanted.
        """
        if self._run_of(pipeline, slot) is None:
            return False
        self._work.note(bytes_passed)
        return True

    async def room(self, pipeline: int, slot: int, num_bytes: int) -> bool:
        """A tokenizer sends a chunk of `num_bytes` for `slot`. Returns once there is room for another.

        Returns False if no more chunks are wanted.
        """
        async with self._changed:
            self._work.note()
            if (run := self._run_of(pipeline, slot)) is not None:
                run.announce(slot, num_bytes)
            while (run := self._run_of(pipeline, slot)) is not None:
                if (found := run.goes_on(slot)) is Admission.YES:
                    return True
                if found is Admission.NEVER:
                    self._end(run.no_room())
                    break
                await self._changed.wait()
            return False

    async def failed(self, pipeline: int, slot: int, error: OrchestratorError) -> bool:
        """Ends the feeder with a tokenizer's error over `slot`, at once, even if earlier slots are
        unfinished.

        Returns False if the slot is no longer wanted; its error is ignored then.
        """
        async with self._changed:
            if self._run_of(pipeline, slot) is None:
                return False
            self._end(error)
            return True

    async def _listed(self, run: Opening, source: str, epoch: int, wrong: OrchestratorError | None) -> None:
        """Handles the end of listing an epoch's files: success, or the error `wrong`."""
        async with self._changed:
            self._lists.done(source, epoch)
            self._work.note()
            if wrong is not None and self._run is run:
                self._end(wrong)
            self._changed.notify_all()

    def _run_of(self, pipeline: int, slot: int) -> Opening | None:
        """The opening that the slot belongs to, unless it was left."""
        run = self._running(pipeline)
        return run if run is not None and run.slots.has(slot) else None

    def _running(self, pipeline: int) -> Opening | None:
        """The opening that this pipeline serves, unless it is over."""
        return self._run if pipeline == self._pipeline and self._error is None else None

    # -------------------------------------------------------------------------------- for the thread
    async def goes_on(self, pipeline: int) -> bool:
        """Whether this pipeline has more to read. If not, it stops being the current one."""
        run = self._running(pipeline)
        if run is not None and run.over:
            self._pipeline = None
        return run is not None and not run.over

    async def take(self, pipeline: int, slot: int, chunk: TokenChunk | None) -> bool:
        """Waits until a chunk is wanted and takes it, or a slot without one. Returns False if no more are
        wanted.
        """
        async with self._changed:
            while (run := self._running(pipeline)) is not None and not run.wants:
                await self._changed.wait()
            if run is None:
                return False
            if chunk is not None and run.slots.has(slot):
                self._feed_log.differences(chunk.encoder_differences)
            run.take(slot, chunk)
            self._work.note()
            self._changed.notify_all()
            return await self.goes_on(pipeline)

    async def pipeline_failed(self, pipeline: int, error: Exception) -> None:
        """Starts another pipeline if possible, else reports the error to the ranks."""
        text = "".join(traceback.format_exception(error))
        ours = (
            error
            if isinstance(error, OrchestratorError)
            else FeedError(f"the data pipeline ended: {error}\n{text}", code=UNEXPECTED)
        )
        async with self._changed:
            run = self._running(pipeline)
            if run is not None and not self._start_anew(run):
                self._end(ours)

    # -------------------------------------------------------------------------------- inside
    def _fenced(self, launch: str) -> FencedError:
        return FencedError(
            f"this is the feeder of launch {self._launch}, the caller belongs to {launch}; it has to end"
        )

    def _find(
        self, generation: tuple[int, int], step: StepRange
    ) -> HeldStep | Reopen | OrchestratorError | None:
        """The step, drawn now if it is next. None if it is not available yet."""
        if self._error is not None:
            return self._error
        run = self._run
        if run is None:
            return Reopen(
                generation=self._generation, reason="the feeder has not been opened since its process started"
            )
        held = run.steps.find(step.first_sample)
        if held is not None and held.asked == step:
            return held
        if held is not None:  # other batch size or seq_len: drawn again from there
            run = self._start(held.before)
            self._changed.notify_all()
            if run is None:
                return self._error
        next_sample = run.steps.next_cursor.consumed_samples
        if step.first_sample == next_sample:
            return self._draw(run, step)
        if step.first_sample < next_sample or generation < self._generation:
            return Reopen(
                generation=self._generation,
                reason=f"sample {step.first_sample} is asked for, the feeder holds those from "
                f"{run.steps.first_sample} on and continues with {next_sample}",
            )
        return None

    def _there(self, step: StepRange, first: StepRange) -> HeldStep | None:
        """The step, if it is held or can be drawn at once. The caller receives the steps from `first` on."""
        run = self._run
        held = None if run is None else run.steps.find(step.first_sample)
        if run is None or held is not None:
            return held if held is not None and held.asked == step else None
        follows = step.first_sample == run.steps.next_cursor.consumed_samples
        return self._draw(run, step) if follows and run.steps.has_room_ahead(first.first_sample) else None

    def _may_come(self, first: StepRange) -> bool:
        """Whether a step that is not available may become available soon."""
        run = self._run
        return run is not None and self._error is None and run.steps.has_room_ahead(first.first_sample)

    def _draw(self, run: Opening, step: StepRange) -> HeldStep | None:
        wanted = run.wants
        samples = run.stream.draw(step)
        if samples is not None or run.wants != wanted:
            self._changed.notify_all()  # there may be room for the next chunk
        if samples is None:
            return None
        self._feed_log.add(samples)
        return run.steps.append(step, samples)

    async def _await_change(self, since: float) -> bool:
        """Waits, with the lock, until something changes.

        Returns False if no tokenizer made progress for `stall_s` and no list is being made for them.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(
                self._stall_s if self._lists.making else max(0.0, self._work.left_s(since))
            ):
                await self._changed.wait()
        return self._lists.making or self._work.left_s(since) > 0

    async def _let_others(self) -> None:
        """Releases the lock once for other waiters. A step takes milliseconds, and tokenizers stall until
        they are answered.
        """
        self._changed.release()
        try:
            await asyncio.sleep(0)
        finally:
            await self._changed.acquire()

    async def _changes_before(self, time: float) -> bool:
        """Waits, with the lock, until something changes. Returns False if nothing does before `time`."""
        try:
            async with asyncio.timeout(max(0.0, time - self._now())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _stalled(self, step: StepRange) -> Reopen | OrchestratorError:
        run = self._run
        if run is None or step.first_sample != run.steps.next_cursor.consumed_samples:
            # the missing steps were not requested by any rank, so the pipeline is not to blame
            reason = f"nobody asked for what lies before sample {step.first_sample} in {self._stall_s:.0f} s"
            return Reopen(generation=self._generation, reason=reason)
        error = FeedError(
            f"a worker waits for the samples from {step.first_sample} on, and no tokenizer has done anything "
            f"for {self._stall_s:.0f} s; the {self._num_tokenizers} tokenizers (data.num_tokenizers) need a "
            "CPU each beside the training workers: are they free? does the storage answer?",
            code="feed.stalled",
        )
        self._end(error)
        return error

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _end(self, error: OrchestratorError) -> None:
        """Ends the feeder. Every rank receives the first error. Call with the lock."""
        self._error = self._error or error
        self._changed.notify_all()

    # -------------------------------------------------------------------------------- the pipeline
    def _start(self, cursor: Cursor, with_pipeline: bool = True) -> Opening | None:
        """Continues at `cursor`. Returns None if that fails at once.

        A running pipeline moves there: its tokenizers keep running and abandon the slots of the place before.
        Without `with_pipeline`, a new pipeline is started.
        """
        self._opens += 1
        before = self._run if with_pipeline and self._pipeline is not None else None
        try:
            run = Opening(
                self._spec, cursor, self._num_tokenizers, self._replay_bytes, before, memory=self._memory
            )
        except OrchestratorError as error:
            self._end(error)
            return None
        self._run = run
        self._work.note()
        if before is None:
            self._start_pipeline()
        elif run.slots.arriving:
            self._arrivals = asyncio.create_task(self._await_arrival(run))
        return run

    def _start_pipeline(self) -> None:
        """Starts a pipeline. The previous one ends by itself: its tokenizers are refused and its thread
        ends.
        """
        self._num_pipelines += 1
        self._pipeline = self._num_pipelines
        self._threads.start(self._pipeline, self)

    async def _await_arrival(self, run: Opening) -> None:
        """Gives the pipeline `ARRIVAL_S` to reach the slots of `run`, then starts another one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_S), self._changed:
                await self._changed.wait_for(lambda: not self._is_arriving(run))
        async with self._changed:
            self._start_anew(run)

    def _is_arriving(self, run: Opening) -> bool:
        wanted = self._run is run and self._pipeline is not None and self._error is None
        return wanted and run.slots.arriving

    def _start_anew(self, run: Opening) -> bool:
        """Starts another pipeline if the running one has not reached the slots of `run`.

        None of those slots is taken, so nothing is lost; the place before is the cause. Call with the lock.
        """
        if not self._is_arriving(run):
            return False
        self._start(run.steps.next_cursor, with_pipeline=False)
        self._changed.notify_all()
        return True


# -------------------------------------------------------------------------------------------------- the actor
def feeder_name(launch: str) -> str:
    """The actor's name within the launch's namespace."""
    return f"feeder-{launch}"


def start_feeder(
    launch: str,
    spec: DataSpec,
    *,
    tokenizers: TokenizerPool,
    replay_bytes: int,
    stall_s: float = STALL_S,
    memory: MemoryShares | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Creates the launch's feeder and returns its handle. The actor lives as long as the handle's owner.

    `options`: more options for Ray's `.options`. The feeder itself reserves no CPUs. `memory`: what each part
    of the feed may hold; None: only the bounds of the data rules.

    `spec` is put into Ray's object store once. The feeder and every tokenizer read it from there and hold it
    in memory, so it must fit into both.
    """
    wanted: dict[str, Any] = {
        "name": feeder_name(launch),
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,  # the ranks retry themselves
        "max_concurrency": MAX_CALLS,
        **(options or {}),
    }
    arguments = (tokenizers, replay_bytes, stall_s, memory)
    return ray.remote(FeederActor).options(**wanted).remote(launch, pinned(spec), *arguments)


class FeederActor(Feeder):
    """The feeder in a process that Ray started. The process outlives that Ray for a while, because members
    that save need the batch that they are training.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        outlive_sigterm()
        end_without_raylet(lambda: False)


def pinned(spec: object) -> bytes:
    """Puts `spec`, the data of a run, into Ray's object store and returns a small value that leads to it.

    The object stays as long as this process is connected. A reference that is pickled by itself pins its
    object. Passed as an actor argument it would not, and a restarted actor needs its arguments again. The
    actor's class, which Ray also stores, has room for only 95 MiB.
    """
    value: bytes = ray.cloudpickle.dumps(ray.put(spec))  # type: ignore[no-untyped-call]
    return value
