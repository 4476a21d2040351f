"""Wraps a model in FSDP2: its blocks one by one, each as configured, and the rest together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from orchestrator.checkpoint.files.manifest import MODEL
from orchestrator.planning.state.state_layout import Layout, held_rows
from orchestrator.trainer.loading.state_tensors import Item, whole_item
from orchestrator.trainer.weights.ties import shared_buffers_kept

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapping:
    """How blocks are wrapped.

    `bf16`: blocks compute in bfloat16. Their weights keep their type, and gradients are summed in float32.
    `compiled`: each block is compiled by `torch.compile`.
    `recomputed`: activations within a block are recomputed in backward.
    """

    bf16: bool = False
    compiled: bool = False
    recomputed: bool = False


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


def shard_model(skeleton: nn.Module, mesh: DeviceMesh, device: torch.device, how: Wrapping) -> nn.Module:
    """Copies `skeleton` and wraps each of its blocks, and the rest, in FSDP2 on `mesh`.

    The parameters hold this rank's rows, with undefined values. `mesh` has the dimension "shard", after
    "replicate" for HSDP. Gradients are summed over the ranks, not averaged. This is a collective where FSDP2
    creates groups of its own.
    """
    model = copy.deepcopy(skeleton)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how.bf16 else MixedPrecisionPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for module in (*wrapped_blocks(model, how), model):
        _shard_other_types(module, _type_beside(module, None), shard)
        shard(module)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with shared_buffers_kept(model):
        model.to_empty(device=device)  # the values of the buffers become undefined, too
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def shard_items(model: nn.Module, names: Iterable[str], layout: Layout, rank: int) -> list[Item]:
    """Returns the tensors `names` of a model of `shard_model` as items, with the rows that this rank holds.

    The rows share memory with FSDP2's shards.
    """
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    items = []
    for name in names:
        if name in buffers:
            items.append(whole_item(MODEL, name, buffers[name], sharded=False))
            continue
        parameter = held[name]
        whole = whole_item(MODEL, name, parameter, sharded=True).whole
        own = held_rows(whole, layout.num_shards, layout.shard_of(rank))
        rows = nn.Parameter(local_rows(parameter), requires_grad=parameter.requires_grad)
        assert rows.shape[0] == len(own), f"FSDP2 holds {rows.shape[0]} rows of {name}, not {own}"
        items.append(Item(whole=whole, tensor=rows, first_row=own.start))
    return items


def _shard_other_types(
    module: nn.Module, dtype: torch.dtype | None, shard: Callable[[nn.Module], Any]
) -> None:
    """Wraps the modules inside `module` whose parameters are not of `dtype` in FSDP2.

    Parameters that are gathered together must have one type, and transformers keeps some parameters in
    float32.
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
    """Returns the type of the module's own parameters.

    For a module without any it is `dtype`, if some parameter inside has that type, else the most frequent
    type inside.
    """
    own = [p.dtype for p in module.parameters(recurse=False)] or [p.dtype for p in _not_sharded(module)]
    if dtype in own or not own:
        return dtype
    return max(own, key=own.count)


def _not_sharded(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters in a module that no `FSDPModule` inside it holds."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _not_sharded(child)


def wrapped_blocks(model: nn.Module, how: Wrapping) -> Sequence[nn.Module]:
    """Wraps the blocks of `model` in place, recomputed and compiled as configured. Their names stay
    the same.
    """
    blocks = blocks_of(model)
    for block in blocks:
        forward: Any = block.forward
        if how.compiled:
            # Compiles the forward pass and not the block itself, so that FSDP2's hooks and `checkpoint` stay
            # outside.
            forward = torch.compile(forward)
        if how.recomputed:
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward
    return blocks


def local_rows(parameter: Tensor) -> Tensor:
    """Returns the rows of a sharded parameter or gradient that this rank holds. They share its memory."""
    with torch.no_grad():  # otherwise it would be a view that autograd tracks
        rows: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return rows


def _computed(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the modules that are called. A container without a forward pass is replaced by its children."""
    for module in modules:
        if type(module).forward is not nn.Module.forward:
            yield module
        else:
            yield from _computed(module.children())


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
