"""The training state of one member of a sharded group: its rows of weights and moments, in one generation
after the other.

The model of a generation is FSDP2's and ends with it; AdamW works on plain tensors that share memory with
FSDP2's shards, and these stay. It knows no files and moves nothing between members.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.planning.state_layout import Layout, held_rows, layout_of
from orchestrator.trainer.deferred import DeferredModel, defer
from orchestrator.trainer.initial_weights import fill_rows
from orchestrator.trainer.items import MODEL, Item, own_tensors, whole_item
from orchestrator.trainer.model import bare_model, first_model
from orchestrator.trainer.sharded_model import Wrapping, blocks_of, local_rows, shard_model, skeleton_of
from orchestrator.trainer.state import OwnRows, TrainState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orchestrator.config.train_sections import ModelConfig, TrainConfig
    from orchestrator.trainer.group import Group

_CPU = torch.device("cpu")


class ShardedState(TrainState):
    """As `TrainState`, of which each member holds the rows that `layout` gives its rank. Blank until its
    first generation is formed and its items are written; before it has no items.

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
                "whose modules share no weight with others; set both to none"
            )
        self._names = list(_own_tensors(self._skeleton))
        self.model = self._skeleton
        self._mesh: DeviceMesh | None = None
        self._rows = OwnRows((), train, device)
        self._before: tuple[Layout, int, OwnRows] | None = None
        self._group: Group | None = None
        self._untouched = False

    # ------------------------------------------------------------------------------------------- generations
    def layout_on(self, world_size: int) -> Layout:
        """See `TrainState`."""
        return layout_of(world_size, self._num_shards)

    def form(self, group: Group) -> None:
        """See `TrainState`: the new tensors are blank, always."""
        gc.collect()  # FSDP2's modules of the generation before hold one another, and their rows
        self._before = None if self.key is None else (self._layout, self._rank, self._rows)
        view, self._group = group.view, group
        layout = self.layout_on(view.world_size)
        self._mesh = group.mesh(layout, self._device)
        self.model = shard_model(self._skeleton, self._mesh, self._device, self._how)
        self._layout, self._rank = layout, view.rank
        self._rows = OwnRows(self._model_items(), self._train, self._device)
        self._untouched = False

    def before(self) -> tuple[Layout, int, list[Item]] | None:
        """Between `form` and `formed`: the layout and the rank of before, and the items with their values;
        None if this member held nothing.
        """
        if self._before is None:
            return None
        layout, rank, rows = self._before
        return layout, rank, rows.items()

    def formed(self) -> None:
        """See `TrainState`."""
        super().formed()
        self._before = None

    def leave(self) -> None:
        """See `TrainState`. The gradients of a step that is prepared stay, too. Before `formed` the tensors
        from before are the state again.
        """
        self.model, self._mesh = self._skeleton, None
        if self._before is not None:
            (self._layout, self._rank, self._rows), self._before = self._before, None
        if self._group is not None:
            # an error on its way through FSDP2's frames keeps the groups alive, and so their connections,
            # on which other members may be waiting
            self._group.call_off()
            self._group = None
        gc.collect()

    @property
    def mesh(self) -> DeviceMesh:
        """That of the generation: dimensions "replicate" (for HSDP) and "shard"."""
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
        """What FSDP2 has reduced becomes the gradient of this member's rows: zero where the model did not use
        a parameter.
        """
        held: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        for name, item in self._rows.trained.items():
            parameter, rows = held[name], item.tensor
            assert local_rows(parameter).data_ptr() == rows.data_ptr(), (
                f"FSDP2 has other memory for {name} than AdamW"
            )
            reduced = parameter.grad
            rows.grad = torch.zeros_like(rows) if reduced is None else local_rows(reduced)
            parameter.grad = None

    def own_gradients(self) -> list[Tensor]:
        """Those of this member's rows, after `take_gradients`."""
        gradients = [item.tensor.grad for item in self._rows.trained.values()]
        return [gradient for gradient in gradients if gradient is not None]

    def forget_gradients(self) -> None:
        """Drops all gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for item in self._rows.trained.values():
            item.tensor.grad = None

    def _replaced(self) -> list[str]:
        """Buffers only: FSDP2 itself puts other parameters in place. Nothing after the generation, when a
        prepared step is applied.
        """
        if self._mesh is None:
            return []
        now = dict(self.model.named_buffers(remove_duplicate=False))
        return [name for name, tensor in self._rows.buffers.items() if now.get(name) is not tensor]

    # ----------------------------------------------------------------------------------------- first weights
    def initialise(self) -> None:
        """See `TrainState`. A weight of which this member has no row is not made; each takes the memory of
        the whole tensor for a moment. Of `model.pretrained` and `model.init_from` each member reads its own
        rows. What `fill_rows` cannot read so, and a factory that `defer` does not take, are built whole in
        the machine's memory first.
        """
        if self._untouched:
            return
        self.writable()
        weights = [item for item in self.items() if item.group == MODEL]
        for item in self.items():
            if item.group != MODEL:
                item.tensor.zero_()
        from_files = self._config.pretrained is not None or self._config.init_from is not None
        if not (from_files and fill_rows(self._config, self._skeleton, weights)):
            values = self._first_values()
            for item in weights:
                rows = item.tensor
                if rows.numel():
                    whole = values(item.name)
                    mine = whole[item.first_row : item.first_row + len(rows)] if item.whole.sharded else whole
                    rows.copy_(mine)
        self.filled()
        self._untouched = True

    def filled(self) -> None:
        """See `TrainState`."""
        super().filled()
        self._later = None

    def _first_values(self) -> Callable[[str], Tensor]:
        """What gives the first value of a tensor of the model, whole."""
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
        """None: a model whose weights cannot be made one by one, also if it fails while they are deferred
        (`parameter.data = …`): an error of the model's own is raised again where it is built whole.
        """
        try:
            return defer(self._bare)
        except Exception:  # noqa: BLE001  user code meets tensors without values
            return None


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(own_tensors(model.state_dict(keep_vars=True)))
