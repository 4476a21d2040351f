"""One opening of the stream at a cursor, as plain state: its slots, delivered chunks and packed steps.

The feeder queries it for what may happen now. `EpochLists` lists the files of coming epochs in the background
meanwhile.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.data.common.process_limits import TOO_LITTLE_MEMORY
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.feed.buffers import Admission, Flight, ReplayBuffer
from orchestrator.data.feed.window_scheduler import NoTask, Slots, SourceWindows
from orchestrator.data.packing.stream import Stream
from orchestrator.data.sources.lists.fragments import SourcePlan, decoded_bytes
from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError, OrchestratorError
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.order import block_at
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import TokenChunk, WindowTask

if TYPE_CHECKING:
    from orchestrator.data.feed.memory import MemoryShares

# At most this many tokens, and one chunk, are taken from the pipeline before their steps are drawn.
MAX_WANTED_TOKENS = 1 << 23


class Opening:
    """The stream from `cursor` on: slots for the pipeline, steps for the ranks.

    `after`: the previous opening; the running pipeline continues from its slots. Raises `DataIdentityError`
    if the data have no such place.
    """

    def __init__(
        self,
        spec: DataSpec,
        cursor: Cursor,
        num_tokenizers: int,
        replay_bytes: int,
        after: Opening | None = None,
        memory: MemoryShares | None = None,
    ) -> None:
        self.stream: Stream = spec.stream(cursor)
        self._memory, self._flight = memory, Flight(None if memory is None else memory.flight_limit)
        self.steps = ReplayBuffer(cursor, replay_bytes)
        before = None if after is None else after.slots
        self.slots: Slots = Slots(source_windows(spec, cursor), num_tokenizers, before)
        self._finished: set[str] = set()
        self._wanted_tokens = 0
        self._finish_ended()

    @property
    def wants(self) -> bool:
        """Whether the next chunk should be taken now."""
        return self.slots.arriving or bool(self.stream.needs) or self.buffered_tokens < self._wanted_tokens

    def want(self, steps: Sequence[StepRange]) -> bool:
        """Requests the tokens of as many steps as `steps` ahead of time, up to `MAX_WANTED_TOKENS`.

        Ranks that request this many steps together will request as many again. Returns whether this call made
        the next chunk wanted.
        """
        wanted = self.wants
        self._wanted_tokens = min(sum(step.num_tokens for step in steps), MAX_WANTED_TOKENS)
        return self.wants and not wanted

    @property
    def over(self) -> bool:
        """Whether all chunks are delivered."""
        return self.slots.over

    @property
    def buffered_tokens(self) -> int:
        """Tokens that are delivered and not drawn."""
        return sum(map(self.stream.buffered_tokens, self.slots.sources))

    def begin(self, slot: int) -> WindowTask | NoTask:
        """Returns the task of a slot (`Slots.begin`), or why it must wait."""
        buffered = self.stream.buffered_tokens
        task = self.slots.begin(slot, buffered, self._flight.has_room(buffered))
        if isinstance(task, WindowTask):
            self._flight.begin(slot)
        return task

    def announce(self, slot: int, num_bytes: int) -> None:
        """A tokenizer sends a chunk of `num_bytes` for `slot`."""
        if slot >= self.slots.taken:  # else the window has already arrived
            self._flight.announce(slot, num_bytes)

    def goes_on(self, slot: int) -> Admission:
        """Whether a tokenizer may send another chunk for `slot` now."""
        due, needs = self.slots.taken, bool(self.stream.needs)
        return self._flight.goes_on(slot, due, needs, self.stream.buffered_tokens)

    def no_room(self) -> FeedError:
        """The error for the case that no chunk will ever be admitted."""
        memory, held = self._memory, self._flight.held_bytes(self.stream.buffered_tokens)
        assert memory is not None, "without a bound there is room"
        return FeedError(
            f"the tokens of the open windows take {held:,} bytes, the next sample needs more of them, and "
            f"their share of data.memory_bytes={memory.memory_bytes} is {memory.flight_limit:,}; continue "
            f"with a larger data.memory_bytes, e.g. {2 * memory.memory_bytes}, or with fewer "
            "data.num_tokenizers",
            code=TOO_LITTLE_MEMORY,
        )

    @property
    def awaited(self) -> list[tuple[str, int]]:
        """Returns `Slots.awaited`."""
        return self.slots.awaited

    def take(self, slot: int, chunk: TokenChunk | None) -> None:
        """Takes the next chunk in order, None for a slot without one.

        Raises `DataIdentityError` if the cursor's tokens are not reproduced.
        """
        if self.slots.has(slot):
            self._flight.take(slot, chunk)
        for delivered in self.slots.take(slot, chunk):
            before = self.stream.buffered_tokens(delivered.source)
            self.stream.feed(delivered)
            self._flight.deliver(delivered, self.stream.buffered_tokens(delivered.source) - before)
        self._finish_ended()

    def _finish_ended(self) -> None:
        for source in self.slots.ended:
            if source not in self._finished:
                self._finished.add(source)
                self.stream.finish(source)


def source_windows(spec: DataSpec, cursor: Cursor) -> list[SourceWindows]:
    """The windows of each source from the cursor on. Raises `DataIdentityError` if it has no such block."""
    return [
        SourceWindows(
            source=plan.source,
            first=next(spec.tasks_from(cursor, plan.source), None),
            num_blocks=partial(spec.num_blocks, plan.source),
            num_epochs=spec.num_epochs(plan.source),
            expected=partial(_expected, spec, plan.source),
            share=float(spec.weights[plan.source]),
            has_list=partial(spec.has_list, plan.source),
        )
        for plan in spec.plans
    ]


def _expected(spec: DataSpec, source: str, epoch: int, position: int) -> int:
    return expected_windows(spec.plan_of(source, epoch), spec.settings, epoch, position)


def expected_windows(plan: SourcePlan, settings: StreamSettings, epoch: int, position: int) -> int:
    """The estimated number of windows of the block at `position` of an epoch, at least 1. An estimate, exact
    only where reading the block gives the same number.
    """
    block = block_at(settings.seed, plan.source, epoch, position, plan.num_blocks, settings.shuffle)
    parts = (part for fragment in plan.fragments(block) for part in plan.parts(fragment))
    return max(1, ceil_div(sum(decoded_bytes(plan.manifest, part) for part in parts), settings.window_bytes))


# ---------------------------------------------------------------------------------------------- coming epochs
# The error code of an exception in the feed that is none of ours; the text has its traceback.
UNEXPECTED = "feed.unexpected_exception"
Made = Callable[[str, int, OrchestratorError | None], Coroutine[Any, Any, None]]


class EpochLists:
    """Makes each list once, in a thread. Listing a hundred thousand files takes seconds, and the ranks
    continue meanwhile. For one event loop.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        # the event loop itself keeps only weak references
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    @property
    def making(self) -> bool:
        """Whether a list is being made."""
        return bool(self._tasks)

    def make(self, wanted: Iterable[tuple[str, int]], made: Made) -> None:
        """Starts making the lists of `wanted` (source, epoch) that are not being made yet.

        Awaits `made` for each, with its error or None. `made` must call `done`.
        """
        for source, epoch in wanted:
            if (source, epoch) not in self._tasks:
                self._tasks[source, epoch] = asyncio.create_task(self._make(source, epoch, made))

    def done(self, source: str, epoch: int) -> None:
        """Forgets a finished list. `made` calls it once its waiters are notified."""
        del self._tasks[source, epoch]

    async def _make(self, source: str, epoch: int, made: Made) -> None:
        wrong = None
        try:
            await asyncio.to_thread(self._spec.plan_of, source, epoch)
        except OrchestratorError as error:
            wrong = error
        except Exception as error:  # noqa: BLE001  reported to the ranks
            text = "".join(traceback.format_exception(error))
            text = f"the files of source {source} could not be listed for epoch {epoch}:\n{text}"
            wrong = FeedError(text, code=UNEXPECTED)
        await made(source, epoch, wrong)
