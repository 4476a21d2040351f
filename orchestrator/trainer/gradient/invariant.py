"""The interface of the ways to combine the gradients of micro-batches, and the invariant one.

`invariant` combines gradients over micro-batches in one fixed binary tree: the result has the same bits for
every division of a step among ranks. `gradient.parallel` has `fast`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.objectives import Terms
from orchestrator.planning import batches
from orchestrator.trainer.comm.group import collective
from orchestrator.trainer.interfaces.step_summary import TermSums
from orchestrator.trainer.objective.micro_batches import NumberedMicroBatch, Objective, StepPlace
from orchestrator.trainer.objective.token_losses import TokenLosses

_PIECE = 1 << 14  # elements whose squares are summed in float32


class Gradient(Protocol):
    """Computes the gradient of a step in `.grad` of every parameter, summed over all ranks."""

    objective: Objective
    token_losses: TokenLosses | None = None  # what the losses per token show, if that is asked for

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Of all metrics that `reduce` sums."""
        beside = self.token_losses.names if self.token_losses is not None else ()
        return (*self.objective.metric_names, *beside)

    def enter(self, rank: int, world_size: int) -> None:
        """Enters a new generation. Its default process group already exists."""

    def leave(self) -> None:
        """Leaves the generation. Afterwards nothing may refer to its process group."""

    def reduce(
        self, micros: Sequence[NumberedMicroBatch], num_micro: int, units: float, place: StepPlace
    ) -> TermSums:
        """Runs this rank's micro-batches, and sums the gradients of all ranks divided by `units`.

        `micros` are this rank's share of the `num_micro` micro-batches of the step at `place`. Returns this
        rank's sums. Raises `GenerationEnded` if a collective fails. Errors of the model propagate.
        """

    def evaluate(
        self, micros: Sequence[NumberedMicroBatch], num_micro: int, place: StepPlace
    ) -> list[Terms]:
        """Returns the terms of each of this rank's micro-batches, without gradients, the model in evaluation
        mode.

        `micros`, `num_micro` and the errors are as in `reduce`.
        """

    def clip(self, max_norm: float | None) -> float:
        """Scales the gradient down to `max_norm` (None: no scaling) and returns its 2-norm before scaling.

        The norm is of the whole gradient and the same on every rank.
        """


def evaluated(
    model: nn.Module, objective: Objective, micros: Sequence[NumberedMicroBatch], place: StepPlace
) -> list[Terms]:
    """Returns the terms of micro-batches, without gradients, the model in evaluation mode."""
    model.eval()
    try:
        with torch.no_grad():
            return [objective.terms(model, micro, place) for micro in micros]
    finally:
        model.train()


def begun_sums(gradient: Gradient) -> TermSums:
    """Returns the sums of a step that begins."""
    if gradient.token_losses is not None:
        gradient.token_losses.begin()
    return TermSums(gradient.metric_names)


def with_token_losses(gradient: Gradient, terms: Terms, micro: NumberedMicroBatch) -> Terms:
    """Adds the metrics of the losses per token to those of a micro-batch."""
    if gradient.token_losses is None:
        return terms
    beside = gradient.token_losses.metrics(terms, micro)
    return replace(terms, metrics={**terms.metrics, **beside})


def forget(parameters: Sequence[nn.Parameter]) -> None:
    """Clears `.grad` of all parameters."""
    for parameter in parameters:
        parameter.grad = None


def divided(terms: Terms, units: float) -> Tensor:
    """Returns the loss divided by the units of the step. Without units it is 0, and so is its gradient."""
    return terms.loss_sum / units if units else terms.loss_sum * 0


def square_sum(gradients: Iterable[Tensor]) -> float:
    """Returns the sum of the squares of all elements, with a relative error of at most 1e-7.

    Norms of short pieces are computed in float32. On a CPU their squares are summed without rounding, so that
    the order makes no difference. A GPU sums them in float64 in a fixed order, so that the host waits once.
    (torch's own norm of a float32 vector on a CPU is 1.3 % too small at 124 million elements, and takes 40
    times as long in float64.)
    """
    norms: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.reshape(-1).float()
        whole = flat.numel() // _PIECE * _PIECE
        norms.append(torch.linalg.vector_norm(flat[:whole].view(whole // _PIECE, _PIECE), dim=1))
        norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    if not norms:
        return 0.0
    squares = torch.cat(norms).double() ** 2
    return math.fsum(squares.tolist()) if squares.device.type == "cpu" else float(squares.sum())


def scale(gradients: Sequence[Tensor | None], norm: float, max_norm: float | None) -> None:
    """Scales gradients with the total norm `norm` down to `max_norm` if it is larger."""
    if max_norm is None or norm <= max_norm:
        return
    scaled = [gradient for gradient in gradients if gradient is not None]
    assert len(scaled) == len(gradients), "every parameter has a gradient after reduce"
    torch._foreach_mul_(scaled, max_norm / norm)


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


class WholeModelGradient(Gradient):
    """What the gradients of a member that holds the whole model have in common."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self._model, self.objective = model, objective
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    @override
    def evaluate(
        self, micros: Sequence[NumberedMicroBatch], num_micro: int, place: StepPlace
    ) -> list[Terms]:
        del num_micro
        return evaluated(self._model, self.objective, micros, place)


class InvariantGradient(WholeModelGradient):
    """Combines float32 gradients over micro-batches in one fixed binary tree. No world size changes a bit.

    Each rank sums its run of micro-batches as far as the tree allows. It then finishes the tree for its chunk
    of the parameters (all-to-all of the nodes, all-gather of the sums). This takes the memory of a few copies
    of the gradient. Nothing overlaps with backward.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__(model, objective)
        self._sizes = [p.numel() for p in self._parameters]
        self._rank, self._world_size = 0, 1
        self._flat: Tensor | None = None

    @override
    def enter(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @override
    def leave(self) -> None:
        self.objective.leave()

    @override
    def reduce(
        self, micros: Sequence[NumberedMicroBatch], num_micro: int, units: float, place: StepPlace
    ) -> TermSums:
        forget(self._parameters)  # the gradient of the previous step
        sums, tree = begun_sums(self), TreeSum()
        if micros:
            self.objective.check(self._model, micros[0], place)
        for micro in micros:
            terms = self.objective.terms(self._model, micro, place)
            torch.autograd.backward(divided(terms, units))
            sums.add(with_token_losses(self, terms, micro))
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
        return sums

    @override
    def clip(self, max_norm: float | None) -> float:
        assert self._flat is not None, "clip comes after reduce"
        norm = math.sqrt(square_sum([self._flat]))
        scale([p.grad for p in self._parameters], norm, max_norm)
        self._flat = None
        return norm

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
