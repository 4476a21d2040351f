"""A job's transformers model: configuration, attention, the model without weights, and its settings.

A model that also reads images or sound nests the configuration of its language model (`text_config`). The
language model's windows, ids and sizes are then in the nested configuration.

transformers stores any key as an attribute. With a misspelt width, it would silently train a model of the
default width: `require_known_keys` refuses that.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from orchestrator.config.problems import near
from orchestrator.config.text import Path as FieldPath
from orchestrator.config.text import Problem, dotted
from orchestrator.errors import ConfigError, OrchestratorError, StorageError
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.open import open_storage, small_files
from orchestrator.trainer.weights.lora import require_not_quantized
from orchestrator.trainer.weights.ties import follow_files, follow_names
from orchestrator.trainer.weights.weight_files import ADAPTERS_ALONE, require_weights_of_a_model

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig

FLEX = "flex_attention"
SETTINGS, GENERATION = "config.json", "generation_config.json"
_READ_ONLY = re.compile(r"property '(\w+)' of '\w+' object has no setter")


def transformers_settings(config: ModelConfig, device_type: str, invariant: bool) -> tuple[Any, str | None]:
    """Returns a job's transformers configuration and attention implementation.

    The configuration is from `model.config` or `model.pretrained`. None: transformers chooses the
    implementation. It is never flex attention, which `model_call.attend_within_documents` switches on. Raises
    `ConfigError` if there is no configuration.
    """
    settings, model = _settings(config)
    if (chosen := _chosen_attention(config, settings)) is not None:
        if config.attn_implementation == "auto" and chosen == "sdpa" and invariant and device_type == "cuda":
            raise ConfigError(
                "attn_implementation=sdpa in the model's configuration has no invariant numerics on a GPU; "
                "use eager, or set train.numerics=fast",
                code="model.attn_implementation",
            )
        return settings, chosen
    # The fused attention of a GPU sums its gradients in any order. On a CPU it gives the same bits each time,
    # and needs less memory.
    if invariant and device_type == "cuda":
        return settings, "eager"
    classes = model if isinstance(model, tuple) else (model,)
    return settings, "sdpa" if all(getattr(each, "_supports_sdpa", False) for each in classes) else None


def _settings(config: ModelConfig) -> tuple[Any, Any]:
    """Returns a job's transformers configuration, and its class of causal language models."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with naming_model(config):
        if config.pretrained is not None:
            require_weights_of_a_model(f"model.pretrained={config.pretrained}", config.pretrained)
            settings = AutoConfig.from_pretrained(
                settings_folder(config.pretrained), local_files_only=True, trust_remote_code=False
            )
        else:
            shape = dict(config.config or {})
            kind = shape.pop("model_type")
            if kind not in CONFIG_MAPPING:  # transformers would list all 600 of them
                close = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=3)
                meant = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ConfigError(
                    f"transformers knows no model_type {kind!r}{meant}", code="model.unknown_type"
                )
            settings = AutoConfig.for_model(kind, **shape)
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)
        if model is None:
            raise ConfigError(
                f"transformers has no causal language model of type {settings.model_type}",
                code="model.not_language_model",
            )
        require_not_quantized(config, settings)
    return settings, model


def wants_flex(config: ModelConfig) -> bool:
    """Whether flex attention is configured, or no other is (`model.attn_implementation`, `config.json`)."""
    if config.factory is not None or config.attn_implementation not in ("auto", FLEX):
        return False
    return config.attn_implementation == FLEX or _settings(config)[0]._attn_implementation is None


def _chosen_attention(config: ModelConfig, settings: Any) -> str | None:
    """Returns the configured attention implementation.

    It is set by `model.attn_implementation` or in the transformers configuration. None if neither sets it.
    Raises `ConfigError` if they contradict each other.
    """
    field, of_settings = config.attn_implementation, settings._attn_implementation
    if field == FLEX and (of_settings is None or config.pretrained is not None):
        return None
    if of_settings is None or (field != "auto" and config.pretrained is not None):
        return None if field == "auto" else field
    if of_settings not in ("eager", "sdpa") or field not in ("auto", of_settings):
        raise ConfigError(
            f"attn_implementation={of_settings} in the model's configuration and "
            f"model.attn_implementation={field}: supported are eager and sdpa, and both must be the same; "
            "set model.attn_implementation, and leave the key out of model.config",
            code="model.attn_implementation",
        )
    return str(of_settings)


