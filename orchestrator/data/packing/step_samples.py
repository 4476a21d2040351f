"""A step's samples as arrays: what was drawn from the sources, to be handed out, again if need be.

It knows no chunk and no file; the stream makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from orchestrator.data.packing.runs import PackedRun, Run
from orchestrator.errors import FeedError
from orchestrator.planning.digest import batch_digest
from orchestrator.records import BatchSlice, Cursor, Int32Array, StepRange

Arrays = tuple[Int32Array, Int32Array, Int32Array, Int32Array]


class StepSamples:
    """One step's samples: of each source the run of positions that it gives, which sample is whose, and the
    cursor after it. Immutable.

    It holds its own copy of the tokens, so it may be kept when the stream has gone on. Arrays of samples are
    made when asked for.
    """

    def __init__(
        self,
        step: StepRange,
        runs: Mapping[int, Run | PackedRun],
        numbers: Int32Array,
        cursor: Cursor,
        end_of_data: bool,
        bad_reasons: tuple[tuple[str, str], ...],
        cursors: Callable[[int], Cursor] | None = None,
    ) -> None:
        self.step = step  # what it really holds
        self.numbers = numbers  # (num_samples,) the number of each sample's source
        self.cursor = cursor  # the run's place after it
        self.end_of_data = end_of_data  # no target follows it
        # (source, why) of the bad documents that the cursor passes in this step
        self.bad_reasons = bad_reasons
        self._runs = runs  # by the source's number
        self._cursors = cursors

    @property
    def first_index(self) -> int:
        """Index of its first sample: samples drawn before it on the lineage."""
        return self.step.first_sample + self.cursor.skipped_samples

    @property
    def targets(self) -> int:
        """Target tokens of the step: positions that are neither padding nor masked."""
        return sum(run.num_targets for run in self._runs.values())

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it costs."""
        return self.numbers.nbytes + sum(run.nbytes for run in self._runs.values())

    @cached_property
    def digest(self) -> int:
        """The sum modulo 2^64 of its samples' digests."""
        return batch_digest(self.first_index, *self.arrays(0, self.step.num_samples))

    def cursor_after(self, num_samples: int) -> Cursor:
        """The run's place after so many of its samples; of a step that was drawn with them."""
        assert self._cursors is not None, "the step was drawn without cursors"
        return self.cursor if num_samples == self.step.num_samples else self._cursors(num_samples)

    def slice(self, start: int, stop: int) -> BatchSlice:
        """Samples [start, stop), by their count of trained samples in the run. Raises `FeedError` if they are
        not all in the step.
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

    def arrays(self, start: int, stop: int) -> Arrays:
        """Source numbers (num,), inputs, labels, document ids (num, seq_len) of samples [start, stop),
        counted within the step.
        """
        seq_len, numbers = self.step.seq_len, self.numbers[start:stop]
        if len(self._runs) == 1:
            (only,) = self._runs.values()
            return (numbers, *only.rows(start, stop, seq_len))
        table = np.empty((3, stop - start, seq_len), np.int32)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            first = int((self.numbers[:start] == number).sum())
            table[:, mine] = np.stack(self._runs[number].rows(first, first + int(mine.sum()), seq_len))
        return numbers, table[0], table[1], table[2]
