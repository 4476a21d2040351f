"""A model of which each rank holds rows: its skeleton without weights, and FSDP2 around a copy of that, once
for each generation.

It knows modules and meshes; nothing of optimizers, steps, configuration or storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from orchestrator.trainer.ties import shared_buffers_kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapping:
    """How blocks are wrapped. `bf16`: computed in bfloat16, of weights that stay as they are, and whose
    gradients are summed in float32. `compiled`: each block by `torch.compile`. `recomputed`: activations
    within a block are computed again in backward.
    """

    bf16: bool = False
    compiled: bool = False
    recomputed: bool = False


def skeleton_of(model: nn.Module) -> nn.Module:
    """The same modules with all parameters on the meta device and buffers as they are; what is tied stays
    tied. The model is used up: it is not copied, and its parameters are lost.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format)
                made.setdefault(id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad))
                module._parameters[name] = made[id(parameter)]
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What is gathered and reduced at a time, beside the rest: the children of the `nn.ModuleList` that has
    most parameters, and in place of a child that only holds modules (a list of lists) those. None where there
    is no such list, or where one of its blocks shares a parameter with another or with the rest.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=_num_elements, default=None)
    if largest is None or not _num_elements(largest):
        return []
    once = dict.fromkeys(_computed(largest))  # a block may stand in the list several times
    blocks = [block for block in once if next(block.parameters(), None) is not None]
    owners: dict[int, set[int]] = {}
    inside = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside.get(id(module), -1))
    return blocks if all(len(numbers) == 1 for numbers in owners.values()) else []


def shard_model(skeleton: nn.Module, mesh: DeviceMesh, device: torch.device, how: Wrapping) -> nn.Module:
    """A copy of `skeleton` with FSDP2 on `mesh` around each of its blocks and around the rest; its parameters
    hold this rank's rows, with any values. `mesh` has the dimension "shard", and before it "replicate" for
    HSDP.

    Gradients are summed over the ranks, not averaged. A collective, where FSDP2 makes groups of its own.
    """
    model = copy.deepcopy(skeleton)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how.bf16 else MixedPrecisionPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for module in (*wrapped_blocks(model, how), model):
        _shard_other_types(module, _type_beside(module, None), shard)
        shard(module)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with shared_buffers_kept(model):
        model.to_empty(device=device)  # any values in the buffers, too
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def _shard_other_types(
    module: nn.Module, dtype: torch.dtype | None, shard: Callable[[nn.Module], Any]
) -> None:
    """FSDP2 around the modules inside of `module` whose parameters are not of `dtype`: what is gathered at a
    time must be of one type, and transformers keeps some parameters in float32.
    """
    for child in module.children():
        if isinstance(child, FSDPModule) or {p.dtype for p in _not_sharded(child)} <= {dtype}:
            continue
        called = type(child).forward is not nn.Module.forward
        own = _type_beside(child, dtype) if called else dtype
        _shard_other_types(child, own, shard)
        if own != dtype:
            shard(child)


def _type_beside(module: nn.Module, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type of the module's own parameters; of a module without any `dtype`, if something in it is of that
    type, else its most frequent one.
    """
    own = [p.dtype for p in module.parameters(recurse=False)] or [p.dtype for p in _not_sharded(module)]
    if dtype in own or not own:
        return dtype
    return max(own, key=own.count)


def _not_sharded(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters in a module that no `FSDPModule` inside of it holds."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _not_sharded(child)


def wrapped_blocks(model: nn.Module, how: Wrapping) -> Sequence[nn.Module]:
    """The blocks of `model`, in place, recomputed and compiled as asked; their names stay the same."""
    blocks = blocks_of(model)
    for block in blocks:
        forward: Any = block.forward
        if how.compiled:
            # not the block itself: FSDP2's hooks stay outside of what is compiled, and so does `checkpoint`
            forward = torch.compile(forward)
        if how.recomputed:
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward
    return blocks


def local_rows(parameter: Tensor) -> Tensor:
    """The rows that this rank holds of a sharded parameter or gradient, as themselves: they share memory."""
    with torch.no_grad():  # else it would be a view that autograd knows
        rows: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return rows


def _computed(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules that are called: a container without a forward pass is not, what is in it is."""
    for module in modules:
        if type(module).forward is not nn.Module.forward:
            yield module
        else:
            yield from _computed(module.children())


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
