"""The configuration of the language model inside a transformers model.

A model that also reads images or sound nests it (`text_config`). Windows, ids and sizes of the language model
are then there, and not in the model's own configuration.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model inside `model`, under DDP too; None if the model has none."""
    return text_settings(getattr(_inner(model), "config", None))


def text_settings(settings: Any) -> Any:
    """The configuration of the language model inside a transformers configuration: often itself."""
    with suppress(Exception):  # a factory's model may have a configuration of another kind
        return settings.get_text_config(decoder=True)
    return settings


def inner_settings(settings: Any) -> dict[str, Any]:
    """The configurations directly inside a transformers configuration, by the key of each."""
    names = getattr(settings, "sub_configs", {})
    return {name: inner for name in names if (inner := getattr(settings, name, None)) is not None}


def settings_of(model: nn.Module) -> list[Any]:
    """The model's own configuration and, where that is another, the one of its language model. Empty if the
    model has none.
    """
    own = getattr(_inner(model), "config", None)
    if own is None:
        return []
    nested = text_settings(own)
    return [own] if nested is own else [own, nested]


def without_cache(model: nn.Module) -> None:
    """Makes a transformers model compute no cache of keys and values, for which training has no use."""
    for settings in settings_of(model):
        settings.use_cache = False


def _inner(model: nn.Module) -> nn.Module:
    from torch import nn

    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
