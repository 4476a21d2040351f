"""The weights that adapters are trained beside (`model.lora`). No step changes them, and no point holds them.

Under `replicate` every member reads them whole at its start. In shards a member holds its rows of them, and
reads these whenever another layout gives it other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestrator.planning.state.state_layout import weights_sum
from orchestrator.trainer.loading.state_tensors import Item, is_trained, own_tensors, sum_of
from orchestrator.trainer.model.build_model import first_model
from orchestrator.trainer.state.frozen_models import copy_rows
from orchestrator.trainer.weights.initial import fill_rows
from orchestrator.trainer.weights.lora import base_names, base_state, without_adapters

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig
    from orchestrator.planning.state.state_layout import Layout

_CPU = torch.device("cpu")


class AdapterBase:
    """The rows that a member holds of the weights beside adapters; none without `model.lora`.

    Its items have the names that the weights have in a model without adapters, so that their digest does not
    depend on which modules are adapted.
    """

    def __init__(self, config: ModelConfig, precision: str, seed: int, model: nn.Module) -> None:
        """`model` may be without weights."""
        self.exists = config.lora is not None
        self._config, self._precision, self._seed = without_adapters(config), precision, seed
        self._names: Mapping[str, str] = {}
        self._state: Mapping[str, Tensor] = {}
        if self.exists:
            self._names, self._state = base_names(model), base_state(model)
        self._items: Sequence[Item] = ()
        self._place: tuple[int, int] | None = None  # number of shards, and shard
        self._lacks, self._sum = True, 0
        self._is_summed = False

    @property
    def field(self) -> str:
        """The configuration's field that says where the weights are."""
        return "model.pretrained" if self._config.init_from is None else "model.init_from"

    def split(self, items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
        """Returns those of a model's items that points hold, and the others."""
        if not self.exists:
            return list(items), []
        trained = [item for item in items if is_trained(item.tensor)]
        return trained, [item for item in items if not is_trained(item.tensor)]

    def hold(self, items: Sequence[Item], layout: Layout, rank: int, are_filled: bool = False) -> None:
        """Takes the items that `split` has left over, in the layout of a new generation.

        If this member has the rows already, it copies them from the items of before, else they are read by
        `read`, unless they `are_filled`.
        """
        new, place = self._renamed(items), (layout.num_shards, layout.shard_of(rank))
        if are_filled:
            self._lacks = False
        elif self._lacks or place != self._place:
            self._lacks, self._is_summed = True, False
        else:
            for old, item in zip(self._items, new, strict=True):
                item.tensor.detach().copy_(old.tensor.detach())
        self._items, self._place = new, place

    def read(self) -> None:
        """Reads the rows that this member lacks. Raises `ConfigError` and `StorageError`."""
        if self.exists and self._lacks:
            self._fill(self._items)
            self._lacks = False

    def fill_copies(self, items: Sequence[Item]) -> list[Item]:
        """Fills those of a model's items that begin as copies of these weights, and returns the others.

        Raises `ConfigError` and `StorageError`.
        """
        self._fill(self._renamed(items))
        return [item for item in items if item.name not in self._names]

    def _fill(self, items: Sequence[Item]) -> None:
        with torch.no_grad():
            if not items or fill_rows(self._config, self._state, items):
                return
            made = first_model(self._config, self._precision, self._seed, _CPU, invariant=False)
            values = dict(own_tensors(made.state_dict(keep_vars=True)))
            for item in items:
                copy_rows(item, values[item.name].detach())

    def sum(self) -> int:
        """Returns the sum of the rows of this member's shard (`planning.state.state_layout`)."""
        if not self._is_summed:
            shard = 0 if self._place is None else self._place[1]
            held = (item for item in self._items if item.whole.sharded or shard == 0)
            self._sum, self._is_summed = sum(map(sum_of, held)), True
        return self._sum

    def digests(self) -> dict[str, str]:
        """Returns the digest of weights that this member holds whole, by their field."""
        return {self.field: weights_sum([self.sum()])} if self.exists else {}

    def _renamed(self, items: Sequence[Item]) -> list[Item]:
        return [
            replace(item, whole=replace(item.whole, name=self._names[item.name]))
            for item in items
            if item.name in self._names
        ]
