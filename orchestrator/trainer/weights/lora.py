"""Low-rank adapters in a model (LoRA, Hu et al. 2021, arXiv:2106.09685), as peft makes and runs them.

peft puts adapters into the model in place. The model keeps its class and its calls, its base is frozen, and
the state to be saved is what is trained: the adapters, and copies of whole modules (`modules_to_save`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.config.problems import near
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.config.sections import LoraConfig, ModelConfig

ADAPTER = "default"  # the name of the adapter, which is part of its tensors' names; peft's own choice
_ALL_LINEAR = "all-linear"
_NAMED = 5


def add_adapters(model: nn.Module, lora: LoraConfig, seed: int) -> None:
    """Puts the adapters of `model.lora` into `model`, and freezes everything else.

    The first values are drawn on the CPU by peft, from `seed` alone, and have the type of the module that is
    adapted. Modules of `modules_to_save` begin as copies. A model on the meta device gets adapters without
    values. Raises `ConfigError` if peft is not installed, if a setting matches no module, and for modules
    that cannot be adapted: tied to others, with buffers in the state (`modules_to_save`), or of a kind other
    than linear layers and embeddings.
    """
    peft = _peft()
    held = dict(model.state_dict(keep_vars=True))
    _require_matches(lora, {path: module for path, module in model.named_modules() if path})
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ties and biases, which are decided here
            peft.inject_adapter_in_model(peft_settings(lora), model, adapter_name=ADAPTER)
    except Exception as error:  # peft has no common base class for errors of a wrong configuration
        raise _refused(f"peft refuses it: {' '.join(str(error).split()).rstrip('.')}; correct it") from error
    adapted, copied = _adapted(model), _copied(model)
    _require_plain_layers(adapted)
    _require_untied({*adapted, *copied}, held)
    for path, module in copied.items():
        if buffers := [name for name in module.state_dict() if name not in dict(module.named_parameters())]:
            raise _refused(
                f"modules_to_save has {path}, whose buffer {buffers[0]} would have to be saved; leave the "
                "module out"
            )
    model.train()


def peft_settings(lora: LoraConfig, base: str | None = None) -> Any:
    """Returns peft's configuration of `lora`; `base` is stored as `base_model_name_or_path`."""
    targets = lora.target_modules
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )


def require_not_quantized(config: ModelConfig, settings: Any) -> None:
    """Raises `ConfigError` if the weights that the adapters are trained beside are quantized."""
    quantized = getattr(settings, "quantization_config", None)
    if config.lora is None or quantized is None:
        return
    values = quantized if isinstance(quantized, Mapping) else vars(quantized)
    raise ConfigError(
        f"model.lora is set, and the weights of {config.base} are quantized ({values.get('quant_method')}); "
        "adapters of quantized weights (QLoRA) are not supported: give weights in float32, bfloat16 or "
        "float16",
        code="lora.quantized_base",
    )


def base_names(model: nn.Module) -> dict[str, str]:
    """Maps tensors of the state of `model` to their names in the same model without adapters.

    Adapters are left out. A copy (`modules_to_save`) has the name of its original.
    """
    prefixes: dict[str, str] = {}
    dropped: list[str] = []
    for path in _adapted(model):
        prefixes[f"{path}.base_layer."] = f"{path}."
        dropped.append(f"{path}.lora_")
    for path in _copied(model):
        prefixes[f"{path}.original_module."] = f"{path}."
        prefixes[f"{path}.modules_to_save.{ADAPTER}."] = f"{path}."
    found = {}
    for name in model.state_dict(keep_vars=True):
        if not name.startswith(tuple(dropped)):
            prefix = next((each for each in prefixes if name.startswith(each)), "")
            found[name] = prefixes.get(prefix, "") + name.removeprefix(prefix)
    return found


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state that the model has without its adapters, with its frozen tensors, by their names
    there. Of a model without adapters it is the state itself.
    """
    held: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    copies = tuple(f"{path}.modules_to_save." for path in _copied(model))
    names = base_names(model)
    return {names[name]: held[name] for name in names if not name.startswith(copies)}


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Merges the adapters into the weights, in place, and returns the state of the model without them.

    Raises `ConfigError` if a merged weight is not finite.
    """
    held: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    for path, module in _adapted(model).items():
        layer: Any = module
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            text = f"the adapters of {path} cannot be merged: {error}; take an earlier point"
            raise ConfigError(text, code="lora.merge") from error
    names = base_names(model)
    copies = tuple(f"{path}.modules_to_save." for path in _copied(model))
    found = {names[name]: held[name] for name in names}
    return found | {names[name]: held[name] for name in names if name.startswith(copies)}


