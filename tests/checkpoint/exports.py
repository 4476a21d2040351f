"""Resume points of real models, as ranks save them, for the tests of what is made of points' weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.planning.state.state_layout import layout_of
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.trainer.state.train_state import TrainState
from tests.trainer.saved_states import commit_state
from tests.trainer.states import begun_state

CPU = torch.device("cpu")
VOCABULARY = 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", **SMALL}
FACTORY = {"factory": "tests.system.tiny_model:build", "factory_args": {"vocab_size": 40, "hidden_size": 8}}


def job(model: Mapping[str, Any], **train: Any) -> JobConfig:
    """A job that trains this model."""
    return parse_config(
        {
            "run": {"name": "run"},
            "data": {"sources": [{"name": "s", "path": "none", "format": "lines"}], "tokenizer": "none"},
            "pack": {"seq_len": 8},
            "model": dict(model),
            "train": {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 8, "lr": 0.01, **train},
        }
    )


def state_of(config: JobConfig, steps: int = 1) -> TrainState:
    """A state that has trained: its weights are no longer the first."""
    state = begun_state(config.model, config.train, CPU, invariant=True)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        state.apply(0.05, num_units=1)
    return state


def commit(
    store: RunStore,
    config: JobConfig,
    state: TrainState,
    step: int = 1,
    world_size: int = 2,
    attempt: int = 1,
) -> Point:
    """The state as a committed point."""
    key = StateKey(attempt=attempt, generation=1, step=step)
    layout, shares = layout_of(world_size, 1), [state.items()] * world_size
    return commit_state(
        store,
        key,
        layout,
        shares,
        optimizer_steps=state.optimizer_steps,
        config=config.flat(),
        rng={"rule": "none"},
    )


def store_at(folder: Path) -> RunStore:
    """A run's storage."""
    return RunStore(Storage(str(folder)))


def logits(model: torch.nn.Module) -> torch.Tensor:
    """What the model says to some tokens."""
    with torch.no_grad():
        out = model.eval()(torch.arange(24).reshape(3, 8) % VOCABULARY)
    return out if isinstance(out, torch.Tensor) else out.logits
