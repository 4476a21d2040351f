"""The training state of one member of a sharded group: its rows of weights and moments, across generations.

FSDP2's model is made for a generation and ends with it: FSDP2 wraps a copy of a skeleton without weights.
The optimizer uses plain tensors that share memory with FSDP2's shards, and these persist.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from orchestrator.checkpoint.files.manifest import MODEL
from orchestrator.errors import ConfigError
from orchestrator.planning.state.state_layout import Layout, held_rows, layout_of
from orchestrator.trainer.loading.state_tensors import Item, begin_anew, own_tensors, whole_item
from orchestrator.trainer.model.build_model import bare_model, first_model
from orchestrator.trainer.optimizer.assignment import settings_of
from orchestrator.trainer.optimizer.whole_parameters import Shards
from orchestrator.trainer.state.lazy_init import DeferredModel, defer
from orchestrator.trainer.state.train_state import OwnRows, TrainState
from orchestrator.trainer.weights.initial import fill_rows
from orchestrator.trainer.weights.ties import shared_buffers_kept

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orchestrator.config.sections import ModelConfig, TrainConfig
    from orchestrator.trainer.comm.group import Group

_CPU = torch.device("cpu")


class ShardedState(TrainState):
    """A `TrainState` of which each member holds the rows that `layout` assigns to its rank.

    It is blank until its first generation is formed and its items are written. Before that it has no items.
    `model` is FSDP2's within a generation, else a skeleton without weights. `num_shards` as in `layout_of`.
    """

    sharded = True

    def __init__(
        self, model: ModelConfig, train: TrainConfig, device: torch.device, num_shards: int | None
    ) -> None:
        self._begin_blank()
        self._config, self._train, self._device, self._num_shards = model, train, device, num_shards
        self._how = Wrapping(
            bf16=train.precision == "bf16",
            compiled=train.compile == "blocks",
            recomputed=train.activation_checkpointing == "blocks",
        )
        self._later: DeferredModel | None = self._defer()
        self._skeleton = skeleton_of(copy.deepcopy(self._later.model) if self._later else self._bare())
        if (self._how.compiled or self._how.recomputed) and not blocks_of(self._skeleton):
            raise ConfigError(
                f"train.compile={train.compile} and train.activation_checkpointing="
                f"{train.activation_checkpointing}, but the model has no blocks: no torch.nn.ModuleList "
                "whose modules share no weight with others; set both to none",
                code="model.no_blocks",
            )
        self._names = list(_own_tensors(self._skeleton))
        self.model = self._skeleton
        self._mesh: DeviceMesh | None = None
        self._settings = settings_of(self._skeleton, train)
        self._rows = OwnRows((), self._settings, train.ema, device)
        self._before: tuple[Layout, int, OwnRows] | None = None
        self._group: Group | None = None
        self._untouched = False

    # ------------------------------------------------------------------------------------------- generations
    @override
    def layout_on(self, world_size: int) -> Layout:
        return layout_of(world_size, self._num_shards)

    @override
    def form(self, group: Group) -> None:
        """The new tensors are always blank."""
        gc.collect()  # FSDP2's modules of the previous generation reference each other and their rows
        self._before = None if self.key is None else (self._layout, self._rank, self._rows)
        view, self._group = group.view, group
        layout = self.layout_on(view.world_size)
        self._mesh = group.mesh(layout, self._device)
        self.model = shard_model(self._skeleton, self._mesh, self._device, self._how)
        self._layout, self._rank = layout, view.rank
        self._rows = OwnRows(self._model_items(), self._settings, self._train.ema, self._device)
        self._untouched = False

    def before(self) -> tuple[Layout, int, list[Item]] | None:
        """Between `form` and `formed`: the previous layout and rank, and the items with their values.

        None if this member held nothing.
        """
        if self._before is None:
            return None
        layout, rank, rows = self._before
        return layout, rank, rows.items()

    @override
    def formed(self) -> None:
        super().formed()
        self._before = None

    @override
    def leave(self) -> None:
        """The gradients of a prepared step stay, too.

        Before `formed`, the previous tensors become the state again.
        """
        self.model, self._mesh = self._skeleton, None
        if self._before is not None:
            (self._layout, self._rank, self._rows), self._before = self._before, None
        if self._group is not None:
            # An exception that passes through FSDP2's frames keeps the groups alive. Their connections then
            # stay open, and other members may be waiting on them.
            self._group.call_off()
            self._group = None
        gc.collect()

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the generation, with the dimensions "replicate" (for HSDP) and "shard"."""
        assert self._mesh is not None, "there is a mesh within a generation"
        return self._mesh

    def _model_items(self) -> list[Item]:
        held: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        items = []
        for name in self._names:
            if name in buffers:
                items.append(whole_item(MODEL, name, buffers[name], sharded=False))
                continue
            parameter = held[name]
            whole = whole_item(MODEL, name, parameter, sharded=True).whole
            own = held_rows(whole, self._layout.num_shards, self._layout.shard_of(self._rank))
            rows = nn.Parameter(local_rows(parameter), requires_grad=parameter.requires_grad)
            assert rows.shape[0] == len(own), f"FSDP2 holds {rows.shape[0]} rows of {name}, not {own}"
            items.append(Item(whole=whole, tensor=rows, first_row=own.start))
        return items

    # ------------------------------------------------------------------------------------------------- steps
    def take_gradients(self) -> None:
        """Moves FSDP2's reduced gradients to this member's rows; zero for unused parameters."""
        held: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        for name, item in self._rows.trained.items():
            parameter, rows = held[name], item.tensor
            assert local_rows(parameter).data_ptr() == rows.data_ptr(), (
                f"FSDP2 has other memory for {name} than the optimizer"
            )
            reduced = parameter.grad
            rows.grad = torch.zeros_like(rows) if reduced is None else local_rows(reduced)
            parameter.grad = None

    @override
    def prepare(self, lr: float) -> None:
        """Members of a replica step parameters whole for each other, if the optimizer needs that."""
        if self._layout.num_shards > 1:
            shard = self._layout.shard_of(self._rank)
            group = self.mesh.get_group("shard")
            self._rows.prepare(
                lr, Shards(num_shards=self._layout.num_shards, shard=shard, group=group)
            )

    def own_gradients(self) -> list[Tensor]:
        """Returns the gradients of this member's rows, after `take_gradients`."""
        gradients = [item.tensor.grad for item in self._rows.trained.values()]
        return [gradient for gradient in gradients if gradient is not None]

    def forget_gradients(self) -> None:
        """Clears all gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for item in self._rows.trained.values():
            item.tensor.grad = None

    def _replaced(self) -> list[str]:
        """Checks buffers only, because FSDP2 itself replaces parameters.

        Returns nothing after the generation, when a prepared step is applied.
        """
        if self._mesh is None:
            return []
        now = dict(self.model.named_buffers(remove_duplicate=False))
        return [name for name, tensor in self._rows.buffers.items() if now.get(name) is not tensor]

    # ----------------------------------------------------------------------------------------- first weights
    @override
    def initialise(self) -> None:
        """A weight of which this member has no row is not made.

        Each weight briefly takes the memory of the whole tensor. Each member reads only its own rows of
        `model.pretrained` and `model.init_from`. Weights that `fill_rows` cannot read in this way, and a
        factory that `defer` does not support, are first built whole in the machine's memory.
        """
        if self._untouched:
            return
        self.writable()
        items = self.items()
        weights = [item for item in items if item.group == MODEL]
        from_files = self._config.pretrained is not None or self._config.init_from is not None
        if not (from_files and fill_rows(self._config, self._skeleton, weights)):
            values = self._first_values()
            for item in weights:
                rows = item.tensor
                if rows.numel():
                    whole = values(item.name)
                    mine = whole[item.first_row : item.first_row + len(rows)] if item.whole.sharded else whole
                    rows.copy_(mine)
        begin_anew(items, weights)
        self.filled()
        self._untouched = True

    @override
    def filled(self) -> None:
        super().filled()
        self._later = None

    def _first_values(self) -> Callable[[str], Tensor]:
        """Returns a function that maps a tensor's name to its whole initial value."""
        if self._config.pretrained is None and self._config.init_from is None:
            later = self._later or self._defer()
            if later is not None:
                noted = _own_tensors(later.model)
                return lambda name: later.make(noted[name])
        train = self._train
        whole = _own_tensors(first_model(self._config, train.precision, train.seed, _CPU, invariant=False))
        return lambda name: whole[name].detach()

    def _bare(self) -> nn.Module:
        return bare_model(self._config, self._train.precision, self._train.seed, _CPU)

    def _defer(self) -> DeferredModel | None:
        """Returns None for a model whose weights cannot be made one by one.

        This includes a model that fails while its weights are deferred (`parameter.data = …`). An error of
        the model's own is raised again when it is built whole.
        """
        try:
            return defer(self._bare)
        except Exception:  # noqa: BLE001  user code receives tensors without values
            return None


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(own_tensors(model.state_dict(keep_vars=True)))


# ---------------------------------------------------------------------------------------------- FSDP2's model
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


def skeleton_of(model: nn.Module) -> nn.Module:
    """Moves all parameters to the meta device and keeps the buffers. Tied parameters stay tied.

    The model itself is changed, not copied, and its parameters are lost.
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
