"""Attention within documents: what a model is called with so that tokens see their own document alone.

It knows document ids and how models take masks; nothing of steps, data or ranks. What it gives for a sample
depends on that sample alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError

_BY_ITSELF = "document_ids"
_BY_MASK = ("attention_mask", "position_ids")


def require_document_attention(model: nn.Module, seq_len: int) -> None:
    """Raises `ConfigError` if the model cannot be told where documents begin, or would attend otherwise than
    it does without documents.
    """
    if takes_document_ids(model):
        return
    taken = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    missing = [name for name in _BY_MASK if name not in taken]
    if missing or not hasattr(config, "_attn_implementation"):
        raise _refused(
            f"{type(model).__name__} is called with {', '.join(taken) or 'nothing'}, and takes neither "
            f"{_BY_ITSELF} (samples, seq_len) nor, as a transformers model, {' and '.join(_BY_MASK)}"
        )
    if config._attn_implementation not in ("eager", "sdpa"):
        raise _refused(f"its attention is {config._attn_implementation}; only eager and sdpa take a mask")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) and isinstance(window, int) and window < seq_len:
        other.append(f"sliding_window={window}, less than pack.seq_len={seq_len}")
    if other:
        raise _refused(f"{type(model).__name__} has layers of another attention: {', '.join(other)}")


def takes_document_ids(model: nn.Module) -> bool:
    """Whether the model masks by itself."""
    return _BY_ITSELF in inspect.signature(model.forward).parameters


def input_names(model: nn.Module) -> tuple[str, ...]:
    """The arguments that `document_inputs` gives."""
    return (_BY_ITSELF,) if takes_document_ids(model) else _BY_MASK


def document_inputs(model: nn.Module, document_ids: Tensor) -> dict[str, Tensor]:
    """What the model is called with beside the input ids, for `document_ids` (samples, seq_len).

    A model whose `forward` has `document_ids` gets these; any other a mask (samples, 1, seq_len, seq_len),
    added to the scores, and position ids that begin anew with each document.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if takes_document_ids(inner):
        return {_BY_ITSELF: document_ids}
    dtype = next(inner.parameters()).dtype
    return {
        "attention_mask": document_mask(document_ids, dtype),
        "position_ids": document_positions(document_ids),
    }


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """(samples, 1, seq_len, seq_len): 0 where a position attends to another (itself, or an earlier one of its
    document), else the least number. Padding (-1) is a document like any other, for softmax needs something.
    """
    seq_len = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    earlier = torch.ones(seq_len, seq_len, dtype=torch.bool, device=document_ids.device).tril()
    mask = torch.zeros(same.shape, dtype=dtype, device=document_ids.device)
    return mask.masked_fill_(~(same & earlier), torch.finfo(dtype).min)[:, None]


def document_positions(document_ids: Tensor) -> Tensor:
    """(samples, seq_len) int64: the position of each token in its document's part of the sample."""
    at = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return at - torch.where(begins, at, 0).cummax(dim=1).values


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"pack.document_attention=true, but the model cannot attend within documents: {reason}; set "
        "pack.document_attention=false, or take another model"
    )
