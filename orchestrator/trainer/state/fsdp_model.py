"""Wraps a model in FSDP2: its blocks one by one, each as configured, and the rest together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from orchestrator.checkpoint.files.manifest import MODEL
from orchestrator.planning.state.state_layout import Layout, held_rows
from orchestrator.trainer.model.blocks import BlockSettings, with_settings
from orchestrator.trainer.weights.state_tensors import Item, whole_item
from orchestrator.trainer.weights.ties import shared_buffers_kept

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_model(
    skeleton: nn.Module, mesh: DeviceMesh, device: torch.device, bf16: bool, how: BlockSettings
) -> nn.Module:
    """Copies `skeleton` and wraps each of its blocks, and the rest, in FSDP2 on `mesh`.

    With `bf16` the blocks compute in bfloat16. Their weights keep their type, and gradients are summed in
    float32. The parameters hold this rank's rows, with undefined values. `mesh` has the dimension "shard",
    after "replicate" for HSDP. Gradients are summed over the ranks, not averaged. This is a collective where
    FSDP2 creates groups of its own.
    """
    model = copy.deepcopy(skeleton)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for module in (*with_settings(model, how), model):
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


def local_rows(parameter: Tensor) -> Tensor:
    """Returns the rows of a sharded parameter or gradient that this rank holds. They share its memory."""
    with torch.no_grad():  # otherwise it would be a view that autograd tracks
        rows: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return rows
