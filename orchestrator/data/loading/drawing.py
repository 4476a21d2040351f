"""Reads, tokenizes and packs a stream in this process, on demand.

Its consumer may be any one thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.data.packing.samples import Sample, draw_samples, draw_step
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.token_chunk import TokenChunk
from orchestrator.planning.batches import next_range
from orchestrator.records.cursor import Cursor, SourceCursor


class Drawing:
    """The stream from `cursor` on. Opening reads enough to verify that the cursor belongs to this stream.

    Raises `DataIdentityError` (with both values) if the data, the tokenizer or the encoder are not those of
    the cursor, and `DataError` for data that cannot be read.
    """

    def __init__(self, spec: DataSpec, cursor: Cursor, seq_len: int | None = None) -> None:
        self._stream, encoders = spec.stream(cursor, seq_len), spec.build_encoders()
        self._names = [plan.source for plan in spec.plans]
        self._chunks = {name: spec.chunks(cursor, name, encoders) for name in self._names}
        for name in self._names:
            ended = name in cursor.mixture and cursor.mixture[name].ended
            if cursor.sources.get(name, SourceCursor()) != SourceCursor() and not ended:
                self._verify(name)

    def samples(self, seq_len: int) -> Iterator[Sample]:
        """All samples to the end of the data."""
        return draw_samples(self._stream, self._next_chunk, seq_len)

    def steps(self, global_batch_size: int, seq_len: int) -> Iterator[StepSamples]:
        """All steps to the end of the data. The last one may have fewer samples."""
        while True:
            at = self._stream.cursor
            step = next_range(at.consumed_samples, at.consumed_tokens, global_batch_size, seq_len)
            assert step is not None, "without a budget there is no last step"
            drawn = draw_step(self._stream, step, self._next_chunk)
            if drawn.step.num_samples:
                yield drawn
            if drawn.end_of_data or not drawn.step.num_samples:
                return

    def _next_chunk(self, source: str) -> TokenChunk | None:
        return next(self._chunks[source], None)

    def _verify(self, source: str) -> None:
        """Feeds the chunks that the cursor's digests cover. They are drawn later."""
        while (chunk := self._next_chunk(source)) is not None:
            self._stream.feed(chunk)
            if chunk.ends_window or self._stream.buffered_tokens(source):
                return
