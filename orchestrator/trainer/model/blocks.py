"""The blocks of a model, and how they are computed: compiled, recomputed in backward, or by liger-kernel."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator.errors import ConfigError, TrainingError
from orchestrator.trainer.model.compiled_kernels import keep_privately

if TYPE_CHECKING:
    from orchestrator.config.sections import TrainConfig

_log = logging.getLogger(__name__)

# How many shapes of a block's inputs are compiled. torch would compute further ones without compiling them.
_SHAPES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSettings:
    """How blocks are computed.

    `compiled`: each block is compiled by `torch.compile`. `falls_back`: one that cannot be compiled is
    computed as it is, with a warning.
    `recomputed`: activations within a block are recomputed in backward.
    `liger`: norms, rotary positions and gated layers are computed by liger-kernel.
    """

    compiled: bool = False
    falls_back: bool = False
    recomputed: bool = False
    liger: bool = False

    @classmethod
    def of(cls, train: TrainConfig, device: torch.device, invariant: bool) -> BlockSettings:
        """Returns those of `train.compile`, `train.activation_checkpointing` and `train.kernels`."""
        return cls(
            compiled=compiles(train, device.type == "cuda", invariant),
            falls_back=train.compile == "auto",
            recomputed=train.activation_checkpointing == "blocks",
            liger=_has_liger(train, device),
        )


def compiles(train: TrainConfig, on_gpu: bool, invariant: bool) -> bool:
    """Whether blocks are compiled, if the model has any."""
    if train.compile != "auto":
        return train.compile == "blocks"
    return on_gpu and not invariant and train.kernels != "liger"


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered and reduced one at a time; the rest is gathered and reduced together.

    They are the children of the `nn.ModuleList` with the most parameters. A child that only holds modules (a
    list of lists) is replaced by these. Returns an empty list if there is no such list, or if a block shares
    a parameter with another block or with the rest.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=_num_elements, default=None)
    if largest is None or not _num_elements(largest):
        return []
    once = dict.fromkeys(_computed(largest))  # a block may occur several times in the list
    blocks = [block for block in once if next(block.parameters(), None) is not None]
    owners: dict[int, set[int]] = {}
    inside = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside.get(id(module), -1))
    return blocks if all(len(numbers) == 1 for numbers in owners.values()) else []


def _computed(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the modules that are called. A container without a forward pass is replaced by its children."""
    for module in modules:
        if type(module).forward is not nn.Module.forward:
            yield module
        else:
            yield from _computed(module.children())


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def require_blocks(model: nn.Module, train: TrainConfig, device: torch.device) -> None:
    """Raises `ConfigError` if the model cannot be computed as the configuration says.

    It has no blocks, or liger-kernel has no functions for it or is not installed.
    """
    if _has_liger(train, device):
        _liger().require(model)
    if "blocks" in (train.compile, train.activation_checkpointing) and not blocks_of(model):
        raise ConfigError(
            f"train.compile={train.compile} and train.activation_checkpointing="
            f"{train.activation_checkpointing}, but the model has no blocks: no torch.nn.ModuleList "
            "whose modules share no weight with others; set both to none",
            code="model.no_blocks",
        )


def with_settings(model: nn.Module, settings: BlockSettings) -> Sequence[nn.Module]:
    """Changes in place how the blocks of `model` are computed, and returns them.

    Their names stay the same.
    """
    if settings.liger:
        _liger().use(model)
    blocks = blocks_of(model)
    for block in blocks:
        forward: Any = block.forward
        if settings.compiled:
            # Compiles the forward pass and not the block itself, so that FSDP2's hooks and `checkpoint` stay
            # outside.
            forward = _Compiled(forward, settings.falls_back)
        if settings.recomputed:
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward
    return blocks


def are_compiled(model: nn.Module) -> bool:
    """Whether the blocks of a model that has computed something are compiled."""
    forwards = (getattr(block.forward, "args", (block.forward,))[0] for block in blocks_of(model))
    return any(isinstance(forward, _Compiled) and forward.is_compiled for forward in forwards)


def _has_liger(train: TrainConfig, device: torch.device) -> bool:
    """Whether liger-kernel is to be used. On a CPU, where a run is replayed or evaluated, it cannot be."""
    return train.kernels == "liger" and device.type == "cuda"


@dataclass(frozen=True, slots=True)
class _Liger:
    """liger-kernel, by its functions for each type of transformers model."""

    functions: Mapping[str, Callable[..., None]]

    def require(self, model: nn.Module) -> None:
        """Raises `ConfigError` if it has nothing for the model."""
        kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        if kind not in self.functions:
            raise ConfigError(
                f"train.kernels=liger, but liger-kernel has no kernels for {kind}; set train.kernels=auto",
                code="model.no_liger_kernels",
            )

    def use(self, model: Any) -> None:
        """Changes the model in place. The loss stays this package's, which it can compute in parts, too."""
        function = self.functions[model.config.model_type]
        off = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        known = inspect.signature(function).parameters
        function(model=model, **{name: value for name, value in off.items() if name in known})


def _liger() -> _Liger:
    try:
        patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise ConfigError(
            f"train.kernels=liger needs liger-kernel, which cannot be imported here ({error}); run "
            "`pip install -e '.[gpu]'` in the checkout on every node, or set train.kernels=auto",
            code="model.liger_not_installed",
        ) from error
    return _Liger(patches.MODEL_TYPE_TO_APPLY_LIGER_FN)


class _Compiled:
    """A forward pass that is compiled for each shape of its inputs, without trying which kernel is fastest.

    Kernels thus do not depend on what a process has computed before, and a process that replaces a killed one
    computes the same bits. The first time that torch compiles again, its reason is logged.
    """

    _has_reported = False  # in this process

    def __init__(self, forward: Callable[..., Any], falls_back: bool) -> None:
        import torch._dynamo
        from torch._dynamo.utils import guard_failures

        keep_privately()
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _SHAPES)
        self._forward, self._falls_back, self.is_compiled = forward, falls_back, True
        self._reasons: list[Any] = guard_failures[getattr(forward, "__code__", None)]
        self._compiled = torch.compile(forward, dynamic=False, options={"deterministic": True})

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Computes it. Raises `TrainingError` if it cannot be compiled."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            computed = self._compiled(*arguments, **named)
            if self._reasons and not _Compiled._has_reported:
                _Compiled._has_reported = True
                _log.warning("a block is compiled again (reported once): %s", self._reasons[0])
            return computed
        except TorchDynamoException as error:
            text = f"a block of the model cannot be compiled: {error}"
            if not self._falls_back:
                raise TrainingError(
                    f"train.compile=blocks, and {text}; set train.compile=none", code="model.not_compiled"
                ) from error
            _log.warning("%s; it is computed without (train.compile=auto)", text)
            self._compiled, self.is_compiled = self._forward, False
            return self._forward(*arguments, **named)
