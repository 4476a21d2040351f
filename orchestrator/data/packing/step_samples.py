"""A step's samples as arrays: what was drawn from the stream, to be handed out, again if need be.

It knows no chunk and no file; the packer makes it.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from orchestrator.errors import FeedError
from orchestrator.planning.digest import batch_digest
from orchestrator.records import BatchSlice, Cursor, Int32Array, Int64Array, SourceCursor, StepRange

NO_LOSS, PADDING, PAD_TOKEN = -100, -1, 0
# The source's number in a sample's digest; mixtures number their sources.
SOURCE_NUMBER = 0


class StepSamples:
    """One step's samples: its tokens, where documents begin, and the cursor after it. Immutable.

    It holds its own copy of the tokens, so it may be kept when the packer has gone on. Arrays of samples are
    made when asked for.
    """

    def __init__(
        self,
        step: StepRange,
        tokens: Int32Array,
        document_starts: Int64Array,
        source: str,
        before: Cursor,
        source_cursor: SourceCursor,
        end_of_data: bool,
        bad_reasons: tuple[str, ...],
    ) -> None:
        self.step = step  # what it really holds
        self.end_of_data = end_of_data  # no target follows it
        self.bad_reasons = bad_reasons  # of the bad documents that the cursor passes in this step
        self._tokens = tokens  # (num_tokens + 1,) inputs and the last label; empty for a step of no samples
        self._document_starts = document_starts  # (num,) positions in the step at which a document begins
        self.source, self._before, self._source_cursor = source, before, source_cursor

    @property
    def targets(self) -> int:
        """Target tokens of the step; every position that is not padding is one."""
        return self.step.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it costs."""
        return self._tokens.nbytes + self._document_starts.nbytes

    @cached_property
    def cursor(self) -> Cursor:
        """The run's place after this step."""
        return Cursor(
            consumed_samples=self._before.consumed_samples + self.step.num_samples,
            consumed_tokens=self._before.consumed_tokens + self.step.num_tokens,
            target_tokens=self._before.target_tokens + self.step.num_tokens,
            sources={**self._before.sources, self.source: self._source_cursor},
        )

    @cached_property
    def digest(self) -> int:
        """The sum modulo 2^64 of its samples' digests."""
        first = self.step.first_sample
        return batch_digest(first, *self.arrays(0, self.step.num_samples))

    def slice(self, start: int, stop: int) -> BatchSlice:
        """Samples [start, stop), by their index in the run. Raises `FeedError` if they are not all in the
        step.
        """
        first, end = self.step.first_sample, self.step.first_sample + self.step.num_samples
        if not first <= start <= stop <= end:
            raise FeedError(f"samples [{start}, {stop}) were asked of a step that holds [{first}, {end})")
        source_numbers, input_ids, labels, document_ids = self.arrays(start - first, stop - first)
        return BatchSlice(
            step=self.step,
            start=start,
            stop=stop,
            source_numbers=source_numbers,
            input_ids=input_ids,
            labels=labels,
            document_ids=document_ids,
            step_targets=self.targets,
            step_digest=self.digest,
            cursor=self.cursor,
            end_of_data=self.end_of_data,
        )

    def arrays(self, start: int, stop: int) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """Source numbers (num,), inputs, labels, document ids (num, seq_len) of samples [start, stop),
        counted within the step.
        """
        seq_len, num = self.step.seq_len, stop - start
        first = start * seq_len
        full = min(self.step.num_tokens, stop * seq_len) - first  # positions that are not padding
        inputs = np.full(num * seq_len, PAD_TOKEN, np.int32)
        labels = np.full(num * seq_len, NO_LOSS, np.int32)
        begins = np.zeros(num * seq_len, np.int32)
        if full > 0:
            inputs[:full] = self._tokens[first : first + full]
            labels[:full] = self._tokens[first + 1 : first + full + 1]
            starts = self._document_starts
            begins[starts[(starts >= first) & (starts < first + full)] - first] = 1
        table = begins.reshape(num, seq_len)
        table[:, 0] = 0  # a sample begins with document 0, wherever in it
        documents = np.cumsum(table, axis=1, dtype=np.int32)
        if full < num * seq_len:
            documents.reshape(-1)[max(full, 0) :] = PADDING
        return (
            np.full(num, SOURCE_NUMBER, np.int32),
            inputs.reshape(num, seq_len),
            labels.reshape(num, seq_len),
            documents,
        )
