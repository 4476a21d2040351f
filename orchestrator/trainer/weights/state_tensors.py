"""The tensors of a training state, and their conversion to a point's files and back.

A rank saves the part that its group's layout assigns to it. It loads the rows that it holds, from a point of
any layout and any format. This module uses no collectives and no pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.files.manifest import (
    EMA,
    MODEL,
    OPTIMIZER,
    Name,
    PartDamage,
    PartManifest,
    damaged,
)
from orchestrator.checkpoint.files.part_file import PartRows, part_sum
from orchestrator.checkpoint.files.part_writer import Placed
from orchestrator.checkpoint.files.reading import BytesTarget, PointReader, Target, TensorRequest
from orchestrator.errors import ResumePointError
from orchestrator.planning.state.state_layout import Layout, StateTensor, weights_sum, written_rows
from orchestrator.records.points import SavedTensor
from orchestrator.storage.files import Storage

STEPS = "steps"  # the item that counts optimizer steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """The rows of a state tensor that this member holds.

    `tensor` is the state itself, not a copy: writing to it changes the state. It holds the rows of `whole`
    from `first_row` on (all rows under replicate). Tied weights are one item.
    """

    whole: StateTensor
    tensor: Tensor
    first_row: int = 0

    @property
    def group(self) -> str:
        """MODEL, OPTIMIZER or EMA."""
        return self.whole.group

    @property
    def name(self) -> str:
        """Unique in its group."""
        return self.whole.name


def whole_item(group: str, name: str, tensor: Tensor, *, sharded: bool) -> Item:
    """Builds the item of a tensor that is held whole. `sharded`: its rows are divided if there are shards."""
    whole = StateTensor(
        group=group,
        name=name,
        shape=tuple(tensor.shape),
        itemsize=tensor.element_size(),
        sharded=sharded and tensor.ndim > 0,
    )
    return Item(whole=whole, tensor=tensor)


def whole_items(model: nn.Module) -> list[Item]:
    """Returns the tensors of a model's state. Makes each of them contiguous."""
    items = []
    for name, tensor in own_tensors(dict(model.state_dict(keep_vars=True))):
        tensor.data = tensor.data.contiguous()
        items.append(whole_item(MODEL, name, tensor, sharded=isinstance(tensor, nn.Parameter)))
    return items


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the tensor's values as bytes, in order. Copies them only if the tensor is on a GPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def own_tensors(held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and persistent buffers by name. Of tied tensors only the first name is yielded."""
    seen: set[int] = set()
    for name, tensor in held.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor of a model's state is trained."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


# -------------------------------------------------------------------------------------------- a point's files
class StateFiles(Protocol):
    """The storage of points, for example `checkpoint.points.store.CommittedFiles`."""

    @property
    def storage(self) -> Storage:
        """The run's storage, from which points are read."""

    @property
    def parts(self) -> Storage:
        """The storage that this rank's parts are written to: the run's, or a folder of this node."""

    @property
    def placed(self) -> Placed | None:
        """The callback after a part is written to a folder of this node."""

    def manifest(self, point: str) -> PartManifest:
        """Returns the tensors of a committed point, as listed in its COMMIT.

        Raises `ResumePointError` if the point is damaged, `StorageError` if that cannot be determined.
        """


# ---------------------------------------------------------------------------------------------------- saving
def saved_tensors(items: Iterable[Item]) -> tuple[SavedTensor, ...]:
    """The tensors of the whole state, as listed in rank 0's vote."""
    return tuple(
        SavedTensor(
            group=item.group,
            name=item.name,
            dtype=dtype_name(item.tensor),
            shape=item.whole.shape,
            sharded=item.whole.sharded,
        )
        for item in items
    )


def rows_of(item: Item, rows: range) -> PartRows:
    """Returns rows of the whole tensor, which this member holds, in the form of a part."""
    tensor = item.tensor
    if item.whole.shape:
        tensor = tensor[rows.start - item.first_row : rows.stop - item.first_row]
    return PartRows(tensor=item.whole, dtype=dtype_name(item.tensor), rows=rows, data=tensor_bytes(tensor))


# ---------------------------------------------------------------------------------------------------- digests
def digest_of(items: Iterable[Item]) -> str:
    """Returns the `weights_digest` of a point of this state, independent of the layout that saves it.

    `items` must hold every tensor whole.
    """
    return weights_sum(sum_of(item) for item in items if item.group == MODEL)


