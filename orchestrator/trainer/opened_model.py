"""A model of transformers with the weights of a folder, or of a prefix of a bucket.

It knows files of weights and transformers; which weights a job begins with, its callers know.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.storage.open import open_storage
from orchestrator.trainer.reshard import tensor_as_bytes
from orchestrator.trainer.weight_files import StoredTensor, stored_tensors

if TYPE_CHECKING:
    from orchestrator.config.train_sections import ModelConfig


def open_model(
    config: ModelConfig, where: str, settings: Any, attention: str | None, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    """The model that transformers makes of `settings` and of the weights at `where`, which is the config's
    `init_from`, else its `pretrained`, as `dtype`; and what transformers says of tensors that were missing,
    unexpected or mismatched, by its own words for them.

    From a bucket the rows are read straight into the model where its tensors are, each by itself, those of
    the files (see `fill_rows`); else all tensors of the files take memory of their own while transformers
    makes the model's of them. Raises what transformers raises, `ConfigError`, `StorageError`.
    """
    from transformers import AutoModelForCausalLM

    from orchestrator.trainer.first_rows import fill_rows
    from orchestrator.trainer.state import MODEL, own_tensors, whole_item

    how: dict[str, Any] = {"config": settings, "dtype": dtype, "attn_implementation": attention}
    storage = open_storage(where)
    if storage.folder is not None:
        opened: Any = AutoModelForCausalLM.from_pretrained(
            storage.folder,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **how,
        )
        return opened[0], opened[1]
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        settings, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    own = own_tensors(dict(model.state_dict(keep_vars=True)))
    with torch.no_grad():
        items = [whole_item(MODEL, name, tensor.detach(), sharded=False) for name, tensor in own]
        if fill_rows(config, model, items):
            return model, {}
    tensors = {name: read_whole(each) for name, each in stored_tensors(where).items()}
    made: Any = type(model).from_pretrained(None, state_dict=tensors, output_loading_info=True, **how)
    return made[0], made[1]


def read_whole(stored: StoredTensor) -> Tensor:
    """A tensor of a file, in memory of its own. Raises `ConfigError` for numbers of a type that is not known
    here, and if the file ends before it does, `StorageError`.
    """
    name = f"{stored.storage.root}/{stored.path}"
    if not stored.dtype:
        raise ConfigError(f"{name} has numbers of a type that is not known here; give other weights")
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    wanted = math.prod(stored.shape) * tensor.itemsize
    if (
        wanted
        and stored.storage.read_into(stored.path, stored.start, tensor_as_bytes(tensor).numpy().data) < wanted
    ):
        raise ConfigError(f"{name} ends before its tensors do; restore the file")
    return tensor
