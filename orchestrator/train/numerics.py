"""The gradient of a step from the micro-batches of all ranks: the same bits for every division (`invariant`), or as fast as can be (`fast`).

It knows model, ranks and collectives; nothing of the optimizer, of membership or of where samples come from.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.plan import batches
from orchestrator.plan.digest import sample_digest
from orchestrator.records import BatchSlice
from orchestrator.train.group import GenerationEnded, collective
from orchestrator.train.model import NO_LOSS, loss_sum, seed_micro_batch
from orchestrator.train.word import fixed_point

Node = tuple[int, int]  # (start, size) of an aligned interval of micro-batches, size a power of two


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one rank that run through the model together; `number` counts micro-batches within the step."""

    number: int
    first_sample: int
    input_ids: Tensor  # (samples, seq_len) int64
    labels: Tensor  # (samples, seq_len) int64, -100 = no loss


def cut(batch: BatchSlice, micro_batch_size: int, rank: int, world_size: int, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of a rank's slice; the same for every world size, put together over the ranks."""
    step = batch.step
    expected = batches.rank_samples(step.first_sample, step.num_samples, micro_batch_size, rank, world_size)
    assert expected == (batch.start, batch.stop), f"rank {rank} of {world_size} trains {expected}, the slice holds {(batch.start, batch.stop)}"
    micros = batches.micro_batches(step.num_samples, micro_batch_size)
    input_ids, labels = (torch.from_numpy(a).to(device, torch.int64) for a in (batch.input_ids, batch.labels))
    before = batch.start - step.first_sample
    return [
        MicroBatch(
            number=number,
            first_sample=step.first_sample + micros[number].start,
            input_ids=input_ids[micros[number].start - before : micros[number].stop - before],
            labels=labels[micros[number].start - before : micros[number].stop - before],
        )
        for number in batches.rank_run(len(micros), rank, world_size)
    ]


def slice_digest(batch: BatchSlice) -> int:
    """The sum modulo 2^64 of the digests of the slice's samples, from the arrays that the model is given."""
    rows = zip(batch.source_numbers.tolist(), batch.input_ids, batch.labels, batch.document_ids, strict=True)
    digests = (
        sample_digest(batch.start + i, source, batch.step.seq_len, input_ids, labels, documents)
        for i, (source, input_ids, labels, documents) in enumerate(rows)
    )
    return sum(digests) % (1 << 64)


class Gradient(Protocol):
    """Leaves the gradient of a step, summed over all ranks' micro-batches, in `.grad` of every parameter."""

    def enter(self, rank: int, world_size: int) -> None:
        """A new generation; its default process group exists."""

    def leave(self) -> None:
        """The generation is over; nothing may refer to its process group any more."""

    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        """Runs this rank's `micros` of the step's `num_micro` and adds up the gradients of all ranks, divided by `targets`.

        Returns this rank's summed loss in fixed point, None if it is not finite. Raises `GenerationEnded` if a collective fails; an
        error of the model passes through.
        """

    def clip(self, max_norm: float | None) -> float:
        """The 2-norm of the whole gradient, before it was scaled down to `max_norm` (None: not scaled). The same on every rank."""


# ------------------------------------------------------------------------------------------------------------- the fixed tree
def tree_nodes(start: int, stop: int) -> list[Node]:
    """The fewest aligned intervals that cover [start, stop) from left to right."""
    nodes = []
    while start < stop:
        size = start & -start or 1 << stop.bit_length()
        while start + size > stop:
            size //= 2
        nodes.append((start, size))
        start += size
    return nodes


def finish_tree(values: dict[Node, Tensor], start: int, size: int) -> Tensor | None:
    """The sum of the fixed tree below the node (start, size) from the nodes that are known; None beyond the last micro-batch."""
    known = values.get((start, size))
    if known is not None or size == 1:
        return known
    half = size // 2
    left, right = finish_tree(values, start, half), finish_tree(values, start + half, half)
    if left is None or right is None:
        return right if left is None else left
    return left + right


class TreeSum:
    """Adds up tensors that come in the order of their numbers as a binary counter does; what is left are the sums of `tree_nodes`."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int, Tensor]] = []

    def add(self, number: int, value: Tensor) -> None:
        """The next tensor; it may be overwritten."""
        nodes = self.nodes
        nodes.append((number, 1, value))
        while len(nodes) > 1 and nodes[-1][1] == nodes[-2][1] and nodes[-2][0] % (2 * nodes[-1][1]) == 0:
            (_, _, right), (start, size, left) = nodes.pop(), nodes.pop()
            nodes.append((start, 2 * size, left.add_(right)))


class InvariantGradient:
    """Float32 gradients combined over micro-batches in one fixed binary tree, whoever holds them: no world size changes a bit.

    Each rank sums its run of micro-batches as far as the tree allows, then finishes the tree for its chunk of the parameters (all-to-all
    of the nodes, all-gather of the sums). Costs a few copies of the gradient in memory; nothing overlaps with backward.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sizes = [p.numel() for p in self._parameters]
        self._rank, self._world_size = 0, 1
        self._flat: Tensor | None = None

    def enter(self, rank: int, world_size: int) -> None:
        """See `Gradient`."""
        self._rank, self._world_size = rank, world_size

    def leave(self) -> None:
        """See `Gradient`: nothing is held."""

    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        """See `Gradient`."""
        _forget(self._parameters)  # what the last step left
        loss: int | None = 0
        tree = TreeSum()
        for micro in micros:
            loss = _add(loss, self._backward(micro, targets))
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
        for parameter, part in zip(self._parameters, flat.split(self._sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return loss

    def clip(self, max_norm: float | None) -> float:
        """See `Gradient`."""
        assert self._flat is not None, "clip comes after reduce"
        norm = float(torch.linalg.vector_norm(self._flat))
        _scale([p.grad for p in self._parameters], norm, max_norm)
        self._flat = None
        return norm

    def _backward(self, micro: MicroBatch, targets: int) -> int | None:
        seed_micro_batch(self._seed, micro.first_sample)
        loss = loss_sum(self._model, micro.input_ids, micro.labels)
        (loss / max(1, targets)).backward()
        return fixed_point(float(loss.detach()))

    def _take_flat(self) -> Tensor:
        """The gradient of the micro-batch as one float32 vector; the parameters have none afterwards. One never used counts as zero."""
        parts = [
            torch.zeros(p.numel(), device=p.device) if p.grad is None else p.grad.flatten().float() for p in self._parameters
        ]
        _forget(self._parameters)
        return torch.cat(parts)

    def _exchange(self, values: dict[Node, Tensor], num_micro: int, root: int) -> Tensor:
        world, total, device = self._world_size, sum(self._sizes), self._parameters[0].device
        nodes = [tree_nodes(run.start, run.stop) for run in (batches.rank_run(num_micro, r, world) for r in range(world))]
        mine = nodes[self._rank]
        assert list(values) == mine, f"rank {self._rank} summed the nodes {list(values)}, its run has {mine}"
        chunk = -(-total // world)
        sent = torch.zeros(world, len(mine), chunk, device=device)  # the chunk of each rank, of each of my nodes
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


# ------------------------------------------------------------------------------------------------------------- the usual way
class FastGradient:
    """PyTorch's DDP: the all-reduce of each bucket overlaps with backward. The order of additions depends on the world size.

    Gradients are summed, not averaged, because they are divided by the global number of targets before. All parameters must be used.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._ddp: Any = None
        self._works: list[Any] = []

    def enter(self, rank: int, world_size: int) -> None:
        """See `Gradient`: a fresh wrapper; it sends no weights, for these have been agreed on."""
        del rank
        if world_size == 1:
            return
        devices = None if self._parameters[0].device.type == "cpu" else [self._parameters[0].device]
        with collective("wrapping the model"):
            self._ddp = nn.parallel.DistributedDataParallel(
                self._model, device_ids=devices, broadcast_buffers=False, init_sync=False
            )
            # in place of DDP's own hook, which would divide by the world size; it refuses annotations that are strings
            self._ddp.register_comm_hook(self, lambda gradient, bucket: gradient.sum_bucket(bucket.buffer()))

    def leave(self) -> None:
        """See `Gradient`: the wrapper's hooks on the parameters go with it, so it is collected at once."""
        self._ddp = None
        self._works.clear()
        gc.collect()

    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        """See `Gradient`."""
        del num_micro
        _forget(self._parameters)
        loss: int | None = 0
        for micro in micros[:-1]:
            loss = _add(loss, self._backward(micro, targets, last=False))
        last = micros[-1] if micros else self._empty()
        return _add(loss, self._backward(last, targets, last=True))

    def clip(self, max_norm: float | None) -> float:
        """See `Gradient`."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients])))
        _scale(gradients, norm, max_norm)
        return norm

    def _backward(self, micro: MicroBatch, targets: int, last: bool) -> int | None:
        seed_micro_batch(self._seed, micro.first_sample)
        if self._ddp is None:
            loss = loss_sum(self._model, micro.input_ids, micro.labels)
            (loss / max(1, targets)).backward()
        elif not last:
            with self._ddp.no_sync():
                loss = loss_sum(self._ddp, micro.input_ids, micro.labels)
                (loss / max(1, targets)).backward()
        else:
            loss = loss_sum(self._ddp, micro.input_ids, micro.labels)
            self._works.clear()
            try:
                (loss / max(1, targets)).backward()
            except RuntimeError as error:
                if not any(_failed(work) for work in self._works):
                    raise  # the model's own
                raise GenerationEnded(f"summing the gradient: {error}") from error
        return fixed_point(float(loss.detach()))

    def _empty(self) -> MicroBatch:
        """A sample without targets, for a rank without a micro-batch: its loss and gradient are 0, but it takes part in the sum."""
        device = self._parameters[0].device
        nothing = torch.zeros(1, 2, dtype=torch.int64, device=device)
        return MicroBatch(number=-1, first_sample=-1, input_ids=nothing, labels=torch.full_like(nothing, NO_LOSS))

    def sum_bucket(self, bucket: Tensor) -> Any:
        """Begins the sum of a bucket over the ranks; its future gives the bucket."""
        work: Any = None
        try:
            work = dist.all_reduce(bucket, async_op=True)
        finally:
            self._works.append(work)
        return work.get_future().then(lambda done: done.value()[0])


def _failed(work: Any) -> bool:
    """Did this sum not even begin, or end with an error?"""
    return work is None or not work.is_completed() or work.exception() is not None


def _forget(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _add(total: int | None, loss: int | None) -> int | None:
    return None if total is None or loss is None else total + loss


def _scale(gradients: Sequence[Tensor | None], norm: float, max_norm: float | None) -> None:
    if max_norm is None or norm <= max_norm:
        return
    for gradient in gradients:
        assert gradient is not None, "every parameter has a gradient after reduce"
        gradient.mul_(max_norm / norm)


def make_gradient(model: nn.Module, invariant: bool, seed: int) -> Gradient:
    """The way of `train.numerics` for `model`."""
    return InvariantGradient(model, seed) if invariant else FastGradient(model, seed)