def share_sum(items: Sequence[Item], layout: Layout, rank: int) -> int:
    """Returns the sum over the model rows that this rank would write.

    The sums of all ranks add up to the sum of the whole model (`weights_sum`).
    """
    written = written_rows([item.whole for item in items], layout, rank)
    shares = [rows_of(item, rows) for item, rows in zip(items, written, strict=True) if rows]
    return sum(part_sum(share) for share in shares if share.tensor.group == MODEL)


def sum_of(item: Item) -> int:
    """Returns the sum of the rows of a tensor that this member holds (`planning.state.state_layout`)."""
    return part_sum(rows_of(item, _held(item)))


# ---------------------------------------------------------------------------------------------------- loading
@dataclass(frozen=True, kw_only=True, slots=True)
class Continues:
    """What a state that continues a point requires of it.

    `reset_optimizer`: the point's optimizer may be another one, and its state is left out. `fixed`: the
    digests of the weights that the state is trained with and does not contain, by their fields.
    """

    reset_optimizer: bool = False
    fixed: Mapping[str, str] = field(default_factory=dict)


def load(
    items: Sequence[Item], point: str, files: StateFiles, how: Continues = Continues()  # noqa: B008  frozen
) -> None:
    """Fills `items` with their rows of a point of any layout and verifies every byte against its digest.

    What the point does not have begins anew (`continued`). The caller must call `TrainState.filled`
    afterwards. Besides the state this takes the memory of a `PointReader`'s buffers (pinned if tensors are on
    a GPU). Raises `ResumePointError` naming the damaged file, or the tensors that only the model or only the
    point has. After an error the items may hold anything, and the state is blank.
    """
    reader, kept = point_reader(items, point, files, how)
    fill_items(reader, point, kept)
    begin_anew(items, kept)


def point_reader(
    items: Sequence[Item], point: str, files: StateFiles, how: Continues
) -> tuple[PointReader, list[Item]]:
    """Opens a reader for a point, and returns it with those of `items` that continue the point's tensors.

    Raises as `continued`, and `ResumePointError` if the point was trained with other weights beside it.
    """
    manifest = files.manifest(point)
    require_fixed(point, manifest.fixed, how.fixed)
    saved = {name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()}
    kept = continued(items, saved, f"resume point {point}", how.reset_optimizer)
    pinned = any(item.tensor.is_cuda for item in items)
    return PointReader(files.storage, manifest, lambda num_bytes: _buffer(num_bytes, pinned)), kept


def require_fixed(point: str, recorded: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raises `ResumePointError` if weights are not those that a point was trained with beside its own.

    `recorded` are the point's digests of them by their fields, `there` those of the weights now.
    """
    for name, digest in there.items():
        if recorded.get(name, digest) != digest:
            raise ResumePointError(
                f"resume point {point} was trained with weights of {name} whose digest is "
                f"{recorded[name]}, those there now have {digest}; put the files back, or give other "
                "weights another name",
                code="weights.changed",
            )


def fill_items(reader: PointReader, point: str, items: Sequence[Item]) -> None:
    """Fills `items` from a point that has tensors of the same names and forms, which was compared before."""
    try:
        reader.read(wanted_of(items))
    except PartDamage as error:
        raise damaged(point, error) from error


def wanted_of(items: Sequence[Item]) -> dict[Name, TensorRequest]:
    """Returns the rows of items, with the items themselves as targets."""
    return {
        (item.group, item.name): TensorRequest(rows=_held(item), target=_target(item.tensor))
        for item in items
    }


def _held(item: Item) -> range:
    num_rows = len(item.tensor) if item.whole.shape else 1
    return range(item.first_row, item.first_row + num_rows)


def _target(tensor: Tensor) -> Target:
    flat = _flat(tensor)
    return _Device(flat) if flat.device.type != "cpu" else BytesTarget(flat.numpy().data)


def _flat(tensor: Tensor) -> Tensor:
    """Returns the same memory as bytes."""
    assert tensor.is_contiguous(), f"a tensor of shape {tuple(tensor.shape)} does not lie in one piece"
    return tensor.detach().view(-1).view(torch.uint8)


def _buffer(num_bytes: int, pinned: bool) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy().data


class _Device:
    """The bytes of a tensor on another device, as a `Target`."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def view(self, start: int, num_bytes: int) -> memoryview | None:
        """Returns None: bytes cannot be read directly into this memory."""

    def write(self, start: int, data: memoryview) -> None:
        """Copies `data` to the device and waits for the copy, so that `data` can be overwritten."""
        self._flat[start : start + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))


