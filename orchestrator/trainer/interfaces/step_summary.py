"""The summary of a step: one int64 vector, summed over the ranks by the step's last collective.

All ranks receive the same result, because integer sums depend on no order and no division. `loop` decides
whether the step is applied.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from orchestrator.objectives import Terms
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, DocumentLoss, StateKey, StepRecord

FRACTION_BITS = 24  # of the loss and of metrics in fixed point
_LIMIT = 1 << 61  # of a micro-batch; a larger value is treated as not finite
# every rank adds to these slots
_RANKS, _NOT_FINITE, _LOSS, _TARGETS, _SAMPLES, _DIGEST, _WAIT_US, _BLOCKED_US, _BUSY, _WHOLE = range(10)
_CONTROL, _ACKNOWLEDGED, _GRAD_NORM, _STEP_S = range(10, 14)  # rank 0 alone
# followed by three slots per metric, and by one slot per rank, which that rank alone fills: its peak memory
NUM_SLOTS = 14
_METRIC_SLOTS = 3
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSum:
    """A metric summed in fixed point, and the number of micro-batches in which it was not finite."""

    sum: int
    count: int
    not_finite: int

    def __add__(self, other: MetricSum) -> MetricSum:
        return MetricSum(
            sum=self.sum + other.sum,
            count=self.count + other.count,
            not_finite=self.not_finite + other.not_finite,
        )

    @property
    def mean(self) -> float | None:
        """The sum divided by the count. None if the count is 0, or a value was not finite."""
        return None if self.not_finite or not self.count else self.sum / self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTerms:
    """The sums of a rank over its micro-batches, in fixed point.

    `loss` is None if one was not finite. `metrics` are in the order of their names.
    """

    loss: int | None
    metrics: tuple[MetricSum, ...] = ()


class TermSums:
    """Sums the terms of a rank's micro-batches. It waits for the device only in `total`."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the metrics that all terms have."""
        self._names = names
        self._rows: list[Tensor] = []

    def add(self, terms: Terms) -> None:
        """Adds the terms of a micro-batch."""
        metrics = [terms.metrics[name] for name in self._names]
        values = [terms.loss_sum, *(value for mean in metrics for value in (mean.sum, mean.count))]
        device = terms.loss_sum.device
        row = torch.stack([torch.as_tensor(v, device=device).detach().double().reshape(()) for v in values])
        self._rows.append(fixed_point(row))

    def total(self) -> RankTerms:
        """Returns the sums."""
        sums = [(0, 0)] * (1 + 2 * len(self._names))
        if self._rows:
            of_each = zip(*torch.stack(self._rows).tolist(), strict=True)
            sums = [(sum(v for v, _ in pairs), sum(flag for _, flag in pairs)) for pairs in of_each]
        (loss, not_finite), *others = sums
        return RankTerms(
            loss=None if not_finite else loss,
            metrics=tuple(
                MetricSum(sum=total, count=num, not_finite=bad + also_bad)
                for (total, bad), (num, also_bad) in zip(others[::2], others[1::2], strict=True)
            ),
        )


