"""One opening of the stream at a cursor, as plain state: what the slots are, what is delivered and packed.

It knows no Ray, no thread and no waiting; the feeder asks it what may happen now.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.feed.flight import Admission, Flight
from orchestrator.data.feed.replay import ReplayBuffer
from orchestrator.data.feed.slots import NoTask, Slots, SourceWindows
from orchestrator.data.packing.stream import Stream
from orchestrator.data.sources.fragments import SourcePlan, decoded_bytes
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.token_chunk import TokenChunk, WindowTask
from orchestrator.errors import FeedError
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.order import block_at
from orchestrator.records.batches import StepRange
from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.data.feed.memory import MemoryShares

# So many tokens at most, and a chunk, are taken from the pipeline before their steps are drawn.
MAX_WANTED_TOKENS = 1 << 23


class Opening:
    """The stream from `cursor` on: the slots of the pipeline on one side, steps on the other.

    `after`: the opening before it, of whose slots the pipeline that runs goes on. Raises `DataIdentityError`
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
        """So many steps are asked for together: as many more will be, and their tokens are wanted before, up
        to `MAX_WANTED_TOKENS`. Whether the next chunk is wanted only now.
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
        """Tokens that are there and not drawn."""
        return sum(map(self.stream.buffered_tokens, self.slots.sources))

    def begin(self, slot: int) -> WindowTask | NoTask:
        """See `Slots.begin`."""
        buffered = self.stream.buffered_tokens
        task = self.slots.begin(slot, buffered, self._flight.has_room(buffered))
        if isinstance(task, WindowTask):
            self._flight.begin(slot)
        return task

    def announce(self, slot: int, num_bytes: int) -> None:
        """A tokenizer hands on a chunk of so many bytes for `slot`."""
        if slot >= self.slots.taken:  # else the window is here already
            self._flight.announce(slot, num_bytes)

    def goes_on(self, slot: int) -> Admission:
        """Whether a tokenizer may hand on another chunk for `slot` now."""
        due, needs = self.slots.taken, bool(self.stream.needs)
        return self._flight.goes_on(slot, due, needs, self.stream.buffered_tokens)

    def no_room(self) -> FeedError:
        """Why no chunk will ever be admitted."""
        memory, held = self._memory, self._flight.held_bytes(self.stream.buffered_tokens)
        assert memory is not None, "without a bound there is room"
        return FeedError(
            f"the tokens of the windows at hand take {held:,} bytes, the next sample needs more of them, and "
            f"their share of data.memory_bytes={memory.memory_bytes} is {memory.flight_limit:,}; continue "
            f"with a larger data.memory_bytes, e.g. {2 * memory.memory_bytes}, or with fewer "
            "data.num_tokenizers"
        )

    @property
    def awaited(self) -> list[tuple[str, int]]:
        """See `Slots.awaited`."""
        return self.slots.awaited

    def take(self, slot: int, chunk: TokenChunk | None) -> None:
        """The next chunk in order, None for a slot without one. Raises `DataIdentityError` if the cursor's
        tokens are not reproduced.
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
    """What each source has from the cursor on. Raises `DataIdentityError` if it has no such block."""
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
    """About how many windows the block at `position` of an epoch has, at least 1. Exact only where reading
    it shows the same.
    """
    block = block_at(settings.seed, plan.source, epoch, position, plan.num_blocks, settings.shuffle)
    parts = (part for fragment in plan.fragments(block) for part in plan.parts(fragment))
    return max(1, ceil_div(sum(decoded_bytes(plan.manifest, part) for part in parts), settings.window_bytes))
