"""The whole weights of a model with adapters (`model.lora`), with the adapters merged into them by peft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from orchestrator.checkpoint.files.manifest import MODEL
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.points import SavedTensor
from orchestrator.trainer.loading.state_tensors import dtype_name, own_tensors, require_fixed, tensor_bytes
from orchestrator.trainer.model.build_model import first_model
from orchestrator.trainer.state.adapter_base import AdapterBase
from orchestrator.trainer.state.train_state import whole_items
from orchestrator.trainer.weights.lora import merged_state

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig


def merged_tensors(
    config: ModelConfig,
    precision: str,
    seed: int,
    trained: Iterable[tuple[SavedTensor, bytearray]],
    point: str,
    fixed: Mapping[str, str],
) -> Iterator[tuple[SavedTensor, memoryview]]:
    """Yields each tensor of the model without adapters, and its bytes.

    `trained` are the tensors of a point, of the model or their averages. Reads the weights that the adapters
    belong to, and holds the model in memory. Raises `ConfigError` and `StorageError`, as a start of the run,
    and `ResumePointError` if the weights are not those that `point` was trained with, by its digests `fixed`.
    """
    model = first_model(config, precision, seed, torch.device("cpu"), invariant=False)
    base = AdapterBase(config, precision, seed, model)
    base.hold(base.split(whole_items(model))[1], Layout(num_shards=1, num_replicas=1), 0, are_filled=True)
    require_fixed(point, fixed, base.digests())
    held = dict(model.state_dict(keep_vars=True))
    with torch.no_grad():
        for entry, data in trained:
            saved = torch.frombuffer(data, dtype=getattr(torch, entry.dtype))
            held[entry.name].copy_(saved.view(entry.shape))
        merged = dict(own_tensors(merged_state(model)))
    for name, tensor in sorted(merged.items()):
        form = SavedTensor(
            group=MODEL, name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), sharded=False
        )
        yield form, tensor_bytes(tensor)
