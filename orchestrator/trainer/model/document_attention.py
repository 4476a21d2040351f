"""Builds the model inputs that restrict attention to each token's own document.

The inputs of a sample depend on that sample alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.trainer.model.text_config import text_config

CODE = "model.document_attention"
_BY_ITSELF = "document_ids"
_BY_MASK = ("attention_mask", "position_ids")
_WINDOWED = {"sliding_attention", "chunked_attention"}
_MASKED = {"full_attention"} | _WINDOWED


def require_document_attention(model: nn.Module) -> None:
    """Raises `ConfigError` if the model cannot attend within documents.

    That is so if it cannot be called with document borders, or has layers without such a mask.
    `dry_run.attention_dry_run` checks what the accepted models compute.
    """
    if takes_document_ids(model):
        return
    taken = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    missing = [name for name in _BY_MASK if name not in taken]
    if missing or not hasattr(config, "_attn_implementation"):
        raise not_by_document(
            f"{type(model).__name__} is called with {', '.join(taken) or 'nothing'}, and takes neither "
            f"{_BY_ITSELF} (samples, seq_len) nor, as a transformers model, {' and '.join(_BY_MASK)}"
        )
    if config._attn_implementation not in ("eager", "sdpa"):
        raise not_by_document(
            f"its attention is {config._attn_implementation}; only eager and sdpa take a mask"
        )
    other = sorted(set(getattr(text_config(model), "layer_types", None) or ()) - _MASKED)
    if other:
        raise not_by_document(f"{type(model).__name__} has layers of another attention: {', '.join(other)}")


def has_windows(model: nn.Module, seq_len: int) -> bool:
    """Whether layers attend to a window or a chunk of a sample of `seq_len` tokens.

    Reads the configuration of a transformers model.
    """
    config = text_config(model)
    types = getattr(config, "layer_types", None)
    if types:
        return bool(set(types) & _WINDOWED)
    if not getattr(config, "use_sliding_window", True):
        return False
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return any(isinstance(size, int) and size < seq_len for size in sizes)


def takes_document_ids(model: nn.Module) -> bool:
    """Whether the model takes document ids and masks by itself."""
    return _BY_ITSELF in inspect.signature(model.forward).parameters


def input_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that `document_inputs` returns."""
    return (_BY_ITSELF,) if takes_document_ids(model) else _BY_MASK


def document_inputs(model: nn.Module, document_ids: Tensor) -> dict[str, Tensor]:
    """Returns the model's inputs besides the input ids, for `document_ids` (samples, seq_len).

    A model whose `forward` takes `document_ids` gets these. Any other model gets position ids that restart
    with each document, and a mask (samples, 1, seq_len, seq_len) that is added to the scores. A model with
    windows or chunks gets no mask: transformers would use it as the mask of every layer. Without one,
    transformers builds the mask of each kind of layer from the restarts of the positions.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if takes_document_ids(inner):
        return {_BY_ITSELF: document_ids}
    positions = {"position_ids": document_positions(document_ids)}
    if has_windows(inner, document_ids.shape[1]):
        return positions
    return {"attention_mask": document_mask(document_ids, next(inner.parameters()).dtype), **positions}


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the additive attention mask, (samples, 1, seq_len, seq_len).

    It is 0 where a position attends to another (itself, or an earlier one of its document), else the dtype's
    minimum. Padding (-1) is treated as a document, because softmax needs at least one position.
    """
    seq_len = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    earlier = torch.ones(seq_len, seq_len, dtype=torch.bool, device=document_ids.device).tril()
    mask = torch.zeros(same.shape, dtype=dtype, device=document_ids.device)
    return mask.masked_fill_(~(same & earlier), torch.finfo(dtype).min)[:, None]


def document_positions(document_ids: Tensor) -> Tensor:
    """Returns the position of each token in its document's part of the sample, (samples, seq_len) int64."""
    at = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return at - torch.where(begins, at, 0).cummax(dim=1).values


def not_by_document(reason: str) -> ConfigError:
    """Builds the error for a model that cannot attend within documents."""
    return ConfigError(
        f"pack.document_attention=true, but the model cannot attend within documents: {reason}; set "
        "pack.document_attention=false, or use another model",
        code=CODE,
    )
