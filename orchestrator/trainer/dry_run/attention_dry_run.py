"""Checks which tokens a model attends to, on a small copy of the model with weights.

No logits may depend on later tokens. Packed documents must have the logits of each document alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.trainer.model.build_model import train_padding_rows
from orchestrator.trainer.model.document_attention import document_inputs, not_by_document
from orchestrator.trainer.model.router_loss import call_model
from orchestrator.trainer.model.text_config import text_config

NOT_CAUSAL, PADDING = "model.not_causal", "model.padding_id"
LENGTH = 24  # tokens; longer than the windows and chunks of `small_copy`
_STRIDE = 5  # tokens between the tested borders; the logits before and after each border are compared
_TOLERANCE = 1e-3  # relative to the largest expected change


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A model and samples for it: `ids` produce `logits`; `others` are different ids."""

    model: nn.Module
    name: str
    ids: Tensor
    others: Tensor
    logits: Tensor


def require_attention(models: Iterable[nn.Module], name: str, seq_len: int, by_document: bool) -> bool:
    """Checks the first of `models` that accepts a sample of `seq_len` tokens (at most `LENGTH`).

    Returns whether any model does. Raises `ConfigError` if the logits at a position depend on later tokens,
    or if a real token with the model's padding id gets no gradient. With `by_document` it also raises
    `ConfigError` if the logits of a packed document differ from those of the document alone. `name`
    identifies the model in messages.
    """
    trial = next(filter(None, (_tried(model, name, min(seq_len, LENGTH)) for model in models)), None)
    if trial is None:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _require_causal(trial)
        if by_document:
            _require_documents(trial)
    _require_gradient(trial)
    return True


def _tried(model: nn.Module, name: str, length: int) -> _Trial | None:
    """Returns None if the model cannot be called or its logits are not finite."""
    padding = _padding_id(model)
    for num_ids in (32, 5):  # some models have a small vocabulary
        usual = torch.tensor([number for number in range(2, num_ids) if number != padding])
        chosen = torch.randint(len(usual), (2, length), generator=torch.Generator().manual_seed(1))
        ids, others = usual[chosen], usual[(chosen + 1) % len(usual)]
        with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):  # user code
            logits = _logits(model.eval(), ids)
            _logits(model, ids[:, :1])
            if logits.isfinite().all():
                return _Trial(model=model, name=name, ids=ids, others=others, logits=logits)
    return None


def _padding_id(model: nn.Module) -> int | None:
    found = getattr(text_config(model), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else None


def _require_causal(trial: _Trial) -> None:
    for border in range(1, trial.ids.shape[1], _STRIDE):
        changed = torch.cat((trial.ids[:, :border], trial.others[:, border:]), 1)
        difference = (_logits(trial.model, changed) - trial.logits).abs()
        before, after = float(difference[:, :border].max()), float(difference[:, border:].max())
        if before > _TOLERANCE * max(after, 1e-3):
            raise ConfigError(
                f"{trial.name}: the logits at a position depend on later tokens, which are what training "
                "predicts; use a causal model (some types are causal with is_decoder: true)",
                code=NOT_CAUSAL,
            )


def _require_documents(trial: _Trial) -> None:
    model, ids = trial.model, trial.ids
    first = max(1, ids.shape[1] * 2 // 5)
    spans = slice(0, first), slice(first, first + 1), slice(first + 1, ids.shape[1] * 5 // 6)
    documents = torch.full_like(ids, -1)  # the rest is padding
    for number, at in enumerate(spans):
        documents[:, at] = number
    packed = _logits(model, ids, **document_inputs(model, documents))
    for at in spans:
        if not ids[:, at].numel():
            continue
        alone = _logits(model, ids[:, at])
        difference = float((packed[:, at] - alone).abs().max())
        if not difference <= _TOLERANCE * max(float(alone.abs().max()), 1e-3):
            raise not_by_document(
                f"{trial.name}: the logits of a packed document differ by {difference:.2g} from those of the "
                "document alone"
            )


def _require_gradient(trial: _Trial) -> None:
    """Raises `ConfigError` if a token with the padding id, or a later one, gets no gradient.

    The gradient is that of the input embedding.
    """
    model, padding, middle = trial.model, _padding_id(trial.model), trial.ids.shape[1] // 2
    try:
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return
    if padding is None or not isinstance(table, nn.Embedding) or padding >= table.num_embeddings:
        return
    train_padding_rows(model)
    rows: list[Tensor] = []
    handle = table.register_forward_hook(lambda module, args, row: rows.append(row))
    changed = trial.ids.clone()
    changed[:, middle] = padding
    try:
        with torch.random.fork_rng(devices=[]):
            logits = _logits(model, changed)
    finally:
        handle.remove()
    rows = [row for row in rows if row.shape[:2] == changed.shape and row.requires_grad]
    gradients = torch.autograd.grad(logits[:, middle:].square().sum(), rows, allow_unused=True)
    if rows and not any(each is not None and each[:, middle:].any(-1).all() for each in gradients):
        raise ConfigError(
            f"{trial.name}: tokens with the id {padding} (pad_token_id) are padding for the model, but may "
            "be real tokens of the data; set pad_token_id to null or to an id that the data never has",
            code=PADDING,
        )


def _logits(model: nn.Module, ids: Tensor, **within: Tensor) -> Tensor:
    output: Any = call_model(model, ids, within, None)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float()
