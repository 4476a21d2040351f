"""A job's model, and the random numbers that it and its loss use.

Every process gets the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from orchestrator.errors import ConfigError, ResourceError
from orchestrator.trainer.model.factory_output import require_state
from orchestrator.trainer.weights.initial import fill, open_model
from orchestrator.trainer.weights.lora import add_adapters, without_adapters
from orchestrator.trainer.weights.ties import follow_files, keep_in_float32, shared_buffers_kept
from orchestrator.trainer.weights.transformers_model import naming_model, transformers_settings, without_cache
from orchestrator.trainer.weights.weight_files import require_reachable
from orchestrator.user_function import find_function, not_callable

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig

_NAMED = 10
_FACTORY, _NOT_CALLABLE = "model.factory", "model.factory_not_callable"


def pick_device(device: str) -> torch.device:
    """Returns `cpu`, or for `cuda` the GPU of this process (LOCAL_RANK if torchrun set it).

    A numbered GPU (`cuda:1`) is used as it is. Raises `ConfigError` if a GPU is requested and there is none,
    and `ResourceError` as `own_gpu` does.
    """
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return wanted
    if not torch.cuda.is_available():
        raise ConfigError(
            "cluster.use_gpu=true, but torch sees no GPU in this process; "
            "set cluster.use_gpu=false, or install a CUDA build",
            code="machine.no_gpu",
        )
    if wanted.index is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        wanted = torch.device("cuda", own_gpu(local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(wanted)
    return wanted


def own_gpu(local_rank: int, num_gpus: int) -> int:
    """Returns the GPU of the rank `local_rank` on this machine, of the `num_gpus` that torch sees.

    No two ranks share a GPU. Raises `ResourceError` if there are too few.
    """
    if local_rank >= num_gpus:
        raise ResourceError(
            f"LOCAL_RANK={local_rank}, but torch sees {num_gpus} GPUs in this process, and no two ranks may "
            f"share one; start at most {num_gpus} ranks on this machine, let every rank see all its GPUs "
            "(CUDA_VISIBLE_DEVICES), or set cluster.use_gpu=false",
            code="machine.too_few_gpus",
        )
    return local_rank


def build_model(
    config: ModelConfig, precision: str, seed: int, device: torch.device, invariant: bool
) -> nn.Module:
    """Builds the model with its own initial weights, in training mode, on `device`.

    The weights of `model.init_from` are not read (see `first_model`). The result is a pure function of
    (`config`, `seed`) and of the weights' type, which is float32 for every `precision` except `pure_bf16`.

    Weights are drawn on the CPU, so that they are the same on every kind of device. A transformers model is
    called without a cache. With `model.lora` it has adapters, and all else is frozen.

    Raises `ConfigError` if the factory or the pretrained folder does not yield a model, if the folder lacks
    some of its tensors, if no resume point can hold the factory's model, or as `add_adapters`;
    and `StorageError` if the weights beside adapters cannot be reached.
    """
    return _moved(_on_cpu(config, precision, seed, device, invariant), device).train()


def _on_cpu(
    config: ModelConfig, precision: str, seed: int, device: torch.device, invariant: bool
) -> nn.Module:
    """Builds the model for `device`, and leaves it on the CPU."""
    require_reachable(config)
    torch.manual_seed(seed)
    model = _base_model(config, weights_dtype(precision), device, invariant)
    if config.lora is not None:
        add_adapters(model, config.lora, seed)
    return model


def _base_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, invariant: bool) -> nn.Module:
    """Builds the model without adapters, on the CPU, with weights drawn from torch's generator."""
    if config.factory is not None:
        model = _from_factory(config)
        cast_state(model, dtype)
        require_state(model, f"model.factory={config.factory}")
    else:
        settings, attention = transformers_settings(config, device.type, invariant)
        model = _from_transformers(config, settings, dtype, attention)
    train_padding_rows(model)
    return model


def bare_model(config: ModelConfig, precision: str, seed: int, device: torch.device) -> nn.Module:
    """`build_model` with drawn weights instead of those of `model.pretrained`, which are not read."""
    return _moved(bare_on_cpu(config, precision, seed, device, invariant=False), device).train()


def bare_on_cpu(
    config: ModelConfig, precision: str, seed: int, device: torch.device, invariant: bool
) -> nn.Module:
    """`bare_model` for `device`, left on the CPU."""
    if config.pretrained is not None:
        # the reader of `init_from` overwrites the drawn weights
        config = config.model_copy(update={"init_from": config.pretrained})
    return _on_cpu(config, precision, seed, device, invariant).train()


def first_model(
    config: ModelConfig, precision: str, seed: int, device: torch.device, invariant: bool
) -> nn.Module:
    """`build_model` with the weights of `model.init_from`, if that is set.

    Raises `ConfigError` naming every tensor that does not fit.
    """
    if config.init_from is None:
        return build_model(config, precision, seed, device, invariant)
    require_reachable(config)
    base = without_adapters(config)
    settings, attention = None, None
    if config.factory is None:
        settings, attention = transformers_settings(config, device.type, invariant)
    model = build_model(base, precision, seed, torch.device("cpu"), invariant)
    model = fill(base, model, settings, attention, weights_dtype(precision))
    train_padding_rows(model)
    if config.lora is not None:
        add_adapters(model, config.lora, seed)
    return _moved(model, device).train()


