"""Fast numerics: combines gradients with PyTorch's DDP.

The all-reduce overlaps with backward. The last bits depend on the world size.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.trainer.comm.group import collective, ended_by, raised_by_collective
from orchestrator.trainer.gradient.micro_batches import (
    MicroBatch,
    add_losses,
    empty_micro_batch,
    forget,
    scale,
    square_sum,
)
from orchestrator.trainer.interfaces.step_summary import fixed_point
from orchestrator.trainer.model.build_model import loss_sum, seed_micro_batch


class FastGradient:
    """Combines gradients with PyTorch's DDP. The all-reduce of each bucket overlaps with backward.

    The order of additions depends on the world size. Gradients are summed, not averaged, because they are
    already divided by the global number of targets. All parameters must be used.
    """

    def __init__(self, model: nn.Module, seed: int, precision: str, by_document: bool = False) -> None:
        # DDP imports this at its first use. The import takes a second, which would delay a generation.
        import torch._dynamo  # noqa: F401

        self._model, self._seed, self._precision = model, seed, precision
        self._by_document = by_document
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
            # Replaces DDP's default hook, which would divide by the world size. DDP rejects hooks with string
            # annotations.
            self._ddp.register_comm_hook(self, lambda gradient, bucket: gradient.sum_bucket(bucket.buffer()))

    def leave(self) -> None:
        """See `Gradient`: the wrapper's hooks on the parameters go with it, so it is collected at once."""
        self._ddp = None
        self._works.clear()
        gc.collect()

    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        """See `Gradient`."""
        del num_micro
        forget(self._parameters)
        loss: int | None = 0
        for micro in micros[:-1]:
            loss = add_losses(loss, self._backward(micro, targets, last=False))
        device = self._parameters[0].device
        last = micros[-1] if micros else empty_micro_batch(device, self._by_document)
        return add_losses(loss, self._backward(last, targets, last=True))

    def clip(self, max_norm: float | None) -> float:
        """See `Gradient`."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = math.sqrt(square_sum(gradients))
        scale(gradients, norm, max_norm)
        return norm

    def _backward(self, micro: MicroBatch, targets: int, last: bool) -> int | None:
        seed_micro_batch(self._seed, micro.first_sample)
        model: Any = self._model if self._ddp is None else self._ddp
        self._works.clear()
        try:
            # DDP also runs a collective in a forward pass: in the second one the ranks agree on the buckets.
            with nullcontext() if last or self._ddp is None else self._ddp.no_sync():
                loss = self._loss(model, micro)
                torch.autograd.backward(loss / max(1, targets))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not raised_by_collective(error) and not any(_failed(work) for work in self._works):
                raise  # the model's own error
            raise ended_by("summing the gradient", error) from error
        return fixed_point(float(loss.detach()))

    def _loss(self, model: nn.Module, micro: MicroBatch) -> Tensor:
        tokens = micro.input_ids, micro.labels
        return loss_sum(model, *tokens, self._precision, micro.document_ids, micro.is_padding)

    def sum_bucket(self, bucket: Tensor) -> Any:
        """Starts the all-reduce of a bucket; the returned future yields the bucket."""
        work: Any = None
        try:
            work = dist.all_reduce(bucket, async_op=True)
        finally:
            self._works.append(work)
        return work.get_future().then(lambda done: done.value()[0])


def _failed(work: Any) -> bool:
    """Whether the all-reduce failed to start or ends with an error."""
    if work is None:
        return True
    try:
        work.wait()
    except RuntimeError:
        return True
    return False
