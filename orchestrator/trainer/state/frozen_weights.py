"""The weights that no step changes and no point holds: frozen models, and those beside adapters.

Under `replicate` every member holds them whole from its start. In shards a member holds its rows of them. It
reads these from where the configuration says, again whenever another layout gives it other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from orchestrator.checkpoint.files.manifest import MODEL
from orchestrator.config.sections import FrozenModelConfig
from orchestrator.errors import naming_fields
from orchestrator.planning.state.state_layout import Layout, weights_sum
from orchestrator.records.points import SavedTensor
from orchestrator.trainer.model.blocks import BlockSettings
from orchestrator.trainer.model.build_model import bare_model, emptied, first_model, weights_dtype
from orchestrator.trainer.state.fsdp_model import shard_items, shard_model
from orchestrator.trainer.state.lazy_init import defer
from orchestrator.trainer.weights.initial import fill_rows, named_state
from orchestrator.trainer.weights.lora import base_names, base_state, merged_state, without_adapters
from orchestrator.trainer.weights.state_tensors import (
    Item,
    copy_rows,
    dtype_name,
    is_trained,
    own_tensors,
    require_fixed,
    sum_of,
    tensor_bytes,
    whole_item,
    whole_items,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from orchestrator.config.sections import ModelConfig, TrainConfig

# ----------------------------------------------------------------------------------------------- model.frozen
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
                with naming_frozen(name):
                    state = named_state(rows.skeleton)
                    _fill_first(rows.config, rows.precision, self._train.seed, state, rows.items)
                rows.lacks = False

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


def _fill_first(
    config: ModelConfig, precision: str, seed: int, state: Mapping[str, Tensor], items: Sequence[Item]
) -> None:
    """Fills items with their rows of a model's first weights, from its files or from the whole model.

    `state` is that of the model, perhaps without weights.
    """
    from_files = config.pretrained is not None or config.init_from is not None
    with torch.no_grad():
        if from_files and fill_rows(config, state, items):
            return
        made = first_model(config, precision, seed, _CPU, invariant=False)
        values = dict(own_tensors(made.state_dict(keep_vars=True)))
        for item in items:
            copy_rows(item, values[item.name].detach())


def _bare(config: ModelConfig, precision: str, seed: int) -> nn.Module:
    """Returns the model; its weights are not made if they can be left out."""
    def make() -> nn.Module:
        return bare_model(config, precision, seed, _CPU)

    try:
        later = defer(make)
    except Exception:  # noqa: BLE001  user code receives tensors without values
        later = None
    return make() if later is None else later.model


# ------------------------------------------------------------------------------------------------- model.lora
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
        if items:
            _fill_first(self._config, self._precision, self._seed, self._state, items)

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


def merged_tensors(
    config: ModelConfig,
    precision: str,
    seed: int,
    trained: Iterable[tuple[SavedTensor, bytearray]],
    point: str,
    fixed: Mapping[str, str],
) -> Iterator[tuple[SavedTensor, memoryview]]:
    """Yields each tensor of the model without adapters, and its bytes.

    `trained` are the tensors of a point, of the model or their averages. Reads the weights that the adapters
    belong to, and holds the model in memory. Raises `ConfigError` and `StorageError`, as a start of the run,
    and `ResumePointError` if the weights are not those that `point` was trained with, by its digests `fixed`.
    """
    model = first_model(config, precision, seed, _CPU, invariant=False)
    base = AdapterBase(config, precision, seed, model)
    base.hold(base.split(whole_items(model))[1], Layout(num_shards=1, num_replicas=1), 0, are_filled=True)
    require_fixed(point, fixed, base.digests())
    held = dict(model.state_dict(keep_vars=True))
    with torch.no_grad():
        for entry, data in trained:
            saved = torch.frombuffer(data, dtype=getattr(torch, entry.dtype))
            held[entry.name].copy_(saved.view(entry.shape))
        merged = dict(own_tensors(merged_state(model)))
    for name, tensor in sorted(merged.items()):
        form = SavedTensor(
            group=MODEL, name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), sharded=False
        )
        yield form, tensor_bytes(tensor)
