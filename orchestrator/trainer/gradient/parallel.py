"""Builds a job's state and gradient, according to its sharding and numerics."""

from __future__ import annotations

import torch

from orchestrator.trainer.gradient.gradient_ddp import FastGradient
from orchestrator.trainer.gradient.gradient_invariant import InvariantGradient
from orchestrator.trainer.gradient.gradient_sharded import ShardedGradient
from orchestrator.trainer.gradient.micro_batches import Gradient
from orchestrator.trainer.interfaces.job import TrainJob
from orchestrator.trainer.model.document_attention import require_document_attention
from orchestrator.trainer.state.sharded_state import ShardedState
from orchestrator.trainer.state.train_state import TrainState


def state_and_gradient(job: TrainJob, device: torch.device) -> tuple[TrainState, Gradient]:
    """Builds both for one member, before its first generation.

    Raises `ConfigError` if the model cannot be built, or cannot attend within documents although the job
    requires it.
    """
    seed, precision, by_document = job.train.seed, job.train.precision, job.document_attention
    if job.num_shards != 1:
        sharded = ShardedState(job.model, job.train, device, job.num_shards)
        _require_documents(sharded, job)
        return sharded, ShardedGradient(sharded, seed, precision, by_document)
    state = TrainState(job.model, job.train, device, job.invariant)
    _require_documents(state, job)
    if job.invariant:
        return state, InvariantGradient(state.model, seed, precision)
    return state, FastGradient(state.model, seed, precision, by_document)


def _require_documents(state: TrainState, job: TrainJob) -> None:
    if job.document_attention:
        require_document_attention(state.model)