Form = tuple[str, tuple[int, ...]]  # dtype and shape of a whole tensor


def forms_of(items: Iterable[Item]) -> dict[Name, Form]:
    """Returns the form of each item, by group and name."""
    return {(item.group, item.name): (dtype_name(item.tensor), item.whole.shape) for item in items}


def continued(
    items: Sequence[Item], saved: Mapping[Name, Form], where: str, reset_optimizer: bool
) -> list[Item]:
    """Returns the items that continue the tensors of a saved state; the others begin anew.

    Weights and buffers must be the saved ones. The optimizer's state must be of the same tensors, or all of
    it begins anew with `reset_optimizer`. Averaged weights (`train.ema`) begin anew if none are saved, and
    saved ones are left out if there are no items for them.

    Raises `ResumePointError` naming the tensors that differ. `where` names the saved state.
    """
    ours = forms_of(items)

    def differ(group: str) -> tuple[list[str], list[str]]:
        mine = {name: form for (of, name), form in ours.items() if of == group}
        theirs = {name: form for (of, name), form in saved.items() if of == group}
        return _only(group, mine, theirs), _only(group, theirs, mine)

    averaged = {EMA} & {group for group, _ in ours} & {group for group, _ in saved}
    for group in (MODEL, *sorted(averaged)):
        mine, theirs = differ(group)
        if mine or theirs:
            raise ResumePointError(
                f"{where} has other tensors than the model of this job: only the model has {mine[:5]}, only "
                f"the point has {theirs[:5]}; use the model that the point was made with",
                code="point.other_model",
            )
    kept = {MODEL, OPTIMIZER} | averaged
    mine, theirs = differ(OPTIMIZER)
    if mine or theirs:
        if not reset_optimizer:
            raise ResumePointError(
                f"{where} has another state of the optimizer than this job: only the job has {mine[:5]}, "
                f"only the point has {theirs[:5]}; use the point's train.optimizer, train.optimizer_args and "
                "train.param_groups, or let the optimizer's state begin anew with resume.optimizer=reset",
                code="point.other_optimizer",
            )
        kept -= {OPTIMIZER}
    return [item for item in items if item.group in kept]


def _only(group: str, some: Mapping[str, Form], others: Mapping[str, Form]) -> list[str]:
    """Names the tensors that `others` lack, or have in another form (then with the form)."""
    return sorted(
        f"{group}/{name} as {form}" if name in others else f"{group}/{name}"
        for name, form in some.items()
        if others.get(name) != form
    )


def copy_rows(item: Item, whole: Tensor) -> None:
    """Fills an item with its rows of the tensor `whole`."""
    rows = item.tensor
    if rows.numel():
        rows.copy_(whole[item.first_row : item.first_row + len(rows)] if item.whole.sharded else whole)


def copy_items(source: Sequence[Item], target: Sequence[Item], reset_optimizer: bool) -> None:
    """Fills `target` with the values of another state of the same layout; see `continued`."""
    tensors = {(item.group, item.name): item.tensor for item in source}
    kept = continued(target, forms_of(source), "the state before", reset_optimizer)
    for item in kept:
        item.tensor.copy_(tensors[item.group, item.name])
    begin_anew(target, kept)


def begin_anew(items: Sequence[Item], kept: Sequence[Item]) -> None:
    """Sets the items that are not `kept`, whose weights are filled, to their first values.

    An optimizer has made no step. Averages are those of the weights as they are now.
    """
    done = {(item.group, item.name) for item in kept}
    weights = {item.name: item.tensor for item in items if item.group == MODEL}
    for item in items:
        if (item.group, item.name) in done:
            continue
        if item.group == EMA:
            item.tensor.copy_(weights[item.name])
        else:
            item.tensor.zero_()


def dtype_name(tensor: Tensor) -> str:
    """Torch's name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")
