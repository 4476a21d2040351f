"""One opening of the stream at a cursor, as plain state: what the slots are, what is delivered and packed.

It knows no Ray, no thread and no waiting; the feeder asks it what may happen now.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from orchestrator.data.feed.replay import ReplayBuffer
from orchestrator.data.feed.slots import NoTask, Slots, SourceWindows
from orchestrator.data.packing.stream import Stream
from orchestrator.data.settings import StreamSettings
from orchestrator.data.sources.fragments import SourcePlan, decoded_bytes
from orchestrator.data.spec import DataSpec
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.order import block_at
from orchestrator.records import Cursor, StepRange, TokenChunk, WindowTask

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
    ) -> None:
        self.stream: Stream = spec.stream(cursor)
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
        return self.slots.begin(slot, self.stream.buffered_tokens)

    @property
    def awaited(self) -> list[tuple[str, int]]:
        """See `Slots.awaited`."""
        return self.slots.awaited

    def take(self, slot: int, chunk: TokenChunk | None) -> None:
        """The next chunk in order, None for a slot without one. Raises `DataIdentityError` if the cursor's
        tokens are not reproduced.
        """
        for delivered in self.slots.take(slot, chunk):
            self.stream.feed(delivered)
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
