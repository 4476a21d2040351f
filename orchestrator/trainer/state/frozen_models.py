"""The models of `model.frozen`, which no step changes and no point holds.

Under `replicate` every member holds them whole from its start. In shards a member holds its rows of them. It
reads these from where the configuration says, again whenever another layout gives it other rows, and wraps
them in FSDP2 for each generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.checkpoint.files.manifest import MODEL
from orchestrator.config.sections import FrozenModelConfig
from orchestrator.errors import naming_fields
from orchestrator.planning.state.state_layout import weights_sum
from orchestrator.trainer.loading.state_tensors import Item, own_tensors, sum_of, whole_item
from orchestrator.trainer.model.blocks import BlockSettings
from orchestrator.trainer.model.build_model import bare_model, emptied, first_model, weights_dtype
from orchestrator.trainer.state.fsdp_model import shard_items, shard_model
from orchestrator.trainer.state.lazy_init import defer
from orchestrator.trainer.weights.initial import fill_rows, named_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orchestrator.config.sections import ModelConfig, TrainConfig
    from orchestrator.planning.state.state_layout import Layout

_CPU, _META = torch.device("cpu"), torch.device("meta")


class FrozenModels:
    """The frozen models of one member, each held whole.

    `models`: by name, in evaluation mode, without gradients. It stays the same mapping.
    """

    def __init__(self, model: ModelConfig, train: TrainConfig, device: torch.device, invariant: bool) -> None:
        """Raises `ConfigError` naming a model that cannot be built, and `StorageError`."""
        self.models: dict[str, nn.Module] = {}
        self._sums: dict[str, int] = {}
        for name, config in model.frozen.items():
            with naming_frozen(name):
                made = first_model(
                    config.as_model, precision_of(config, train), train.seed, device, invariant
                )
            self.models[name] = made.eval().requires_grad_(False)

    def form(self, mesh: DeviceMesh, layout: Layout, rank: int) -> None:
        """Enters a generation, in which this member has the rows that the layout gives to its rank."""

    def read(self) -> None:
        """Reads the rows that this member lacks after `form`. Raises as the constructor."""

    def leave(self) -> None:
        """Leaves the generation."""

    def sums(self) -> Mapping[str, int]:
        """Returns by name the sum of the rows of this member's shard; the sums of all shards of a replica
        give the digest (`planning.state.state_layout.weights_sum`).
        """
        for name in self.models.keys() - self._sums.keys():
            held = own_tensors(dict(self.models[name].state_dict(keep_vars=True)))
            items = (
                whole_item(MODEL, each, tensor.detach().contiguous(), sharded=False) for each, tensor in held
            )
            self._sums[name] = sum(map(sum_of, items))
        return self._sums

    def digests(self) -> dict[str, str]:
        """Returns the digests of the models of a member that holds them whole, by field."""
        return {frozen_field(name): weights_sum([found]) for name, found in self.sums().items()}


@dataclass(kw_only=True, slots=True)
class _Rows:
    """The rows that a member holds of one model: `items`, of shard `shard` of `num_shards`.

    `lacks`: the items are blank.
    """

    config: ModelConfig
    precision: str
    skeleton: nn.Module
    num_shards: int = 0
    shard: int = 0
    items: Sequence[Item] = field(default_factory=tuple)
    lacks: bool = True


class FrozenShards(FrozenModels):
    """The frozen models of a member of a sharded group. Outside a generation they are without weights."""

    _rows: dict[str, _Rows]

    def __init__(self, model: ModelConfig, train: TrainConfig, device: torch.device) -> None:
        self.models, self._sums, self._rows = {}, {}, {}
        self._train, self._device = train, device
        for name, config in model.frozen.items():
            precision, of = precision_of(config, train), config.as_model
            with naming_frozen(name):
                skeleton = emptied(_bare(of, precision, train.seed), _META).eval().requires_grad_(False)
            self._rows[name] = _Rows(config=of, precision=precision, skeleton=skeleton)
            self.models[name] = skeleton

    @override
    def form(self, mesh: DeviceMesh, layout: Layout, rank: int) -> None:
        """Rows that this member has already are copied."""
        shard = layout.shard_of(rank)
        for name, rows in self._rows.items():
            is_float32 = weights_dtype(rows.precision) is torch.float32
            bf16 = self._train.precision == "bf16" and is_float32
            if rows.lacks or (rows.num_shards, rows.shard) != (layout.num_shards, shard):
                rows.lacks, rows.items = True, ()
                self._sums.pop(name, None)
            model = shard_model(rows.skeleton, mesh, self._device, bf16, BlockSettings())
            names = list(dict(own_tensors(rows.skeleton.state_dict(keep_vars=True))))
            items = shard_items(model, names, layout, rank)
            for old, new in zip(rows.items, () if rows.lacks else items, strict=True):
                new.tensor.detach().copy_(old.tensor.detach())
            rows.items, rows.num_shards, rows.shard = items, layout.num_shards, shard
            self.models[name] = model

    @override
    def read(self) -> None:
        for name, rows in self._rows.items():
            if rows.lacks:
                with naming_frozen(name), torch.no_grad():
                    self._read(rows)
                rows.lacks = False

    def _read(self, rows: _Rows) -> None:
        from_files = rows.config.pretrained is not None or rows.config.init_from is not None
        if from_files and fill_rows(rows.config, named_state(rows.skeleton), rows.items):
            return
        made = first_model(rows.config, rows.precision, self._train.seed, _CPU, invariant=False)
        values = dict(own_tensors(made.state_dict(keep_vars=True)))
        for item in rows.items:
            copy_rows(item, values[item.name].detach())

    @override
    def leave(self) -> None:
        """The rows stay."""
        self.models.update({name: rows.skeleton for name, rows in self._rows.items()})

    @override
    def sums(self) -> Mapping[str, int]:
        for name in self._rows.keys() - self._sums.keys():
            rows = self._rows[name]
            held = (item for item in rows.items if item.whole.sharded or rows.shard == 0)
            self._sums[name] = sum(map(sum_of, held))
        return self._sums


def precision_of(config: FrozenModelConfig, train: TrainConfig) -> str:
    """Returns the `train.precision` whose weights have the type of this model's weights."""
    if config.dtype is None:
        return train.precision
    return "pure_bf16" if config.dtype == "bfloat16" else "float32"


def copy_rows(item: Item, whole: Tensor) -> None:
    """Fills an item with its rows of the tensor `whole`."""
    rows = item.tensor
    if rows.numel():
        rows.copy_(whole[item.first_row : item.first_row + len(rows)] if item.whole.sharded else whole)


def frozen_field(name: str) -> str:
    """Returns the configuration's field of a frozen model."""
    return f"model.frozen.{name}"


@contextmanager
def naming_frozen(name: str) -> Iterator[None]:
    """Within the block, errors about the section `model` name that of the frozen model instead."""
    section = frozen_field(name)
    fields = {f"model.{field}": f"{section}.{field}" for field in FrozenModelConfig.model_fields}
    with naming_fields(section, fields):
        yield


def _bare(config: ModelConfig, precision: str, seed: int) -> nn.Module:
    """Returns the model; its weights are not made if they can be left out."""
    def make() -> nn.Module:
        return bare_model(config, precision, seed, _CPU)

    try:
        later = defer(make)
    except Exception:  # noqa: BLE001  user code receives tensors without values
        later = None
    return make() if later is None else later.model
