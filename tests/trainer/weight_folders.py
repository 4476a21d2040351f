"""Folders with the weights of small models, and what each shard must read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from orchestrator.config.sections import ModelConfig
from orchestrator.planning.state.state_layout import held_rows
from orchestrator.trainer.model.build_model import bare_model, build_model, emptied, first_model
from orchestrator.trainer.weights.initial import fill_rows, named_state
from orchestrator.trainer.weights.state_tensors import MODEL, Item, own_tensors, whole_item
from tests.checkpoint.exports import CPU, LLAMA, SMALL

TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


def items_of(model: torch.nn.Module, num_shards: int, shard: int) -> list[Item]:
    """The rows of a shard, with other values than any."""
    items = []
    for name, tensor in own_tensors(dict(model.state_dict(keep_vars=True))):
        whole = whole_item(MODEL, name, tensor, sharded=isinstance(tensor, torch.nn.Parameter)).whole
        rows = held_rows(whole, num_shards, shard)
        shape = (len(rows), *tensor.shape[1:]) if tensor.ndim else ()
        items.append(Item(whole=whole, tensor=torch.full(shape, 7.0).to(tensor.dtype), first_row=rows.start))
    return items


def assert_first_weights(config: ModelConfig, precision: str, streamed: bool = True) -> None:
    """Of all shards, as one process has them that loads all."""
    expected = dict(
        own_tensors(first_model(config, precision, 0, CPU, invariant=False).state_dict(keep_vars=True))
    )
    skeleton = emptied(bare_model(config, precision, 0, CPU), torch.device("meta"))
    for shard in range(3):
        items = items_of(skeleton, 3, shard)
        assert fill_rows(config, named_state(skeleton), items) == streamed
        assert [item.name for item in items] == list(expected)
        for item in items:
            wanted = expected[item.name].detach()
            if item.whole.shape:
                wanted = wanted[item.first_row : item.first_row + len(item.tensor)]
            if streamed:
                assert item.tensor.dtype == wanted.dtype
                assert torch.equal(item.tensor, wanted), item.name
            else:
                assert bool((item.tensor == 7).all()), "nothing is written"


def saved(folder: Path, shape: dict[str, Any], dtype: torch.dtype = torch.float32, **how: Any) -> str:
    model = build_model(ModelConfig(config=shape), "float32", 5, CPU, True)
    model.to(dtype).save_pretrained(folder, **how)
    return str(folder)


def renamed(path: Path) -> None:
    """As the hub has GPT-2: without the prefix of the model inside."""
    tensors = load_file(path)
    save_file({n.removeprefix("transformer."): t for n, t in tensors.items()}, path, {"format": "pt"})
