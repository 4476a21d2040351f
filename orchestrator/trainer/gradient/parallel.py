"""Builds a job's state and gradient. Fast numerics combine gradients with PyTorch's DDP or FSDP2.

DDP overlaps the all-reduce with backward. FSDP2 gathers weights and reduces gradients block by block. The
gradients are summed over the shards, and with HSDP also over the replicas. The last bits depend on the world
size and on the layout.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from orchestrator.errors import TrainingError
from orchestrator.objectives import Terms
from orchestrator.planning import batches
from orchestrator.trainer.comm.group import collective, ended_by, raised_by_collective
from orchestrator.trainer.gradient.invariant import (
    Gradient,
    InvariantGradient,
    WholeModelGradient,
    begun_sums,
    divided,
    evaluated,
    forget,
    scale,
    square_sum,
    with_token_losses,
)
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.interfaces.step_summary import TermSums
from orchestrator.trainer.model.model_call import attend_within_documents
from orchestrator.trainer.objective.micro_batches import NumberedMicroBatch, Objective, StepPlace
from orchestrator.trainer.objective.objective import objective_of
from orchestrator.trainer.state.frozen_weights import naming_frozen
from orchestrator.trainer.state.sharded_state import ShardedState
from orchestrator.trainer.state.train_state import TrainState


def state_and_gradient(job: TrainJob, device: torch.device) -> tuple[TrainState, Gradient]:
    """Builds both for one member, before its first generation.

    Raises `ConfigError` if the model cannot be built, cannot be trained with the job's objective, or cannot
    attend within documents although the job requires it.
    """
    if job.num_shards != 1:
        sharded = ShardedState(job.model, job.train, device, job.num_shards, job.weights_by_name)
        return sharded, ShardedGradient(sharded, _objective(sharded, job, device))
    state = TrainState(job.model, job.train, device, job.invariant, job.weights_by_name)
    objective = _objective(state, job, device)
    if job.invariant:
        return state, InvariantGradient(state.model, objective)
    return state, FastGradient(state.model, objective)


def _objective(state: TrainState, job: TrainJob, device: torch.device) -> Objective:
    if job.document_attention:
        attend_within_documents(state.model, job.model, device, job.invariant)
        for name, model in state.frozen.models.items():
            with naming_frozen(name):
                attend_within_documents(model, job.model.frozen[name].as_model, device, job.invariant)
    objective = objective_of(
        job.train, job.document_attention, job.row_len, state.frozen.models, job.rows_per_sample
    )
    objective.prepare(state.model)
    return objective


# -------------------------------------------------------------------------------------------------------- DDP
class _Forward(nn.Module):
    """Evaluates the objective on the model. DDP wraps it, so that an objective may call any part of the model
    any number of times.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self._model, self._objective = model, objective

    @override
    def forward(self, micro: NumberedMicroBatch, place: StepPlace) -> Terms:
        return self._objective.terms(self._model, micro, place)


class FastGradient(WholeModelGradient):
    """Combines gradients with PyTorch's DDP. The all-reduce of each bucket overlaps with backward.

    The order of additions depends on the world size. Gradients are summed, not averaged, because they are
    already divided by the global number of units. All parameters must be used.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        # DDP imports this at its first use. The import takes a second, which would delay a generation.
        import torch._dynamo  # noqa: F401

        super().__init__(model, objective)
        self._forward = _Forward(model, objective)
        self._ddp: Any = None
        self._works: list[Any] = []

    @override
    def enter(self, rank: int, world_size: int) -> None:
        """A fresh wrapper; it sends no weights, for these have been agreed on."""
        del rank
        if world_size == 1:
            return
        devices = None if self._parameters[0].device.type == "cpu" else [self._parameters[0].device]
        with collective("wrapping the model"):
            self._ddp = nn.parallel.DistributedDataParallel(
                self._forward, device_ids=devices, broadcast_buffers=False, init_sync=False
            )
            # Replaces DDP's default hook, which would divide by the world size. DDP rejects hooks with string
            # annotations.
            self._ddp.register_comm_hook(self, lambda gradient, bucket: gradient.sum_bucket(bucket.buffer()))

    @override
    def leave(self) -> None:
        """The wrapper's hooks on the parameters go with it, so it is collected at once."""
        self._ddp = None
        self._works.clear()
        self.objective.leave()
        gc.collect()

    @override
    def reduce(
        self, micros: Sequence[NumberedMicroBatch], num_micro: int, units: float, place: StepPlace
    ) -> TermSums:
        del num_micro
        forget(self._parameters)
        sums = begun_sums(self)
        if micros:
            self.objective.check(self._model, micros[0], place)
        for micro in micros[:-1]:
            sums.add(with_token_losses(self, self._backward(micro, place, units, last=False), micro))
        if micros:
            terms = self._backward(micros[-1], place, units, last=True)
            sums.add(with_token_losses(self, terms, micros[-1]))
        else:
            empty = self.objective.empty(self._parameters[0].device)
            self._backward(empty, place, 0, last=True)
        return sums

    @override
    def clip(self, max_norm: float | None) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = math.sqrt(square_sum(gradients))
        scale(gradients, norm, max_norm)
        return norm

    def _backward(self, micro: NumberedMicroBatch, place: StepPlace, units: float, last: bool) -> Terms:
        forward: Any = self._forward if self._ddp is None else self._ddp
        self._works.clear()
        try:
            # DDP also runs a collective in a forward pass: in the second one the ranks agree on the buckets.
            with nullcontext() if last or self._ddp is None else self._ddp.no_sync():
                terms: Terms = forward(micro, place)
                torch.autograd.backward(divided(terms, units))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not raised_by_collective(error) and not any(_failed(work) for work in self._works):
                raise  # the model's own error
            raise ended_by("summing the gradient", error) from error
        return terms

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