def weights_dtype(precision: str) -> torch.dtype:
    """The dtype of the weights, their gradients and moments under a `train.precision`."""
    return torch.bfloat16 if precision == "pure_bf16" else torch.float32


def find_factory(config: ModelConfig) -> Callable[..., Any]:
    """Imports the function of `model.factory`.

    Raises `ConfigError` if it does not exist, or does not accept `model.factory_args`.
    """
    return find_function(_FACTORY, str(config.factory), _NOT_CALLABLE, arguments=config.factory_args)


def made_by_factory(config: ModelConfig, model: object) -> nn.Module:
    """Returns the factory's model. Raises `ConfigError` if it is not a module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.factory={config.factory} returned {type(model).__name__}; "
            "it must return a torch.nn.Module",
            code="model.factory_output",
        )
    return model


def _from_factory(config: ModelConfig) -> nn.Module:
    function = find_factory(config)
    try:
        model = function(**config.factory_args)
    except (ImportError, AttributeError, TypeError) as error:
        raise not_callable(_FACTORY, str(config.factory), _NOT_CALLABLE, error) from error
    return made_by_factory(config, model)


def cast_state(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts real floating-point parameters and persistent buffers in place. Tied tensors stay tied.

    Complex tensors keep their type, which `Module.to` would make real. Buffers outside the state
    (`persistent=False`) also keep theirs: tables such as rotary frequencies need more bits than weights.
    """
    modules = list(model.modules())
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    buffers = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    cast: dict[int, Tensor] = {}
    for module, name, buffer in buffers:
        is_state = name not in module._non_persistent_buffers_set
        if is_state and buffer.is_floating_point() and buffer.dtype != dtype:
            cast.setdefault(id(buffer), buffer.to(dtype))
    for module, name, buffer in buffers:  # a shared buffer is replaced under all its names
        module._buffers[name] = cast.get(id(buffer), buffer)


def train_padding_rows(model: nn.Module) -> None:
    """Clears `padding_idx` of every embedding, which would keep the gradient of that row at zero.

    In a sample any id can be a real token. Positions that the packer pads have no target and come last, so
    that the cross-entropy gives their row no gradient.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.padding_idx = None


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves a model to `device` without the values of its parameters. Changes the model itself.

    Buffers keep their values, and tied tensors stay tied.
    """
    return _moved(emptied(model, device), device)


def emptied(model: nn.Module, device: torch.device) -> nn.Module:
    """Replaces all parameters by ones on `device` with undefined values. Tied parameters stay tied.

    The model itself is changed, not copied. Its buffers stay as they are.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=device, memory_format=torch.contiguous_format)
                made.setdefault(id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad))
                module._parameters[name] = made[id(parameter)]
    return model


def _moved(model: nn.Module, to: torch.device) -> nn.Module:
    """Moves the model to a device. Tied tensors stay tied."""
    with shared_buffers_kept(model):
        return model.to(to)


def _from_transformers(
    config: ModelConfig, settings: Any, dtype: torch.dtype, attention: str | None
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: Any
    missing: Collection[str] = ()
    with naming_model(config):
        if config.pretrained is not None and config.init_from is None:
            model, info = open_model(config, config.pretrained, settings, attention, dtype)
            missing = info.get("missing_keys", ())  # tied tensors are not among them
        else:
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=dtype, attn_implementation=attention
            )
    if config.init_from is not None:  # as the files will define it
        keep_in_float32(model, dtype)
        follow_files(config, model)
    if missing:
        raise _lacking(str(config.pretrained), sorted(map(str, missing)))
    without_cache(model)
    assert isinstance(model, nn.Module), f"transformers returned {type(model)}"
    return model


def _lacking(folder: str, missing: list[str]) -> ConfigError:
    named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else "")
    return ConfigError(
        f"model.pretrained={folder} lacks {len(missing)} of the model's tensors, and they would start at "
        f"random: {named}; restore the folder's *.safetensors, or correct its config.json, which says that "
        "the model has them",
        code="weights.missing_tensors",
    )


def seed_micro_batch(seed: int, first_sample: int) -> int:
    """Seeds torch's random numbers (dropout) for a micro-batch, given the run's index of its first sample.

    Returns the seed. The numbers depend neither on ranks nor on earlier computation, so that no generator
    state has to be saved. The `rng.json` of every point states this rule.
    """
    number = int.from_bytes(blake3(f"{seed}:{first_sample}".encode()).digest()[:8], "little") >> 1
    # as `torch.manual_seed`, which also formats the stack for each kind of device that is not there (0.2 ms)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)
    return number


def set_determinism(invariant: bool, device: torch.device) -> None:
    """Under invariant numerics, sets one thread for CPU sums and deterministic kernels on a GPU.

    Another number of CPU threads is another order of additions. The setting applies to the whole process.
    Different kinds of processors may still produce different bits.
    """
    if not invariant:
        return
    if device.type == "cpu":
        torch.set_num_threads(1)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
