"""The configuration of the language model inside a transformers model.

A model that also reads images or sound nests it (`text_config`). The language model's windows, ids and sizes
are then in the nested configuration.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def text_config(model: nn.Module) -> Any:
    """Returns the configuration of the language model inside `model`, also under DDP; None if it has none."""
    return text_settings(getattr(_inner(model), "config", None))


def text_settings(settings: Any) -> Any:
    """Returns the configuration of the language model inside a transformers configuration, often itself."""
    with suppress(Exception):  # a factory's model may have a configuration of another kind
        return settings.get_text_config(decoder=True)
    return settings


def inner_settings(settings: Any) -> dict[str, Any]:
    """Returns the configurations directly inside a transformers configuration, by key."""
    names = getattr(settings, "sub_configs", {})
    return {name: inner for name in names if (inner := getattr(settings, name, None)) is not None}


def settings_of(model: nn.Module) -> list[Any]:
    """Returns the model's own configuration, and that of its language model if it is another.

    Empty if the model has none.
    """
    own = getattr(_inner(model), "config", None)
    if own is None:
        return []
    nested = text_settings(own)
    return [own] if nested is own else [own, nested]


def without_cache(model: nn.Module) -> None:
    """Disables the cache of keys and values of a transformers model, which training does not use."""
    for settings in settings_of(model):
        settings.use_cache = False


def _inner(model: nn.Module) -> nn.Module:
    from torch import nn

    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