# ------------------------------------------------------------------------------------------------------ FSDP2
# An error of torch's collectives has one of two causes: a lost peer, or mismatched collectives. Another group
# of the same processes would fail again on mismatched ones. Only the text of the error tells them apart.
# These are messages of gloo and NCCL for tensors that they cannot accept, and of torch when it assembles
# buffers for them. If ranks pass different sizes, gloo aborts the process (SIGABRT) and raises nothing.
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


class ShardedGradient(Gradient):
    """Combines the gradients of a sharded model. A rank keeps the sum of only its own rows.

    Every rank runs the same number of micro-batches, because each micro-batch runs collectives. Empty
    micro-batches fill up the end. The whole gradient never exists on a rank.

    Gradients are summed, not averaged, because they are already divided by the global number of units. In a
    micro-batch, a parameter must be used by all ranks or by none. If none uses it, its gradient counts as
    zero.
    """

    def __init__(self, state: ShardedState, objective: Objective) -> None:
        self._state, self.objective = state, objective
        self._world_size = 1

    @override
    def enter(self, rank: int, world_size: int) -> None:
        """The state's model must belong to this generation."""
        del rank
        self._world_size = world_size

    @override
    def leave(self) -> None:
        self.objective.leave()

    @override
    def reduce(
        self, micros: Sequence[NumberedMicroBatch], num_micro: int, units: float, place: StepPlace
    ) -> TermSums:
        """Afterwards `.grad` has only the rows that this rank holds."""
        state, sums = self._state, begun_sums(self)
        state.forget_gradients()
        empty = self.objective.empty(state.items()[0].tensor.device)
        with self._collectives():
            self.objective.check(state.model, micros[0] if micros else empty, place)
        for micro in micros:
            sums.add(with_token_losses(self, self._backward(micro, place, units), micro))
        for _ in range(batches.micro_batches_per_rank(num_micro, self._world_size) - len(micros)):
            self._backward(empty, place, 0)
        state.take_gradients()
        return sums

    @override
    def evaluate(
        self, micros: Sequence[NumberedMicroBatch], num_micro: int, place: StepPlace
    ) -> list[Terms]:
        """Empty micro-batches take part in gathering the weights."""
        state = self._state
        empty = self.objective.empty(state.items()[0].tensor.device)
        num_empty = batches.micro_batches_per_rank(num_micro, self._world_size) - len(micros)
        with self._collectives():
            found = evaluated(state.model, self.objective, [*micros, *[empty] * num_empty], place)
        for module in state.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the outermost one keeps the weights that it gathered
        return found[: len(micros)]

    @override
    def clip(self, max_norm: float | None) -> float:
        """The squares are summed over the shards of one replica, because all replicas have
        the same gradient.
        """
        gradients = self._state.own_gradients()
        square = torch.tensor(square_sum(gradients), dtype=torch.float64, device=gradients[0].device)
        with collective("the norm of the gradient"):
            dist.all_reduce(square, group=self._state.mesh.get_group("shard"))
        norm = math.sqrt(float(square))
        scale(gradients, norm, max_norm)
        return norm

    def _backward(self, micro: NumberedMicroBatch, place: StepPlace, units: float) -> Terms:
        # FSDP2 casts weights and block inputs by itself. The objective's autocast is needed in addition,
        # because values that are combined with float32 buffers, or computed in float32, are no longer
        # bfloat16.
        with self._collectives():
            terms = self.objective.terms(self._state.model, micro, place)
            torch.autograd.backward(divided(terms, units))
        return terms

    @contextmanager
    def _collectives(self) -> Iterator[None]:
        """Within the block, the model gathers weights and sums gradients: names the errors of that."""
        try:
            yield
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
