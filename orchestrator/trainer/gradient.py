"""Micro-batches, and what is asked of the two ways to combine their gradients: `invariant` and `fast`.

It knows slices and shapes; nothing of collectives, the optimizer, membership or where samples come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from orchestrator.planning import batches
from orchestrator.records.batches import BatchSlice
from orchestrator.trainer.model import NO_LOSS

_PIECE = 1 << 14  # elements whose squares are added in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one rank that run through the model together; `number` counts micro-batches within the
    step.
    """

    number: int
    first_sample: int
    input_ids: Tensor  # (samples, seq_len) int64
    labels: Tensor  # (samples, seq_len) int64, -100 = no loss
    document_ids: Tensor | None = None  # (samples, seq_len) int64, where attention stays within documents
    is_padding: Tensor | None = None  # (samples, seq_len) bool; None if no position is padding


def cut(
    batch: BatchSlice,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
    by_document: bool = False,
) -> list[MicroBatch]:
    """The micro-batches of a rank's slice; the same for every world size, put together over the ranks.
    `by_document`: attention stays within documents.
    """
    step = batch.step
    expected = batches.rank_samples(step.first_sample, step.num_samples, micro_batch_size, rank, world_size)
    assert expected == (batch.start, batch.stop), (
        f"rank {rank} of {world_size} trains {expected}, the slice holds {(batch.start, batch.stop)}"
    )
    micros = batches.micro_batches(step.num_samples, micro_batch_size)
    input_ids, labels, documents = (
        torch.from_numpy(a.astype(np.int64)).to(device)
        for a in (batch.input_ids, batch.labels, batch.document_ids)
    )
    before = batch.start - step.first_sample

    def micro(number: int) -> MicroBatch:
        rows = slice(micros[number].start - before, micros[number].stop - before)
        return MicroBatch(
            number=number,
            first_sample=step.first_sample + micros[number].start,
            input_ids=input_ids[rows],
            labels=labels[rows],
            document_ids=documents[rows] if by_document else None,
            is_padding=documents[rows] < 0 if (batch.document_ids[rows] < 0).any() else None,
        )

    return [micro(number) for number in batches.rank_run(len(micros), rank, world_size)]


class Gradient(Protocol):
    """Leaves the gradient of a step, summed over all ranks' micro-batches, in `.grad` of every parameter."""

    def enter(self, rank: int, world_size: int) -> None:
        """A new generation; its default process group exists."""

    def leave(self) -> None:
        """The generation is over; nothing may refer to its process group any more."""

    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        """Runs this rank's `micros` of the step's `num_micro` and adds up the gradients of all ranks, divided
        by `targets`.

        Returns this rank's summed loss in fixed point, None if it is not finite. Raises `GenerationEnded` if
        a collective fails; an error of the model passes through.
        """

    def clip(self, max_norm: float | None) -> float:
        """The 2-norm of the whole gradient, before it was scaled down to `max_norm` (None: not scaled). The
        same on every rank.
        """


def empty_micro_batch(device: torch.device, by_document: bool) -> MicroBatch:
    """A sample without targets, for a rank without a micro-batch: its loss and gradient are 0, but it takes
    part in the collectives.
    """
    nothing = torch.zeros(1, 2, dtype=torch.int64, device=device)
    return MicroBatch(
        number=-1,
        first_sample=-1,
        input_ids=nothing,
        labels=torch.full_like(nothing, NO_LOSS),
        document_ids=nothing if by_document else None,
    )


def forget(parameters: Sequence[nn.Parameter]) -> None:
    """Drops what stands in `.grad`."""
    for parameter in parameters:
        parameter.grad = None


def add_losses(total: int | None, loss: int | None) -> int | None:
    """The sum, None if one of them is."""
    return None if total is None or loss is None else total + loss


def square_sum(gradients: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements, to 1e-7 of it: norms of short pieces, in float32, whose squares
    are added without rounding, so that their order makes no difference. (torch's own norm of a float32 vector
    on a CPU is 1.3 % too small at 124 million elements, and takes 40 times as long in float64.)
    """
    norms: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.reshape(-1).float()
        whole = flat.numel() // _PIECE * _PIECE
        norms.append(torch.linalg.vector_norm(flat[:whole].view(whole // _PIECE, _PIECE), dim=1))
        norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    return math.fsum((torch.cat(norms).double() ** 2).tolist()) if norms else 0.0


def scale(gradients: Sequence[Tensor | None], norm: float, max_norm: float | None) -> None:
    """Scales gradients, whose whole norm is `norm`, down to `max_norm` if it is larger."""
    if max_norm is None or norm <= max_norm:
        return
    for gradient in gradients:
        assert gradient is not None, "every parameter has a gradient after reduce"
        gradient.mul_(max_norm / norm)
