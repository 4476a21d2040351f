"""Micro-batches, and the interface of the two ways to combine their gradients: `invariant` and `fast`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from orchestrator.planning import batches
from orchestrator.records.steps import BatchSlice
from orchestrator.trainer.model.build_model import NO_LOSS

_PIECE = 1 << 14  # elements whose squares are summed in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one rank that pass through the model together. `number` counts micro-batches within the
    step.
    """

    number: int
    first_sample: int
    input_ids: Tensor  # (samples, seq_len) int64
    labels: Tensor  # (samples, seq_len) int64, -100 = no loss
    document_ids: Tensor | None = None  # (samples, seq_len) int64; set if attention stays within documents
    is_padding: Tensor | None = None  # (samples, seq_len) bool; None if no position is padding


def cut(
    batch: BatchSlice,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
    by_document: bool = False,
) -> list[MicroBatch]:
    """Cuts a rank's slice into micro-batches. The concatenation over all ranks is the same for every world
    size.

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
    """Computes the gradient of a step in `.grad` of every parameter, summed over all ranks."""

    def enter(self, rank: int, world_size: int) -> None:
        """Enters a new generation. Its default process group already exists."""

    def leave(self) -> None:
        """Leaves the generation. Afterwards nothing may refer to its process group."""

    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        """Runs this rank's micro-batches, and sums the gradients of all ranks divided by `targets`.

        `micros` are this rank's share of the step's `num_micro` micro-batches. Returns this rank's summed
        loss in fixed point, or None if it is not finite. Raises `GenerationEnded` if a collective fails.
        Errors of the model propagate.
        """

    def clip(self, max_norm: float | None) -> float:
        """Scales the gradient down to `max_norm` (None: no scaling) and returns its 2-norm before scaling.

        The norm is of the whole gradient and the same on every rank.
        """


def empty_micro_batch(device: torch.device, by_document: bool) -> MicroBatch:
    """Returns a sample without targets, for a rank without a micro-batch.

    Its loss and gradient are 0. The rank uses it to take part in the collectives.
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
    """Clears `.grad` of all parameters."""
    for parameter in parameters:
        parameter.grad = None


def add_losses(total: int | None, loss: int | None) -> int | None:
    """Returns the sum, or None if either value is None."""
    return None if total is None or loss is None else total + loss


def square_sum(gradients: Iterable[Tensor]) -> float:
    """Returns the sum of the squares of all elements, with a relative error of at most 1e-7.

    Norms of short pieces are computed in float32, and their squares are summed without rounding, so that the
    order makes no difference. (torch's own norm of a float32 vector on a CPU is 1.3 % too small at 124
    million elements, and takes 40 times as long in float64.)
    """
    norms: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.reshape(-1).float()
        whole = flat.numel() // _PIECE * _PIECE
        norms.append(torch.linalg.vector_norm(flat[:whole].view(whole // _PIECE, _PIECE), dim=1))
        norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    return math.fsum((torch.cat(norms).double() ** 2).tolist()) if norms else 0.0


def scale(gradients: Sequence[Tensor | None], norm: float, max_norm: float | None) -> None:
    """Scales gradients with the total norm `norm` down to `max_norm` if it is larger."""
    if max_norm is None or norm <= max_norm:
        return
    for gradient in gradients:
        assert gradient is not None, "every parameter has a gradient after reduce"
        gradient.mul_(max_norm / norm)