def without_adapters(config: ModelConfig) -> ModelConfig:
    """Returns the configuration of the model that the adapters are put into."""
    return config.model_copy(update={"lora": None})


# ---------------------------------------------------------------------------------------------------- inside
def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora needs peft, which cannot be imported here ({error}); run `pip install -e '.[lora]'` "
            "in the checkout on every node, or set model.lora=null",
            code="lora.not_installed",
        ) from error
    return peft


def _refused(text: str) -> ConfigError:
    return ConfigError(f"model.lora: {text}", code="lora.refused")


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have an adapter, by path."""
    from peft.tuners.lora import LoraLayer

    kinds: type[Any] = LoraLayer
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def _copied(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the trained copies of modules, by the paths of the originals."""
    from peft.utils import ModulesToSaveWrapper

    wrappers = (item for item in model.named_modules() if isinstance(item[1], ModulesToSaveWrapper))
    return {path: wrapper.modules_to_save[ADAPTER] for path, wrapper in wrappers}


def _require_matches(lora: LoraConfig, modules: Mapping[str, nn.Module]) -> None:
    """Raises `ConfigError` for a name or an expression that no module of the model matches.

    `modules`: all of the model, by path.
    """
    targets = lora.target_modules
    ends = _ends(modules)
    linear = _ends(path for path, module in modules.items() if _is_linear(module)) or ends
    names = [] if targets is None or isinstance(targets, str) else list(targets)
    lacking = [_unmatched("target_modules has", name, linear) for name in names if not _ending(name, modules)]
    if isinstance(targets, str) and targets.lower() != _ALL_LINEAR:
        try:
            found = any(re.fullmatch(targets, path) for path in modules)
        except re.error as error:
            raise _refused(
                f"target_modules={targets} is no regular expression ({error}); correct it"
            ) from error
        lacking += [] if found else [_unmatched("target_modules is", targets, [*linear, _ALL_LINEAR])]
    if lacking:
        raise _refused(
            f"{'; '.join(lacking)}; names of the model's linear layers end with {', '.join(linear)}"
        )
    lacking = [
        _unmatched("modules_to_save has", name, ends)
        for name in lora.modules_to_save
        if not _ending(name, modules)
    ]
    if lacking:
        raise _refused(f"{'; '.join(lacking)}; names of the model's modules end with {', '.join(ends)}")


def _ends(paths: Iterable[str]) -> list[str]:
    """Returns the distinct last parts of modules' paths, without the numbers of lists."""
    return sorted({end for path in paths if not (end := path.rpartition(".")[2]).isdigit()})


def _is_linear(module: nn.Module) -> bool:
    """Whether it multiplies with a matrix, as `nn.Linear` and transformers' `Conv1D` do."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _unmatched(what: str, name: str, names: list[str]) -> str:
    close = near(name.rpartition(".")[2], names)
    return f"{what} {name}, which matches no module{f' (did you mean {close[0]}?)' if close else ''}"


def _ending(name: str, paths: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _require_plain_layers(adapted: Mapping[str, nn.Module]) -> None:
    from peft.tuners.lora import Embedding, Linear

    if other := [path for path, module in adapted.items() if type(module) not in (Linear, Embedding)]:
        kind = type(adapted[other[0]]).__name__
        raise _refused(
            f"target_modules matches {_listed(other)}, which peft adapts as {kind}; only linear layers and "
            "embeddings are supported: name these"
        )


def _require_untied(paths: Iterable[str], held: Mapping[str, Tensor]) -> None:
    """Raises `ConfigError` if a changed module shares a tensor with another one.

    The other module would keep the old weight, and a merged model could not be tied.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in held.items():
        names.setdefault(id(tensor), []).append(name)
    for path in sorted(paths):
        for shared in _shared(path, names.values()):
            raise _refused(
                f"it matches {path}, whose weight is also {shared} (tied); adapt other modules"
            )


def _shared(path: str, names: Iterable[Sequence[str]]) -> Iterator[str]:
    for aliases in names:
        inside = [name for name in aliases if name.startswith(f"{path}.")]
        if inside:
            yield from (name for name in aliases if name not in inside)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
