"""The feed of a process without Ray (plain torchrun): a thread tokenizes ahead, the caller packs.

Every rank of such a group reads and tokenizes the whole stream and takes its share of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.data.feed.buffers import HeldStep, ReplayBuffer
from orchestrator.data.loading.loader import Ahead
from orchestrator.data.packing.samples import draw_step
from orchestrator.data.packing.stream import Stream
from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.steps import BatchSlice, StepRange
from orchestrator.records.tokens import TokenChunk

# Chunks of about a million tokens that are buffered for the packer.
CHUNKS_AHEAD = 2


class InProcessFeed:
    """`trainer.interfaces.loop_interface.Feed` of one rank, without any other process.

    `replay_bytes` bounds the steps that are kept because they may be requested again. Returns the same slices
    as the Feeder. Not thread-safe.
    """

    def __init__(self, spec: DataSpec, replay_bytes: int = 64 << 20) -> None:
        self._spec, self._replay_bytes = spec, replay_bytes
        self._readers: dict[str, Ahead[TokenChunk]] = {}  # by source
        self._stream: Stream | None = None
        self._steps = ReplayBuffer(Cursor(), replay_bytes)

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """Continues at `cursor`: from memory if that is held, else by reading from there. Idempotent."""
        del view
        if self._stream is None or not self._steps.serves(cursor):
            self._reopen(cursor)

    def prefetch(self, steps: Sequence[StepRange], rank: int, world_size: int, micro_batch_size: int) -> None:
        """Does nothing: the thread reads ahead by itself."""

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """This rank's share of `step`. `cursor` is the cursor at `step.first_sample`.

        Raises the error that the data ended with.
        """
        held = self._steps.find(step.first_sample)
        if self._stream is None or held is None or held.asked != step:
            if self._stream is None or self._steps.next_cursor != cursor:
                self._reopen(cursor)
            held = self._draw(step)
        return held.samples.slice(*held.samples_of(rank, world_size, micro_batch_size))

    def close(self) -> None:
        """Stops the reading threads."""
        for reader in self._readers.values():
            reader.close()
        self._readers, self._stream = {}, None

    def _reopen(self, cursor: Cursor) -> None:
        self.close()
        self._stream = self._spec.stream(cursor)
        self._steps = ReplayBuffer(cursor, self._replay_bytes)
        self._readers = {
            plan.source: Ahead(self._spec.chunks(cursor, plan.source), CHUNKS_AHEAD, "chunks")
            for plan in self._spec.plans
        }

    def _draw(self, step: StepRange) -> HeldStep:
        assert self._stream is not None, "the feed is open"
        if step.first_sample != self._steps.next_cursor.consumed_samples:
            raise FeedError(
                f"samples from {step.first_sample} on were requested with the cursor of sample "
                f"{self._steps.next_cursor.consumed_samples}; a step begins at its cursor",
                code="feed.step_order",
            )
        return self._steps.append(step, draw_step(self._stream, step, self._next_chunk))

    def _next_chunk(self, source: str) -> TokenChunk | None:
        try:
            return self._readers[source].take()
        except StopIteration:
            return None