def settings_folder(pretrained: str) -> str:
    """Returns a folder with the settings of `model.pretrained`, which transformers can read.

    It is `model.pretrained` itself, or for a bucket a local folder with only the settings. Raises
    `FileNotFoundError` if it has none, `ConfigError`, `StorageError`.
    """
    if not is_uri(pretrained):
        if not Path(pretrained).is_dir():
            raise ConfigError(
                f"there is no folder {Path(pretrained).absolute()} on this machine", code="weights.no_folder"
            )
        return pretrained
    folder = small_files(pretrained, (SETTINGS, GENERATION).__contains__)
    if not (folder / SETTINGS).is_file():
        raise FileNotFoundError(f"there is no {SETTINGS} in it")
    return str(folder)


@contextmanager
def without_bars() -> Iterator[None]:
    """Within the block, transformers draws no progress bars ("Loading weights") in this process.

    Its hook for them is afterwards the one from before. Whether bars are shown elsewhere stays as the user
    has set it. Versions of transformers without the hook draw them.
    """
    from transformers.utils import logging

    set_hook = getattr(logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return
    before = set_hook(lambda make, args, kwargs: make(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        set_hook(before)


@contextmanager
def naming_model(config: ModelConfig) -> Iterator[None]:
    """Converts errors inside the block to a `ConfigError` that names the field. `StorageError` propagates."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # transformers has no common base class for errors of a wrong configuration
        if isinstance(error, ConfigError) and error.code == ADAPTERS_ALONE:
            raise  # it names the field, and there is nothing to correct
        what = (
            f"model.pretrained={config.pretrained}"
            if config.pretrained is not None
            else f"model.config={config.config}"
        )
        known = error.code if isinstance(error, OrchestratorError) else None
        raise ConfigError(
            f"{what} cannot be built as a causal language model: {_plain(error)}; correct it",
            code=known or "model.not_built",
        ) from error


def _plain(error: BaseException) -> str:
    """Returns the reason on one line, without the wrapper that a validator of configurations adds."""
    while error.__cause__ is not None and type(error).__module__.startswith("huggingface_hub"):
        error = error.__cause__
    if isinstance(error, AttributeError) and (match := _READ_ONLY.match(str(error))):
        return f"transformers computes {match[1]} of this type from other keys; leave {match[1]} out"
    return " ".join(str(error).split()).rstrip(".") if not isinstance(error, KeyError) else repr(error)


def shape_only(
    config: ModelConfig, settings: Any, attention: str | None, names: Collection[str] | None = None
) -> nn.Module:
    """Builds a transformers model without its weights, for torch's meta device.

    It is tied like a state with tensors of these names; without names, like the weight files that it starts
    from. Raises `ConfigError`, also if `model.pretrained` has no safetensors.
    """
    from transformers import AutoModelForCausalLM

    with naming_model(config):
        reads = config.pretrained is not None and config.init_from is None
        if reads and not _holds_safetensors(str(config.pretrained)):
            raise ConfigError("the folder holds no *.safetensors", code="weights.no_files")
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings, attn_implementation=attention
        )
    if names is None:
        follow_files(config, model)
    else:
        follow_names(model, names)
    return model


def _holds_safetensors(pretrained: str) -> bool:
    if is_uri(pretrained):
        return any(name.endswith(".safetensors") for name in open_storage(pretrained).list(""))
    return any(Path(pretrained).glob("*.safetensors"))


# ---------------------------------------------------------------------------------------- settings of a model
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


def _problems(settings: Any, shape: Mapping[str, Any], path: FieldPath) -> Iterator[Problem]:
    inner = inner_settings(settings)
    unknown = _unknown(settings, shape, inner)
    names = {*settings.to_dict(), *settings.attribute_map}.difference(unknown)
    for key in unknown:
        meant: list[FieldPath] = [(name, key) for name, each in inner.items() if key in vars(each)]
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


def _other_dtypes(settings: Any, shape: Mapping[str, Any], path: FieldPath, dtype: str) -> Iterator[Problem]:
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
