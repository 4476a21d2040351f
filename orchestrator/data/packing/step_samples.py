"""The samples of a step, which may be served several times, and a rank's share of them in transit.

A step takes a run from each source: consecutive positions of the source's stream (`concat`), or packs of
whole documents. `loss_units` counts what a step's loss is divided by, with a user's function
(`train.objective_units`).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from orchestrator.errors import DataError, FeedError
from orchestrator.objectives import HostBatch
from orchestrator.planning.digest import batch_digest
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, StepRange
from orchestrator.records.tokens import BoolArray, Int32Array, Int64Array
from orchestrator.user_function import find_function

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
        units_path: str = "",
        rows_per_sample: int = 1,
    ) -> None:
        self.step = step  # the samples that it holds, perhaps fewer than requested
        self.numbers = numbers  # (num_samples,) the number of each sample's source
        self.cursor = cursor  # the run's place after it
        self.end_of_data = end_of_data  # no target follows the step
        # (source, reason) of the bad documents that the cursor passes in this step
        self.bad_reasons = bad_reasons
        self._runs = runs  # by the source's number
        self._cursors = cursors
        self._units_path, self.rows_per_sample = units_path, rows_per_sample

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
        """The facts that every rank receives with its share of the step. Raises as `loss_units`."""
        units = None
        if self._units_path:
            rows = self.rows(0, self.step.num_samples)
            units = loss_units(self._units_path, self.first_index, *rows, self.rows_per_sample)
        return StepFacts(
            step=self.step,
            targets=self.targets,
            units=units,
            digest=self.digest,
            cursor=self.cursor,
            end_of_data=self.end_of_data,
            rows_per_sample=self.rows_per_sample,
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
        """Like `arrays`, but inputs and labels may be views of shared memory: do not write to them."""
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
    units: float | None
    digest: int
    cursor: Cursor
    end_of_data: bool
    rows_per_sample: int = 1

    @cached_property
    def _packed(self) -> bytes:
        fields = (self.step, self.targets, self.units, self.digest, self.cursor, self.end_of_data)
        return pickle.dumps((*fields, self.rows_per_sample))

    def __reduce__(self) -> tuple[Callable[[bytes], StepFacts], tuple[bytes]]:
        return _unpacked, (self._packed,)


def _unpacked(packed: bytes) -> StepFacts:
    step, targets, units, digest, cursor, end, rows = pickle.loads(packed)  # noqa: S301  the feeder's own
    return StepFacts(
        step=step,
        targets=targets,
        units=units,
        digest=digest,
        cursor=cursor,
        end_of_data=end,
        rows_per_sample=rows,
    )


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
            step_units=facts.units,
            step_digest=facts.digest,
            cursor=facts.cursor,
            end_of_data=facts.end_of_data,
            rows_per_sample=facts.rows_per_sample,
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


# ----------------------------------------------------------------------------------------- runs of one source
NO_LOSS, PADDING, PAD_TOKEN = -100, -1, 0
Rows = tuple[Int32Array, Int32Array, Int32Array]  # inputs, labels, document ids (num_samples, seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive positions of one source, in its own arrays: it may be kept while the packer continues.

    Position p has the input token `tokens[p]` and the label `tokens[p + 1]`.
    """

    tokens: Int32Array  # (num_positions + 1,); empty for a run without positions
    document_starts: Int64Array  # (num,) positions at which a document begins
    loss: BoolArray | None = None  # like tokens: False for a token that is no target; None: all are

    @property
    def num_positions(self) -> int:
        """The number of input tokens."""
        return max(0, len(self.tokens) - 1)

    @property
    def num_targets(self) -> int:
        """Positions whose label is a target."""
        return self.targets_in(self.num_positions)

    def targets_in(self, num_positions: int) -> int:
        """The targets among the labels of the first `num_positions` positions."""
        return num_positions if self.loss is None else int(self.loss[1 : num_positions + 1].sum())

    @property
    def nbytes(self) -> int:
        """The memory of the run, in bytes."""
        loss = 0 if self.loss is None else self.loss.nbytes
        return self.tokens.nbytes + self.document_starts.nbytes + loss

    def cut(self, start: int, stop: int, seq_len: int) -> Run:
        """The run of samples [start, stop): views, with the same rows."""
        first, last = (min(at * seq_len, self.num_positions) for at in (start, stop))
        low, high = self.document_starts.searchsorted([first, last])
        here = slice(first, last + 1 if last > first else first)
        return Run(
            tokens=self.tokens[here],
            document_starts=self.document_starts[low:high] - first,
            loss=None if self.loss is None else self.loss[here],
        )

    def rows(self, start: int, stop: int, seq_len: int) -> Rows:
        """Samples [start, stop). The last is padded if the run does not fill it.

        Inputs and labels may be views of the run. Do not write to them.
        """
        num, first = stop - start, start * seq_len
        full = max(0, min(self.num_positions, stop * seq_len) - first)  # positions that are not padding
        inputs, labels = self.tokens[first : first + full], self.tokens[first + 1 : first + full + 1]
        if self.loss is not None and full:
            labels = np.where(self.loss[first + 1 : first + full + 1], labels, np.int32(NO_LOSS))
        low, high = self.document_starts.searchsorted([first, first + full])
        documents = _document_numbers(self.document_starts[low:high] - first, num, seq_len)
        if full < num * seq_len:
            missing = num * seq_len - full
            inputs = np.concatenate([inputs, np.full(missing, PAD_TOKEN, np.int32)])
            labels = np.concatenate([labels, np.full(missing, NO_LOSS, np.int32)])
            documents[full:] = PADDING
        shape = (num, seq_len)
        return inputs.reshape(shape), labels.reshape(shape), documents.reshape(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRun:
    """Packs of one source, each a sample: documents, or stretches of one, side by side.

    A stretch of n positions has n + 1 tokens: the first n are its inputs, the last n its labels. Where a
    sample has several rows, each of its stretches is the beginning of one.
    """

    seq_len: int
    tokens: Int32Array  # of all stretches, one after the other
    sizes: Int64Array  # (num_stretches,) positions of each
    firsts: Int64Array  # (num_packs + 1,) number of each pack's first stretch; last: of all
    loss: BoolArray | None = None  # like tokens: False for a token that is no target; None: all are
    rows_per_sample: int = 1

    @property
    def num_packs(self) -> int:
        """The number of samples."""
        return len(self.firsts) - 1

    @property
    def num_targets(self) -> int:
        """Positions whose label is a target."""
        return self.targets_in(self.num_packs * self.seq_len)

    def targets_in(self, num_positions: int) -> int:
        """The targets among the labels of the samples that `num_positions` positions count for."""
        stop = int(self.firsts[-(-num_positions // self.seq_len)])
        if self.loss is None:
            return int(self.sizes[:stop].sum())
        token, within = _spread(self.sizes[:stop])
        return int(self.loss[token + within + 1].sum())

    @property
    def nbytes(self) -> int:
        """The memory of the run, in bytes."""
        loss = 0 if self.loss is None else self.loss.nbytes
        return self.tokens.nbytes + self.sizes.nbytes + self.firsts.nbytes + loss

    def cut(self, start: int, stop: int, seq_len: int) -> PackedRun:
        """The run of samples [start, stop): views, with the same rows."""
        assert seq_len == self.seq_len, f"packs of {self.seq_len} positions as samples of {seq_len}"
        firsts = self.firsts[start : stop + 1]
        low, high = int(firsts[0]), int(firsts[-1])
        begin = int((self.sizes[:low] + 1).sum())
        here = slice(begin, begin + int((self.sizes[low:high] + 1).sum()))
        return PackedRun(
            seq_len=seq_len,
            tokens=self.tokens[here],
            sizes=self.sizes[low:high],
            firsts=firsts - low,
            loss=None if self.loss is None else self.loss[here],
            rows_per_sample=self.rows_per_sample,
        )

    def rows(self, start: int, stop: int, seq_len: int) -> Rows:
        """Samples [start, stop), padded after their last stretch."""
        assert seq_len == self.seq_len, f"packs of {self.seq_len} positions as samples of {seq_len}"
        num, firsts = stop - start, self.firsts[start : stop + 1]
        low, high = int(firsts[0]), int(firsts[-1])
        sizes = self.sizes[low:high]
        per_pack = np.diff(firsts)
        number = np.arange(high - low) - np.repeat(firsts[:-1] - low, per_pack)  # of a stretch in its pack
        before = np.cumsum(sizes) - sizes  # positions of the stretches before it
        pack = np.repeat(np.arange(num), per_pack)
        in_pack = before - before[firsts[:-1] - low][pack] if num else before
        if self.rows_per_sample > 1:
            in_pack = number * (seq_len // self.rows_per_sample)
        token, within = _spread(sizes)
        source = int((self.sizes[:low] + 1).sum()) + token + within
        target = np.repeat(pack * seq_len + in_pack, sizes) + within
        inputs = np.full(num * seq_len, PAD_TOKEN, np.int32)
        labels = np.full(num * seq_len, NO_LOSS, np.int32)
        documents = np.full(num * seq_len, PADDING, np.int32)
        inputs[target] = self.tokens[source]
        labels[target] = self.tokens[source + 1]
        documents[target] = np.repeat(number, sizes)
        if self.loss is not None:
            labels[target[~self.loss[source + 1]]] = NO_LOSS
        shape = (num, seq_len)
        return inputs.reshape(shape), labels.reshape(shape), documents.reshape(shape)


def joined(runs: Sequence[PackedRun], seq_len: int, rows_per_sample: int = 1) -> PackedRun:
    """All runs as one."""
    if len(runs) == 1:
        return runs[0]
    if not runs:
        none = np.empty(0, np.int64)
        return PackedRun(
            seq_len=seq_len,
            tokens=np.empty(0, np.int32),
            sizes=none,
            firsts=np.zeros(1, np.int64),
            rows_per_sample=rows_per_sample,
        )
    masked = any(run.loss is not None for run in runs)
    every = [np.ones(len(run.tokens), np.bool_) if run.loss is None else run.loss for run in runs]
    return PackedRun(
        seq_len=seq_len,
        tokens=np.concatenate([run.tokens for run in runs]),
        sizes=np.concatenate([run.sizes for run in runs]),
        firsts=np.cumsum([0, *np.concatenate([np.diff(run.firsts) for run in runs])]),
        loss=np.concatenate(every) if masked else None,
        rows_per_sample=rows_per_sample,
    )


def _document_numbers(starts: Int64Array, num_samples: int, seq_len: int) -> Int32Array:
    """The number of each position's document within its sample, (num_samples * seq_len,).

    A sample begins with document 0, at any place in it. `starts` are positions at which the next document
    begins.
    """
    begins = np.arange(0, num_samples * seq_len, seq_len)
    borders = np.unique(np.concatenate([begins, starts]))
    numbers = np.arange(len(borders)) - borders.searchsorted(begins)[borders // seq_len]
    return np.repeat(numbers.astype(np.int32), np.diff(borders, append=num_samples * seq_len))


def _spread(sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For every position of stretches of these sizes: the index of its stretch's first token, and its own
    index within the stretch.
    """
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(np.cumsum(sizes + 1) - sizes - 1, sizes), within


# ------------------------------------------------------------------------------------------ units of the loss
_FRACTION_BITS = 24
_UNITS_LIMIT = 1 << 61  # of a sample's units in fixed point
_UNITS_CODE = "objective.units"
NOT_CALLABLE = "objective.not_callable"


def loss_units(
    path: str,
    first_index: int,
    numbers: Int32Array,
    input_ids: Int32Array,
    labels: Int32Array,
    document_ids: Int32Array,
    rows_per_sample: int = 1,
) -> float:
    """Returns the units of all samples, as the function `path` counts them sample by sample.

    The arrays are those of `StepSamples.rows`. The sum is exact in fixed point, so it does not depend on how
    a step is divided. Raises `ConfigError` if there is no such function. Raises `DataError` if the function
    raises, or does not return a finite number of at least 0.
    """
    function, total = _units_function(path), 0
    for at, number in enumerate(numbers):
        ids, targets, documents = (
            column[at].reshape(rows_per_sample, -1) for column in (input_ids, labels, document_ids)
        )
        sample = HostBatch(
            input_ids=ids,
            labels=targets,
            document_ids=documents,
            source_ids=np.full_like(ids, number),
            sample_indices=np.full(ids.shape, first_index + at),
        )
        total += _units_of_sample(path, function, sample, first_index + at)
    return total / (1 << _FRACTION_BITS)


@cache
def _units_function(path: str) -> Callable[[HostBatch], Any]:
    return find_function("train.objective_units", path, NOT_CALLABLE, num_positional=1)


def _units_of_sample(path: str, function: Callable[[HostBatch], Any], sample: HostBatch, index: int) -> int:
    try:
        units = float(np.asarray(function(sample), dtype=np.float64).reshape(()))
    except Exception as error:
        raise DataError(
            f"train.objective_units={path} fails for sample {index:,}: {type(error).__name__}: {error}; it "
            "must return one number",
            code=_UNITS_CODE,
        ) from error
    if not (math.isfinite(units) and 0 <= units < _UNITS_LIMIT >> _FRACTION_BITS):
        raise DataError(
            f"train.objective_units={path} returned {units} for sample {index:,}; return a finite number of "
            "at least 0",
            code=_UNITS_CODE,
        )
    return round(units * (1 << _FRACTION_BITS))
