"""The training state of one member of a sharded group: its rows of weights and moments, across generations.

FSDP2's model is made for a generation and ends with it: FSDP2 wraps a copy of a skeleton without weights.
The optimizer uses plain tensors that share memory with FSDP2's shards, and these persist.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.trainer.model.blocks import BlockSettings, require_blocks
from orchestrator.trainer.model.build_model import bare_model, emptied
from orchestrator.trainer.optimizer.optimizer_rows import Shards
from orchestrator.trainer.optimizer.optimizers import settings_of
from orchestrator.trainer.state.first_weights import FirstWeights
from orchestrator.trainer.state.frozen_weights import AdapterBase, FrozenModels, FrozenShards
from orchestrator.trainer.state.fsdp_model import local_rows, shard_items, shard_model
from orchestrator.trainer.state.train_state import OwnRows, TrainState
from orchestrator.trainer.weights.state_tensors import Item, own_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orchestrator.config.sections import ModelConfig, TrainConfig
    from orchestrator.trainer.comm.group import Group

_CPU, _META = torch.device("cpu"), torch.device("meta")


class ShardedState(TrainState):
    """A `TrainState` of which each member holds the rows that `layout` assigns to its rank.

    It is blank until its first generation is formed and its items are written. Before that it has no items.
    `model` is FSDP2's within a generation, else a skeleton without weights. `num_shards` as in `layout_of`.
    """

    sharded = True

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        device: torch.device,
        num_shards: int | None,
        weights_by_name: bool = False,
    ) -> None:
        self._begin_blank()
        self._train, self._device, self._num_shards = train, device, num_shards
        self._first = FirstWeights(model, train, _CPU, invariant=False, by_name=weights_by_name)
        outline = self._first.outline() or bare_model(model, train.precision, train.seed, _CPU)
        self._skeleton = emptied(outline, _META)
        require_blocks(self._skeleton, train, device)
        self.frozen: FrozenModels = FrozenShards(model, train, device)
        self.base = AdapterBase(model, train.precision, train.seed, self._skeleton)
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
        how = BlockSettings.of(self._train, self._device, invariant=False)
        bf16 = self._train.precision == "bf16"
        self.model = shard_model(self._skeleton, self._mesh, self._device, bf16, how)
        self.frozen.form(self._mesh, layout, view.rank)
        self._layout, self._rank = layout, view.rank
        items, fixed = self.base.split(shard_items(self.model, self._names, layout, view.rank))
        self.base.hold(fixed, layout, view.rank)
        self._rows = OwnRows(items, self._settings, self._train.ema, self._device, fixed)
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
        self.frozen.leave()
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

    @property
    @override
    def _outline(self) -> nn.Module:
        return self._skeleton

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

def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(own_tensors(model.state_dict(keep_vars=True)))
