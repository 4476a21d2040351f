"""The samples of a step, which may be served several times, and a rank's share of them in transit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orchestrator.data.packing.sample_spans import PackedRun, Run
from orchestrator.errors import FeedError
from orchestrator.planning.digest import batch_digest
from orchestrator.records.arrays import Int32Array
from orchestrator.records.batches import BatchSlice, StepRange
from orchestrator.records.cursor import Cursor

Arrays = tuple[Int32Array, Int32Array, Int32Array, Int32Array]
_NAMES = ("source_numbers", "input_ids", "labels", "document_ids")


class StepSamples:
    """One step's samples: the run of positions from each source, each sample's source, and the cursor after
    it.

    Immutable. It has its own copy of the tokens, so it may be kept while the stream continues. Arrays of
    samples are made on demand.
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
        self.step = step  # the samples that it holds, perhaps fewer than requested
        self.numbers = numbers  # (num_samples,) the number of each sample's source
        self.cursor = cursor  # the run's place after it
        self.end_of_data = end_of_data  # no target follows the step
        # (source, reason) of the bad documents that the cursor passes in this step
        self.bad_reasons = bad_reasons
        self._runs = runs  # by the source's number
        self._cursors = cursors

    @property
    def first_index(self) -> int:
        """Index of the first sample: the number of samples drawn before it on the lineage."""
        return self.step.first_sample + self.cursor.skipped_samples

    @cached_property
    def targets(self) -> int:
        """Target tokens of the step: positions that are neither padding nor masked."""
        return sum(run.num_targets for run in self._runs.values())

    @property
    def nbytes(self) -> int:
        """The memory of the step, in bytes."""
        return self.numbers.nbytes + sum(run.nbytes for run in self._runs.values())

    @cached_property
    def digest(self) -> int:
        """The sum modulo 2^64 of the digests of its samples."""
        return batch_digest(self.first_index, *self.rows(0, self.step.num_samples))

    @cached_property
    def facts(self) -> StepFacts:
        """The facts that every rank receives with its share of the step."""
        return StepFacts(
            step=self.step,
            targets=self.targets,
            digest=self.digest,
            cursor=self.cursor,
            end_of_data=self.end_of_data,
        )

    def cursor_after(self, num_samples: int) -> Cursor:
        """The cursor after `num_samples` of its samples. The step must have been drawn with cursors."""
        assert self._cursors is not None, "the step was drawn without cursors"
        return self.cursor if num_samples == self.step.num_samples else self._cursors(num_samples)

    def _within(self, start: int, stop: int) -> tuple[int, int]:
        first, end = self.step.first_sample, self.step.first_sample + self.step.num_samples
        if not first <= start <= stop <= end:
            raise FeedError(
                f"samples [{start}, {stop}) were requested from a step that has [{first}, {end})",
                code="feed.outside_step",
            )
        return start - first, stop - first

    def share(self, start: int, stop: int) -> StepShare:
        """Samples [start, stop), numbered by trained samples of the run, without their arrays.

        Raises `FeedError` if they are not all in the step.
        """
        low, high = self._within(start, stop)
        numbers, runs = self.numbers[low:high], self._cut(low, high)
        return StepShare(facts=self.facts, start=start, stop=stop, numbers=numbers, runs=runs)

    def slice(self, start: int, stop: int) -> BatchSlice:
        """`share` as arrays. Raises as `share`."""
        return self.share(start, stop).slice()

    def arrays(self, start: int, stop: int) -> Arrays:
        """Arrays of samples [start, stop), counted within the step, in their own memory.

        Returns source numbers (num,), and inputs, labels and document ids (num, seq_len).
        """
        return _owned(*self.rows(start, stop))

    def rows(self, start: int, stop: int) -> Arrays:
        """The same arrays. Inputs and labels may be views of shared memory: do not write to them."""
        return _rows(self.numbers[start:stop], self._cut(start, stop), self.step.seq_len)

    def _cut(self, start: int, stop: int) -> dict[int, Run | PackedRun]:
        """The runs of samples [start, stop), counted within the step."""
        if len(self._runs) == 1:
            ((number, only),) = self._runs.items()
            return {number: only.cut(start, stop, self.step.seq_len)}
        cut = {}
        for number, run in self._runs.items():
            first, last = (int((self.numbers[:at] == number).sum()) for at in (start, stop))
            cut[number] = run.cut(first, last, self.step.seq_len)
        return cut


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Facts about the whole step: see `BatchSlice`. Pickled once, however many ranks it is sent to."""

    step: StepRange
    targets: int
    digest: int
    cursor: Cursor
    end_of_data: bool

    @cached_property
    def _packed(self) -> bytes:
        return pickle.dumps((self.step, self.targets, self.digest, self.cursor, self.end_of_data))

    def __reduce__(self) -> tuple[Callable[[bytes], StepFacts], tuple[bytes]]:
        return _unpacked, (self._packed,)


def _unpacked(packed: bytes) -> StepFacts:
    step, targets, digest, cursor, end_of_data = pickle.loads(packed)  # noqa: S301  the feeder's own
    return StepFacts(step=step, targets=targets, digest=digest, cursor=cursor, end_of_data=end_of_data)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """Samples [start, stop) of a step, as the runs that they are made of.

    They take a third of the bytes of their arrays, which each rank makes itself. See `BatchSlice`.
    """

    facts: StepFacts
    start: int
    stop: int
    numbers: Int32Array  # (stop - start,) the number of each sample's source
    runs: dict[int, Run | PackedRun]  # by the source's number

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.numbers.nbytes + sum(run.nbytes for run in self.runs.values())

    def slice(self) -> BatchSlice:
        """The share as arrays in their own memory, which belong to the caller."""
        facts, arrays = self.facts, _owned(*_rows(self.numbers, self.runs, self.facts.step.seq_len))
        return BatchSlice(
            step=facts.step,
            start=self.start,
            stop=self.stop,
            **dict(zip(_NAMES, arrays, strict=True)),
            step_targets=facts.targets,
            step_digest=facts.digest,
            cursor=facts.cursor,
            end_of_data=facts.end_of_data,
        )


def _owned(numbers: Int32Array, inputs: Int32Array, labels: Int32Array, documents: Int32Array) -> Arrays:
    """Writable copies of the arrays of `_rows`."""
    return numbers.copy(), inputs.copy(), labels.copy(), documents


def _rows(numbers: Int32Array, runs: Mapping[int, Run | PackedRun], seq_len: int) -> Arrays:
    """All samples of these runs, in the order of their sources in the mixture.

    Inputs and labels may be views of shared memory: do not write to them.
    """
    if len(runs) == 1:
        (only,) = runs.values()
        return (numbers, *only.rows(0, len(numbers), seq_len))
    table = np.empty((3, len(numbers), seq_len), np.int32)
    for number in np.unique(numbers).tolist():
        mine = numbers == number
        for column, rows in zip(table, runs[number].rows(0, int(mine.sum()), seq_len), strict=True):
            column[mine] = rows
    return numbers, table[0], table[1], table[2]
