"""Calls a job's model: the inputs that restrict attention to each token's own document, and a router's loss.

The inputs of a sample depend on that sample alone.

A transformers model with a router (mixture of experts) returns its balancing loss as `aux_loss` if its
configuration has `output_router_logits: true`. The model's own loss is the cross-entropy plus a coefficient
times this value. The value is not a mean over tokens: it depends on which samples pass through the model
together. `train.micro_batch_size` is thus part of its definition.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.trainer.weights.transformers_model import FLEX, settings_of, text_config, wants_flex

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig

_DOCUMENT_ATTENTION = "model.document_attention"
_BY_ITSELF = "document_ids"
_BY_MASK = ("attention_mask", "position_ids")
_WINDOWED = {"sliding_attention", "chunked_attention"}
_MASKED = {"full_attention"} | _WINDOWED
_MASK = "attention_mask"
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


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
    if config._attn_implementation not in ("eager", "sdpa", FLEX):
        raise not_by_document(
            f"its attention is {config._attn_implementation}; only eager, sdpa and {FLEX} take a mask"
        )
    other = sorted(set(getattr(text_config(model), "layer_types", None) or ()) - _MASKED)
    if other:
        raise not_by_document(f"{type(model).__name__} has layers of another attention: {', '.join(other)}")


def attend_within_documents(
    model: nn.Module, config: ModelConfig, device: torch.device, invariant: bool
) -> None:
    """Prepares a model that is called with document borders.

    On GPUs, under fast numerics, a transformers model uses flex attention, which skips hidden blocks, if
    the configuration names no other one and `flex_problem` is None. Elsewhere it gets a mask of all pairs.
    Raises `ConfigError` if the model cannot attend within documents, or not with the configured attention.
    """
    if device.type == "cuda" and not invariant and wants_flex(config):
        problem = flex_problem(model)
        if problem is None:
            made: Any = model
            made.set_attn_implementation(FLEX)
        elif config.attn_implementation == FLEX:
            raise ConfigError(
                f"model.attn_implementation={FLEX}, but {problem}; set it to auto",
                code="model.attn_implementation",
            )
    require_document_attention(model)


def flex_problem(model: nn.Module) -> str | None:
    """Why documents cannot be kept apart by flex attention; None if they can."""
    name = type(model).__name__
    if takes_document_ids(model):
        return f"{name} takes {_BY_ITSELF} and masks by itself"
    if not getattr(model, "_supports_flex_attn", False):
        return f"transformers has none for {name}"
    if any(each.rpartition(".")[2] == "sinks" for each, _ in model.named_parameters()):
        return f"{name} has attention sinks, which need another kernel"
    config = text_config(model)
    for dropout in _ATTENTION_DROPOUTS:
        if getattr(config, dropout, 0):
            return f"it has no dropout, and the model has {dropout}={getattr(config, dropout)}"
    return None


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


def document_inputs(model: nn.Module, document_ids: Tensor) -> dict[str, Any]:
    """Returns the model's inputs besides the input ids, for `document_ids` (samples, seq_len).

    A model whose `forward` takes `document_ids` gets these. Any other model gets position ids that restart
    with each document, and a mask (samples, 1, seq_len, seq_len): one that is added to the scores, or the
    blocks of flex attention. A model with windows or chunks gets no mask: transformers would use it as the
    mask of every layer. Without one, transformers builds the mask of each kind of layer from the restarts of
    the positions.
    """
    if takes_document_ids(model):
        return {_BY_ITSELF: document_ids}
    positions = {"position_ids": document_positions(document_ids)}
    if has_windows(model, document_ids.shape[1]):
        return positions
    config: Any = getattr(model, "config", None)
    if config._attn_implementation == FLEX:
        return {_MASK: block_mask(document_ids), **positions}
    return {_MASK: document_mask(document_ids, next(model.parameters()).dtype), **positions}


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


def block_mask(document_ids: Tensor) -> Any:
    """Returns what flex attention takes for `document_mask`: a mask of blocks of 128 x 128 positions."""

    def attends(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        return (query >= key) & (document_ids[sample, query] == document_ids[sample, key])

    samples, seq_len = document_ids.shape
    return _made_block_mask()(
        attends, samples, None, seq_len, seq_len, device=str(document_ids.device)
    )


@cache
def _made_block_mask() -> Callable[..., Any]:
    """Returns the function that makes a mask. It is compiled: else it would hold all pairs for a moment."""
    from torch.nn.attention.flex_attention import create_block_mask

    compiled: Callable[..., Any] = torch.compile(create_block_mask, dynamic=False)
    return compiled


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
        code=_DOCUMENT_ATTENTION,
    )


# -------------------------------------------------------------------------------------------- a router's loss
_ROUTER_LOSS = "model.router_loss"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # its names in transformers models
# Other terms of a model's own loss in transformers. They are 0 unless the configuration sets them.
_OTHER_TERMS = ("z_loss_coefficient",)


def is_balanced(model: nn.Module) -> bool:
    """Whether the model's configuration requests a router's loss."""
    return any(getattr(each, "output_router_logits", False) for each in settings_of(model))


def may_balance(model: nn.Module) -> bool:
    """Whether the model may return a router's loss that is part of the loss."""
    return is_balanced(model) or (not settings_of(model) and bool(_coefficient(model)))


