"""The balancing loss of a router (mixture of experts), as the model itself computes it.

A transformers model returns it as `aux_loss` if its configuration has `output_router_logits: true`. The
model's own loss is the cross-entropy plus a coefficient times this value. The value is not a mean over
tokens: it depends on which samples pass through the model together. `train.micro_batch_size` is thus part of
its definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.trainer.model.text_config import settings_of

CODE = "model.router_loss"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # its names in transformers models
_MASK = "attention_mask"
# Other terms of a model's own loss in transformers. They are 0 unless the configuration sets them.
_OTHER_TERMS = ("z_loss_coefficient",)


def is_balanced(model: nn.Module) -> bool:
    """Whether the model's configuration requests a router's loss."""
    return any(getattr(each, "output_router_logits", False) for each in settings_of(model))


def call_model(
    model: nn.Module, input_ids: Tensor, within: Mapping[str, Tensor], is_padding: Tensor | None
) -> Any:
    """Calls `model(input_ids, **within)`. The router's loss ignores the positions of `is_padding`.

    transformers computes that loss from the attention mask, and accepts only a mask of the shape (samples,
    seq_len) for it. The model therefore gets the mask of real tokens, and its decoder gets the mask of
    `within`.
    """
    if not is_balanced(model) or (is_padding is None and _MASK not in within):
        return model(input_ids, **within)
    with _decoder_mask(model, within.get(_MASK)):
        of_tokens = None if is_padding is None else ~is_padding
        return model(input_ids, **{**within, _MASK: of_tokens})


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
                raise _refused(
                    f"{name}: {term}={getattr(config, term)} adds a term to the loss that is not supported; "
                    "set it to 0"
                )
    returned = isinstance(getattr(output, "aux_loss", None), Tensor)
    if is_balanced(model) and not returned:
        raise _refused(
            f"{name}: output_router_logits=true asks for a router's loss, but {type(model).__name__} returns "
            "none (aux_loss); set output_router_logits=false, or use a model that returns it"
        )
    if returned and _coefficient(model) is None:
        raise _refused(
            f"{name}: {type(model).__name__} returns aux_loss, but has no coefficient for it; give the model "
            f"the attribute {_COEFFICIENTS[0]}, or do not return aux_loss"
        )


def _coefficient(model: nn.Module) -> float | None:
    nested = settings_of(model)[1:]  # some models read it from there for their own loss
    values = [getattr(each, name, None) for each in (_inner(model), *nested) for name in _COEFFICIENTS]
    return next((float(value) for value in values if isinstance(value, int | float)), None)


@contextmanager
def _decoder_mask(model: nn.Module, mask: Tensor | None) -> Iterator[None]:
    """Within the block, the decoder inside the model is called with `mask`."""

    def replace(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        return args, {**kwargs, _MASK: mask}

    inner: Any = _inner(model)
    handle = inner.base_model.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _refused(text: str) -> ConfigError:
    return ConfigError(text, code=CODE)