def fixed_point(values: Tensor) -> Tensor:
    """Converts (n,) float64 to fixed point, (n, 2) int64: the value, and whether it had none.

    A value that is not finite or absurdly large becomes 0 and is flagged: NaN would become −2^63.
    """
    good = values.isfinite() & (values.abs() < _LIMIT >> FRACTION_BITS)
    scaled = torch.where(good, values * (1 << FRACTION_BITS), 0.0).round()
    return torch.stack((scaled.long(), (~good).long()), dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContribution:
    """The values that one rank adds to the summary.

    `terms`: the sums over its micro-batches.
    `digest`: of its samples (unsigned).
    `busy`: it holds a save whose vote or report is not answered, so that no other can begin.
    `whole`: it has its copies of the memory point in progress.
    `control`, `acknowledged` (the newest durable step of this generation, −1: none), `grad_norm` and `step_s`
    are used of rank 0 only.
    `peak_memory_bytes`: see `trainer.loop`.
    """

    terms: RankTerms
    targets: int
    samples: int
    digest: int
    data_wait_s: float
    save_blocked_s: float
    busy: bool = False
    whole: bool = False
    control: int = 0
    acknowledged: int = -1
    grad_norm: float = 0.0
    step_s: float = 0.0
    peak_memory_bytes: int = 0

    def pack(self, rank: int, world_size: int) -> Tensor:
        """Returns the vector (NUM_SLOTS + 3 * metrics + world_size,) int64 that `rank` adds to the sum of
        `world_size`.

        A loss or metric that could overflow that sum counts as not finite.
        """

        def fits(value: int) -> bool:
            return abs(value) * world_size < 1 << 63

        loss = self.terms.loss
        if loss is not None and not fits(loss):
            loss = None
        values = [0] * NUM_SLOTS
        values[_RANKS] = 1
        values[_NOT_FINITE] = int(loss is None)
        values[_LOSS] = loss or 0
        values[_TARGETS] = self.targets
        values[_SAMPLES] = self.samples
        values[_DIGEST] = _signed(self.digest)
        values[_WAIT_US] = round(self.data_wait_s * 1e6)
        values[_BLOCKED_US] = round(self.save_blocked_s * 1e6)
        values[_BUSY] = int(self.busy)
        values[_WHOLE] = int(self.whole)
        if rank == 0:
            values[_CONTROL] = self.control
            values[_ACKNOWLEDGED] = self.acknowledged
            values[_GRAD_NORM] = _bits(self.grad_norm)
            values[_STEP_S] = _bits(self.step_s)
        peaks = [0] * world_size
        peaks[rank] = self.peak_memory_bytes
        metrics = list[int]()
        for one in self.terms.metrics:
            both = fits(one.sum) and fits(one.count)
            metrics += (one.sum, one.count, one.not_finite) if both else (0, 0, one.not_finite + 1)
        return torch.tensor(values + metrics + peaks, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """The summed vector, unpacked. It is the same on every rank that has it.

    `loss` is the sum over the samples (nats, if it is a cross-entropy). Times are means over the ranks
    (seconds). `num_busy` ranks hold an undecided save. `num_whole` ranks have their copies of the memory
    point in progress. `peak_memory_bytes` is the maximum. `metric_sums` are those of the objective.
    """

    ranks: int
    not_finite: int
    loss: float
    targets: int
    samples: int
    digest: int
    data_wait_s: float
    save_blocked_s: float
    num_busy: int
    num_whole: int
    control: int
    acknowledged: int
    grad_norm: float
    step_s: float
    peak_memory_bytes: int
    metric_sums: Mapping[str, MetricSum]

    @classmethod
    def unpack(cls, vector: Tensor, metric_names: Sequence[str]) -> StepSummary:
        """Unpacks the summed vector of `RankContribution.pack`."""
        values = [int(value) for value in vector.tolist()]
        ranks = max(1, values[_RANKS])
        return cls(
            ranks=values[_RANKS],
            not_finite=values[_NOT_FINITE],
            loss=values[_LOSS] / (1 << FRACTION_BITS),
            targets=values[_TARGETS],
            samples=values[_SAMPLES],
            digest=values[_DIGEST] & _MASK,
            data_wait_s=values[_WAIT_US] / 1e6 / ranks,
            save_blocked_s=values[_BLOCKED_US] / 1e6 / ranks,
            num_busy=values[_BUSY],
            num_whole=values[_WHOLE],
            control=values[_CONTROL],
            acknowledged=values[_ACKNOWLEDGED],
            grad_norm=_number(values[_GRAD_NORM]),
            step_s=_number(values[_STEP_S]),
            peak_memory_bytes=max(values[NUM_SLOTS + _METRIC_SLOTS * len(metric_names) :]),
            metric_sums={
                name: MetricSum(sum=values[at], count=values[at + 1], not_finite=values[at + 2])
                for at, name in zip(count(NUM_SLOTS, _METRIC_SLOTS), metric_names, strict=False)
            },
        )

    @property
    def metrics(self) -> dict[str, float | None]:
        """The means by name, None if one has no value."""
        return {name: found.mean for name, found in self.metric_sums.items()}

    @property
    def metrics_not_finite(self) -> tuple[str, ...]:
        """The names of the metrics that have no value because one was not finite."""
        return tuple(name for name, found in self.metric_sums.items() if found.not_finite)

    def loss_per_unit(self, units: float) -> float | None:
        """Returns the loss of the step with `units`; None without units, or if it is not finite."""
        return self.loss / units if units and not self.not_finite else None

    def not_finite_text(self) -> str | None:
        """Returns why loss or gradient is not finite; None if both are."""
        if self.not_finite:
            return (
                f"the loss is not finite (or absurdly large) on {self.not_finite} of {self.ranks} ranks; "
                "lower train.lr, or look at the step's samples"
            )
        if not math.isfinite(self.grad_norm):
            return f"the loss is finite, but the norm of its gradient is {self.grad_norm}; lower train.lr"
        return None

    def mismatch(self, world_size: int, batch: BatchSlice) -> str | None:
        """Returns what the ranks did otherwise than announced, with both values; None if nothing.

        `batch` has what the feed announced for the step.
        """
        if self.ranks != world_size:
            return f"{self.ranks} ranks took part in a group of {world_size}"
        if self.samples != batch.step.num_samples:
            return f"the ranks trained {self.samples} samples, the feed announced {batch.step.num_samples}"
        if self.targets != batch.step_targets:
            return f"the ranks trained {self.targets} target tokens, the feed announced {batch.step_targets}"
        if self.digest != batch.step_digest:
            announced = f"the feed announced {batch.step_digest:016x}"
            return f"the samples trained have digest {self.digest:016x}, {announced}"
        return None

    def record(
        self,
        key: StateKey,
        cursor: Cursor,
        units: float,
        lr: float,
        ended: float,
        mfu: float | None = None,
        skipped: str | None = None,
        documents: tuple[DocumentLoss, ...] | None = None,
    ) -> StepRecord:
        """Builds the step's record. `key` and `cursor` are those after the step, whose loss is divided by
        `units`.

        It is the same on every rank except for `ended`, the time at which this rank had applied the step, and
        `mfu`, which this rank computed for its own kind of card. `skipped`: why the step was not applied.
        """
        return StepRecord(
            attempt=key.attempt,
            generation=key.generation,
            step=key.step,
            consumed_samples=cursor.consumed_samples,
            consumed_tokens=cursor.consumed_tokens,
            target_tokens=cursor.target_tokens,
            loss=self.loss_per_unit(units),
            grad_norm=self.grad_norm,
            lr=lr,
            digest=f"{self.digest:016x}",
            step_s=self.step_s,
            data_wait_s=self.data_wait_s,
            save_blocked_s=self.save_blocked_s,
            ended=ended,
            peak_memory_bytes=self.peak_memory_bytes,
            metrics=self.metrics or None,
            mfu=mfu,
            skipped=skipped,
            documents=documents,
            not_finite=self.metrics_not_finite or None,
        )


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def _bits(number: float) -> int:
    """Returns a float's 64 bits as an integer.

    Any value survives a sum in which all other ranks add 0.
    """
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
