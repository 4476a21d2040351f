"""The summary of a step: one int64 vector, summed over the ranks by the step's last collective.

All ranks receive the same result, because integer sums depend on no order and no division. `loop` decides
whether the step is applied.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, StateKey, StepRecord

FRACTION_BITS = 24  # fraction bits of the loss in fixed point
_LOSS_LIMIT = 1 << 61  # of a micro-batch; a larger loss is treated as not finite
# every rank adds to these slots
_RANKS, _NOT_FINITE, _LOSS, _TARGETS, _SAMPLES, _DIGEST, _WAIT_US, _BLOCKED_US, _BUSY, _WHOLE = range(10)
_CONTROL, _ACKNOWLEDGED, _GRAD_NORM, _STEP_S = range(10, 14)  # rank 0 alone
NUM_SLOTS = 14  # followed by one slot per rank, which that rank alone fills: its peak memory
_MASK = (1 << 64) - 1


def fixed_point(loss: float) -> int | None:
    """Converts a micro-batch's summed loss to fixed point; None if it is not finite or absurdly large.

    NaN would become −2^63, so it never enters the summary: its rank adds 0 and counts itself as not finite.
    """
    if not math.isfinite(loss) or abs(loss) >= _LOSS_LIMIT >> FRACTION_BITS:
        return None
    return round(loss * (1 << FRACTION_BITS))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContribution:
    """The values that one rank adds to the summary.

    `loss`: in fixed point over its micro-batches, None if one was not finite.
    `digest`: of its samples (unsigned).
    `busy`: it holds a save whose vote or report is not answered, so that no other can begin.
    `whole`: it has its copies of the memory point in progress.
    `control`, `acknowledged` (the newest durable step of this generation, −1: none), `grad_norm` and `step_s`
    are used of rank 0 only.
    `peak_memory_bytes`: see `trainer.loop`.
    """

    loss: int | None
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
        """Returns the vector (NUM_SLOTS + world_size,) int64 that `rank` adds to the sum of `world_size`.

        A loss that could overflow that sum counts as not finite.
        """
        loss = self.loss
        if loss is not None and abs(loss) * world_size >= 1 << 63:
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
        return torch.tensor(values + peaks, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """The summed vector, unpacked. It is the same on every rank that has it.

    `loss` is the sum over targets (nats). Times are means over the ranks (seconds). `num_busy` ranks hold an
    undecided save. `num_whole` ranks have their copies of the memory point in progress. `peak_memory_bytes`
    is the maximum.
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

    @classmethod
    def unpack(cls, vector: Tensor) -> StepSummary:
        """Unpacks the summed vector (NUM_SLOTS + world_size,) int64."""
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
            peak_memory_bytes=max(values[NUM_SLOTS:]),
        )

    def problem(self, world_size: int, batch: BatchSlice) -> str | None:
        """Returns why this step must not be applied, with both values; None if it may be applied.

        `batch` has what the feed announced for the step.
        """
        if self.ranks != world_size:
            return f"{self.ranks} ranks took part in a group of {world_size}"
        if self.not_finite:
            return (
                f"the loss is not finite (or absurdly large) on {self.not_finite} of {world_size} ranks; "
                "lower train.lr, or look at the step's samples"
            )
        if not math.isfinite(self.grad_norm):
            return f"the loss is finite, but the norm of its gradient is {self.grad_norm}; lower train.lr"
        if self.samples != batch.step.num_samples:
            return f"the ranks trained {self.samples} samples, the feed announced {batch.step.num_samples}"
        if self.targets != batch.step_targets:
            return f"the ranks trained {self.targets} target tokens, the feed announced {batch.step_targets}"
        if self.digest != batch.step_digest:
            announced = f"the feed announced {batch.step_digest:016x}"
            return f"the samples trained have digest {self.digest:016x}, {announced}"
        return None

    def record(self, key: StateKey, cursor: Cursor, lr: float, ended: float) -> StepRecord:
        """Builds the step's record. `key` and `cursor` are those after the step.

        It is the same on every rank except for `ended`, the time at which this rank had applied the step.
        """
        return StepRecord(
            attempt=key.attempt,
            generation=key.generation,
            step=key.step,
            consumed_samples=cursor.consumed_samples,
            consumed_tokens=cursor.consumed_tokens,
            target_tokens=cursor.target_tokens,
            loss=self.loss / self.targets if self.targets else None,
            grad_norm=self.grad_norm,
            lr=lr,
            digest=f"{self.digest:016x}",
            step_s=self.step_s,
            data_wait_s=self.data_wait_s,
            save_blocked_s=self.save_blocked_s,
            ended=ended,
            peak_memory_bytes=self.peak_memory_bytes,
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
