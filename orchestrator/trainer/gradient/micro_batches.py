"""Micro-batches, the interface of the two ways to combine their gradients, and the invariant one.

`invariant` combines gradients over micro-batches in one fixed binary tree: the result has the same bits for
every division of a step among ranks. `parallel.py` has `fast`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.planning import batches
from orchestrator.records.steps import BatchSlice
from orchestrator.trainer.comm.group import collective
from orchestrator.trainer.interfaces.step_summary import fixed_point
from orchestrator.trainer.model.build_model import NO_LOSS, loss_sum, seed_micro_batch

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


Node = tuple[int, int]  # (start, size) of an aligned interval of micro-batches, size a power of two


def tree_nodes(start: int, stop: int) -> list[Node]:
    """Returns the fewest aligned intervals that cover [start, stop), from left to right."""
    nodes = []
    while start < stop:
        size = start & -start or 1 << stop.bit_length()
        while start + size > stop:
            size //= 2
        nodes.append((start, size))
        start += size
    return nodes


def finish_tree(values: dict[Node, Tensor], start: int, size: int) -> Tensor | None:
    """Returns the sum of the fixed tree below the node (start, size), computed from the known nodes.

    Returns None beyond the last micro-batch.
    """
    known = values.get((start, size))
    if known is not None or size == 1:
        return known
    half = size // 2
    left, right = finish_tree(values, start, half), finish_tree(values, start + half, half)
    if left is None or right is None:
        return right if left is None else left
    return left + right


class TreeSum:
    """Sums tensors that arrive in the order of their numbers, as a binary counter does.

    The remaining nodes are the sums of `tree_nodes`.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int, Tensor]] = []

    def add(self, number: int, value: Tensor) -> None:
        """Adds the next tensor, which may be overwritten."""
        nodes = self.nodes
        nodes.append((number, 1, value))
        while len(nodes) > 1 and nodes[-1][1] == nodes[-2][1] and nodes[-2][0] % (2 * nodes[-1][1]) == 0:
            (_, _, right), (start, size, left) = nodes.pop(), nodes.pop()
            nodes.append((start, 2 * size, left.add_(right)))


class InvariantGradient(Gradient):
    """Combines float32 gradients over micro-batches in one fixed binary tree. No world size changes a bit.

    Each rank sums its run of micro-batches as far as the tree allows. It then finishes the tree for its chunk
    of the parameters (all-to-all of the nodes, all-gather of the sums). This takes the memory of a few copies
    of the gradient. Nothing overlaps with backward.
    """

    def __init__(self, model: nn.Module, seed: int, precision: str) -> None:
        self._model, self._seed, self._precision = model, seed, precision
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sizes = [p.numel() for p in self._parameters]
        self._rank, self._world_size = 0, 1
        self._flat: Tensor | None = None

    @override
    def enter(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @override
    def leave(self) -> None:
        """Nothing is held."""

    @override
    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        forget(self._parameters)  # the gradient of the previous step
        loss: int | None = 0
        tree = TreeSum()
        for micro in micros:
            loss = add_losses(loss, self._backward(micro, targets))
            tree.add(micro.number, self._take_flat())
        values = {(start, size): value for start, size, value in tree.nodes}
        root = 1 << (num_micro - 1).bit_length()
        if self._world_size == 1:
            flat = finish_tree(values, 0, root)
            assert flat is not None, "a step has at least one micro-batch"
        else:
            with collective("summing the gradient"):
                flat = self._exchange(values, num_micro, root)
        self._flat = flat
        for parameter, part in zip(self._parameters, torch.split(flat, self._sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return loss

    @override
    def clip(self, max_norm: float | None) -> float:
        assert self._flat is not None, "clip comes after reduce"
        norm = math.sqrt(square_sum([self._flat]))
        scale([p.grad for p in self._parameters], norm, max_norm)
        self._flat = None
        return norm

    def _backward(self, micro: MicroBatch, targets: int) -> int | None:
        seed_micro_batch(self._seed, micro.first_sample)
        tokens = micro.input_ids, micro.labels
        loss = loss_sum(self._model, *tokens, self._precision, micro.document_ids, micro.is_padding)
        torch.autograd.backward(loss / max(1, targets))
        return fixed_point(float(loss.detach()))

    def _take_flat(self) -> Tensor:
        """Returns the gradient of the micro-batch as one float32 vector and clears `.grad`.

        A parameter that was not used counts as zero.
        """
        parts = [
            torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.flatten().float()
            for p in self._parameters
        ]
        forget(self._parameters)
        return torch.cat(parts)

    def _exchange(self, values: dict[Node, Tensor], num_micro: int, root: int) -> Tensor:
        world, total, device = self._world_size, sum(self._sizes), self._parameters[0].device
        nodes = [
            tree_nodes(run.start, run.stop)
            for run in (batches.rank_run(num_micro, r, world) for r in range(world))
        ]
        mine = nodes[self._rank]
        assert list(values) == mine, f"rank {self._rank} summed the nodes {list(values)}, its run has {mine}"
        chunk = -(-total // world)
        sent = torch.zeros(
            world, len(mine), chunk, device=device
        )  # the chunk of each rank, of each of my nodes
        for number, node in enumerate(mine):
            for other in range(world):
                part = values[node][other * chunk : (other + 1) * chunk]
                sent[other, number, : len(part)] = part
        counts = [len(of_rank) for of_rank in nodes]
        received = torch.empty(sum(counts), chunk, device=device)
        dist.all_to_all_single(
            received.view(-1), sent.view(-1), [c * chunk for c in counts], [len(mine) * chunk] * world
        )
        known = dict(zip((node for of_rank in nodes for node in of_rank), received, strict=True))
        summed = finish_tree(known, 0, root)
        assert summed is not None, "a step has at least one micro-batch"
        flat = torch.empty(world, chunk, device=device)
        dist.all_gather(list(flat), summed.contiguous())
        return flat.view(-1)[:total]