def call_model(
    model: nn.Module, input_ids: Tensor, document_ids: Tensor | None, is_padding: Tensor | None
) -> Any:
    """Calls `model(input_ids)` with its `completed_inputs`."""
    with completed_inputs(model, document_ids, is_padding) as more:
        return model(input_ids, **more)


@contextmanager
def completed_inputs(
    model: nn.Module, document_ids: Tensor | None, is_padding: Tensor | None
) -> Iterator[dict[str, Any]]:
    """Yields the arguments of the model besides the input ids. They are valid within the block.

    With `document_ids` each token attends only to its own document (`document_inputs`). The router's loss
    ignores the positions of `is_padding`. transformers computes that loss from the attention mask, and
    accepts only a mask of the shape (samples, seq_len) for it. The model therefore gets the mask of real
    tokens, and its decoder gets that of the documents.
    """
    within: dict[str, Any] = {}
    if document_ids is not None:
        within.update(document_inputs(model, document_ids))
    if not is_balanced(model) or (is_padding is None and _MASK not in within):
        yield within
        return
    with _decoder_mask(model, within.get(_MASK)):
        yield {**within, _MASK: None if is_padding is None else ~is_padding}


def balancing_loss(model: nn.Module, output: Any) -> Tensor | None:
    """Returns the term that the model adds to its mean cross-entropy, or None if it adds nothing.

    It is the balancing loss of `output` times its coefficient.
    """
    found = getattr(output, "aux_loss", None)
    if not isinstance(found, Tensor):
        return None
    coefficient = _coefficient(model)
    assert coefficient is not None, "require_router_loss has refused such a model"
    return coefficient * found if coefficient else None


def require_router_loss(model: nn.Module, output: Any, name: str) -> None:
    """Raises `ConfigError` if training would leave out a part of the loss that the model is configured with.

    `output` is what the model called `name` returned.
    """
    for config in settings_of(model):
        for term in _OTHER_TERMS:
            if getattr(config, term, 0):
                raise _wrong_router(
                    f"{name}: {term}={getattr(config, term)} adds a term to the loss that is not supported; "
                    "set it to 0"
                )
    returned = isinstance(getattr(output, "aux_loss", None), Tensor)
    if is_balanced(model) and not returned:
        raise _wrong_router(
            f"{name}: output_router_logits=true asks for a router's loss, but {type(model).__name__} returns "
            "none (aux_loss); set output_router_logits=false, or use a model that returns it"
        )
    if returned and _coefficient(model) is None:
        raise _wrong_router(
            f"{name}: {type(model).__name__} returns aux_loss, but has no coefficient for it; give the model "
            f"the attribute {_COEFFICIENTS[0]}, or do not return aux_loss"
        )


def _coefficient(model: nn.Module) -> float | None:
    nested = settings_of(model)[1:]  # some models read it from there for their own loss
    values = [getattr(each, name, None) for each in (model, *nested) for name in _COEFFICIENTS]
    return next((float(value) for value in values if isinstance(value, int | float)), None)


@contextmanager
def _decoder_mask(model: nn.Module, mask: Any) -> Iterator[None]:
    """Within the block, the decoder inside the model is called with `mask`."""

    def replace(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        return args, {**kwargs, _MASK: mask}

    inner: Any = model
    handle = inner.base_model.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _wrong_router(text: str) -> ConfigError:
    return ConfigError(text, code=_ROUTER_LOSS)
