"""Gradients of a sharded model: FSDP2 gathers weights and reduces gradients block by block.

Gradients are summed over the shards, and with HSDP also over the replicas. The last bits depend on the
layout, as those of DDP depend on the world size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.errors import TrainingError
from orchestrator.planning import batches
from orchestrator.trainer.comm.group import collective, ended_by, raised_by_collective
from orchestrator.trainer.gradient.micro_batches import (
    MicroBatch,
    add_losses,
    empty_micro_batch,
    scale,
    square_sum,
)
from orchestrator.trainer.interfaces.step_summary import fixed_point
from orchestrator.trainer.model.build_model import loss_sum, seed_micro_batch
from orchestrator.trainer.state.sharded_state import ShardedState

# Distinguishes two causes of an error from torch's collectives: a lost peer, or mismatched collectives.
#
# Another group of the same processes would fail again on mismatched collectives. The decision uses only the
# text of the error.
# Messages of gloo and NCCL for tensors that they cannot accept, and of torch when it assembles buffers for
# them. If ranks pass different sizes, gloo aborts the process (SIGABRT) and raises nothing.
_MISMATCHES = (
    "processgroupgloo::",  # gloo checks its arguments
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "Detected mismatch between collectives",
    "must match the size",
    "size mismatch",
    "shape mismatch",
    "same dtype",
    "same type",
    "expected all tensors to be",
    "is invalid for input of size",
    "output tensor size must be equal to",
    "input tensor must be the same",
)
# Messages about a broken connection or a timeout. They take precedence over all others.
_LOST = (
    "closed by peer",
    "reset by peer",
    "refused",
    "broken pipe",
    "timed out",
    "timeout",
    "socket",
    "unreachable",
    "ncclremoteerror",
    "ncclsystemerror",
    "aborted",
)


def is_mismatch(error: BaseException) -> bool:
    """Whether all members would meet this error again in the next group.

    In doubt the error counts as a lost peer: that ends one group, and the failure budget ends the run.
    """
    text = str(error).lower()
    return any(mark.lower() in text for mark in _MISMATCHES) and not any(mark in text for mark in _LOST)


# torch's error text when rows that were not gathered are used in a computation
_BARE_ROWS = "mixed torch.Tensor and DTensor"


class ShardedGradient:
    """Combines the gradients of a sharded model. A rank keeps the sum of only its own rows.

    Every rank runs the same number of micro-batches, because each micro-batch runs collectives. Empty
    micro-batches fill up the end. The whole gradient never exists on a rank.

    Gradients are summed, not averaged, because they are already divided by the global number of targets. In a
    micro-batch, a parameter must be used by all ranks or by none. If none uses it, its gradient counts as
    zero.
    """

    def __init__(self, state: ShardedState, seed: int, precision: str, by_document: bool = False) -> None:
        self._state, self._seed, self._by_document = state, seed, by_document
        # FSDP2 casts weights and block inputs by itself. Autocast is needed in addition, because values that
        # are combined with float32 buffers, or computed in float32, are no longer bfloat16.
        self._precision = precision
        self._world_size = 1

    def enter(self, rank: int, world_size: int) -> None:
        """See `Gradient`. The state's model must belong to this generation."""
        del rank
        self._world_size = world_size

    def leave(self) -> None:
        """See `Gradient`: nothing is held."""

    def reduce(self, micros: Sequence[MicroBatch], num_micro: int, targets: int) -> int | None:
        """See `Gradient`. Afterwards `.grad` has only the rows that this rank holds."""
        state = self._state
        state.forget_gradients()
        empty = empty_micro_batch(state.items()[0].tensor.device, self._by_document)
        loss: int | None = 0
        for number in range(batches.micro_batches_per_rank(num_micro, self._world_size)):
            micro = micros[number] if number < len(micros) else empty
            loss = add_losses(loss, self._backward(micro, targets))
        state.take_gradients()
        return loss

    def clip(self, max_norm: float | None) -> float:
        """See `Gradient`. The squares are summed over the shards of one replica, because all replicas have
        the same gradient.
        """
        gradients = self._state.own_gradients()
        square = torch.tensor(square_sum(gradients), dtype=torch.float64, device=gradients[0].device)
        with collective("the norm of the gradient"):
            dist.all_reduce(square, group=self._state.mesh.get_group("shard"))
        norm = math.sqrt(float(square))
        scale(gradients, norm, max_norm)
        return norm

    def _backward(self, micro: MicroBatch, targets: int) -> int | None:
        seed_micro_batch(self._seed, micro.first_sample)
        try:
            tokens = micro.input_ids, micro.labels
            loss: Tensor = loss_sum(
                self._state.model, *tokens, self._precision, micro.document_ids, micro.is_padding
            )
            torch.autograd.backward(loss / max(1, targets))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if _BARE_ROWS in str(error):
                raise TrainingError(
                    "the model uses weights of a block without calling the block, so they were not gathered "
                    f"({error}); call the modules of its torch.nn.ModuleList, keep such weights outside of "
                    "it, or set train.parallel=replicate (docs/howto/shards.md)",
                    code="model.weights_not_gathered",
                ) from error
            if not raised_by_collective(error):
                raise  # the model's own error
            if is_mismatch(error):
                raise TrainingError(
                    f"the ranks call different collectives to gather weights and sum the gradient: {error}; "
                    "another group would fail in the same way. Use the same parameters on all ranks in each "
                    "micro-batch (docs/howto/shards.md); if the model does, report this bug",
                    code="training.collectives_differ",
                ) from error
            raise ended_by("gathering weights, or summing the gradient", error) from error
        return fixed_point(float(loss.detach()))
