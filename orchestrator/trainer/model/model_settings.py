"""The settings of a transformers model: those of the language model inside it, and keys that no model reads.

A model that also reads images or sound nests the configuration of its language model (`text_config`). The
language model's windows, ids and sizes are then in the nested configuration.

transformers stores any key as an attribute. With a misspelt width, it would silently train a model of the
default width: `require_known_keys` refuses that.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from orchestrator.config.problems import near
from orchestrator.config.text import Path, Problem, dotted
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

def text_config(model: nn.Module) -> Any:
    """Returns the configuration of the language model inside `model`, also under DDP; None if it has none."""
    return text_settings(getattr(model, "config", None))


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
    own = getattr(model, "config", None)
    if own is None:
        return []
    nested = text_settings(own)
    return [own] if nested is own else [own, nested]


def without_cache(model: nn.Module) -> None:
    """Disables the cache of keys and values of a transformers model, which training does not use."""
    for settings in settings_of(model):
        settings.use_cache = False


# ----------------------------------------------------------------------------------- keys that no model reads
# Keys that any model reads or any published configuration contains, though not every class declares them.
_OF_ALL = frozenset(
    {"gradient_checkpointing", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
)
_READ_BY_ALL = frozenset({"initializer_range"})  # by the model of a configuration, not of a nested one
_DTYPES = ("dtype", "torch_dtype")
# Patterns by which the code of a configuration or a model reads a key that the class does not declare.
_READS = re.compile(r'\bconfig\.(\w+)|config, "(\w+)"|\bkwargs\.(?:get|pop)\("(\w+)"')


def require_known_keys(shape: Mapping[str, Any], settings: Any, dtype: str) -> None:
    """Raises `ConfigError` naming all keys of `model.config` that transformers does not know.

    `shape` is `model.config`, and `settings` is the transformers configuration made from it. A key is unknown
    if the class of `settings` neither declares nor translates it and its model does not read it. A `dtype`
    key that differs from the type of the weights, `dtype`, is also refused. Keys of nested configurations are
    checked, too.
    """
    lines = [
        f"  {dotted(problem.path)} {problem.text}"
        for problem in (
            *_problems(settings, shape, ("model", "config")),
            *_other_dtypes(settings, shape, ("model", "config"), dtype),
        )
    ]
    if lines:
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigError("\n".join([f"model.config: {count}", *lines]), code="model.config_keys")


def _problems(settings: Any, shape: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    inner = inner_settings(settings)
    unknown = _unknown(settings, shape, inner)
    names = {*settings.to_dict(), *settings.attribute_map}.difference(unknown)
    for key in unknown:
        meant: list[Path] = [(name, key) for name, each in inner.items() if key in vars(each)]
        meant = meant or [(name,) for name in near(key, sorted(n for n in names if n[0] != "_"))]
        close = " or ".join(dotted((*path, *each)) for each in meant)
        yield Problem(
            path=(*path, key),
            code="config.unknown_key",
            text=f"is not a known field of transformers' {settings.model_type}, no model would read it; "
            + (f"did you mean {close}?" if close else "leave it out"),
        )
    for name, each in inner.items():
        if isinstance(shape.get(name), Mapping):
            yield from _problems(each, shape[name], (*path, name))


def _other_dtypes(settings: Any, shape: Mapping[str, Any], path: Path, dtype: str) -> Iterator[Problem]:
    """`train.precision` decides the type of the weights. Another type here would have no effect."""
    for key in _DTYPES:
        if shape.get(key) is not None and str(shape[key]) != dtype:
            yield Problem(
                path=(*path, key),
                code="config.conflict",
                text=f"is {shape[key]}, but train.precision makes the weights {dtype}; leave {key} out, and "
                "set train.precision",
            )
    for name, each in inner_settings(settings).items():
        if isinstance(shape.get(name), Mapping):
            yield from _other_dtypes(each, shape[name], (*path, name), dtype)


def _unknown(settings: Any, shape: Mapping[str, Any], inner: Mapping[str, Any]) -> list[str]:
    """Returns the keys that the class has only stored as an attribute of the same name.

    Keys that it renames or translates are not among them.
    """
    kind = type(settings)
    aside = [k for k in shape if k in vars(settings) and not hasattr(kind, k) and k not in _OF_ALL]
    if aside:
        of_inner = {key for each in inner.values() for key in vars(each)}
        read = _read_by_code(kind) - of_inner
        aside = [key for key in aside if key not in read]
    if not aside:
        return []
    try:
        without = kind(**{key: value for key, value in shape.items() if key not in aside})
    except Exception:  # noqa: BLE001  if it cannot be built without these keys, it reads them
        return []
    return [key for key in aside if key not in vars(without) and key not in without.to_dict()]


def _read_by_code(kind: type) -> set[str]:
    """The keys that the modules of a configuration's class and of its models read."""
    found = set(_READ_BY_ALL)
    beside = kind.__module__.replace("configuration_", "modeling_")
    with suppress(ModuleNotFoundError):
        import_module(beside)
    for module in {kind.__module__, beside} & sys.modules.keys():
        for names in _READS.findall(inspect.getsource(sys.modules[module])):
            found.update(name for name in names if name)
    return found
