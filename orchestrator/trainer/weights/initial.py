"""Loads a model's initial weights from `model.init_from` or `model.pretrained`, in a folder or a bucket.

`model.init_from` is exported weights or a resume point of another run. The architecture is the job's own, and
names and shapes must match exactly. A worker that holds some rows of each tensor reads only those rows where
the files allow it (`fill_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.files.manifest import MODEL
from orchestrator.checkpoint.files.part_file import SAFETENSORS
from orchestrator.checkpoint.files.reading import PointReader
from orchestrator.errors import ConfigError, ResumePointError
from orchestrator.records.points import DamagedPointError
from orchestrator.storage.open import open_storage
from orchestrator.trainer.comm.reshard import tensor_as_bytes
from orchestrator.trainer.weights.saved_form import SavedForm, renames
from orchestrator.trainer.weights.state_tensors import Item, fill_items, own_tensors, whole_item
from orchestrator.trainer.weights.transformers_model import naming_model, without_bars
from orchestrator.trainer.weights.weight_files import (
    ADAPTER_SETTINGS,
    FILE_SIZE,
    INDEX,
    SINGLE,
    StoredTensor,
    held_in,
    is_point,
    open_point,
    stored_tensors,
)

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig

BUFFER_BYTES = 8 << 20
_Shapes = dict[str, tuple[int, ...]]
State = Mapping[str, Tensor]  # all names of a model's state; tied tensors are the same object


def named_state(model: nn.Module) -> State:
    """Returns the model's state, with its parameters and buffers themselves."""
    return dict(model.state_dict(keep_vars=True))


# ---- names and shapes
def wanted_by(config: ModelConfig, state: State) -> _Shapes:
    """Returns the names and shapes that a model with this state needs from `model.init_from`. It may be on
    the meta device.

    They are transformers' names where transformers reads the folder, else the model's.
    """
    own = dict(own_tensors(state))
    if config.factory is not None or is_point(str(config.init_from)):
        return {name: tuple(tensor.shape) for name, tensor in own.items()}
    tensors = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in own.items()}
    form = SavedForm(config, tensors, None)
    return {name: shape for group in form.groups for name, _, shape in group.becomes}


def require_fit(config: ModelConfig, state: State) -> None:
    """Raises `ConfigError` naming every tensor of `model.init_from` that does not fit.

    A tensor may be missing, in excess, or of another shape.
    """
    where = str(config.init_from)
    wanted, held = wanted_by(config, state), held_in(where)
    if config.factory is None and not is_point(where):
        # Tied tensors may be stored twice. With different values they would not be tied (`ties`).
        held = {name: shape for name, shape in held.items() if name in wanted or name not in _aliases(state)}
    problems = [f"  missing: {name} {_shape(wanted[name])}" for name in sorted(set(wanted) - set(held))]
    problems += [f"  unexpected: {name} {_shape(held[name])}" for name in sorted(set(held) - set(wanted))]
    problems += [
        f"  mismatched: {name} is {_shape(held[name])} there, {_shape(wanted[name])} in the model"
        for name in sorted(set(held) & set(wanted))
        if tuple(held[name]) != wanted[name]
    ]
    if problems:
        lines = "\n".join(problems)
        raise ConfigError(
            f"model.init_from={where} does not hold the weights of this model: {len(problems)} tensors "
            f"differ; give the model's own architecture, or leave init_from out\n{lines}",
            code="weights.other_model",
        )


def _aliases(state: State) -> set[str]:
    """Names in the state that are later names of a tensor already named."""
    return set(state) - {name for name, _ in own_tensors(state)}


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))


# ---- whole models
def fill(
    config: ModelConfig, model: nn.Module, settings: Any, attention: str | None, dtype: torch.dtype
) -> nn.Module:
    """Returns a model with the weights of `model.init_from` as `dtype` (rounded as torch does).

    `model` is a model of this job. `settings` and `attention` are arguments for transformers. Raises
    `ConfigError`, and `ResumePointError` for a point whose files are damaged.
    """
    require_fit(config, named_state(model))
    if is_point(str(config.init_from)):
        with _of_another_run(str(config.init_from)):
            _fill_whole_from_point(model, str(config.init_from))
    elif config.factory is not None:
        _fill_from_files(model, str(config.init_from))
    else:
        with naming_model(config):
            made, info = open_model(config, str(config.init_from), settings, attention, dtype)
        wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
        if wrong:
            raise ConfigError(
                f"model.init_from={config.init_from}: transformers did not load all tensors: {wrong}; give "
                "the weights of this model",
                code="weights.other_model",
            )
        return made
    return model


@contextmanager
def _of_another_run(where: str) -> Iterator[None]:
    """Within the block, damage is not that of a point of this run, which an older one could replace."""
    try:
        yield
    except DamagedPointError as error:
        raise ResumePointError(f"model.init_from={where}: {error}", code=error.code) from error


def _fill_whole_from_point(model: nn.Module, where: str) -> None:
    storage, manifest = open_point(where)
    reader = PointReader(storage, manifest)
    own = dict(own_tensors(dict(model.state_dict(keep_vars=True))))
    with torch.no_grad():
        for (group, name), saved in manifest.tensors.items():
            if group == MODEL:
                target, dtype = own[name].detach(), getattr(torch, saved.dtype)
                as_saved = target if target.dtype == dtype else torch.empty(saved.shape, dtype=dtype)
                fill_items(reader, manifest.point, [whole_item(MODEL, name, as_saved, sharded=False)])
                if as_saved is not target:
                    target.copy_(as_saved)


def _fill_from_files(model: nn.Module, where: str) -> None:
    own = dict(own_tensors(dict(model.state_dict(keep_vars=True))))
    with torch.no_grad():
        for name, stored in stored_tensors(where).items():
            own[name].detach().copy_(read_whole(stored))


def open_model(
    config: ModelConfig, where: str, settings: Any, attention: str | None, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    """Loads a model with transformers from `settings` and the stored weights, as `dtype`.

    `where` is the config's `init_from`, else its `pretrained`. Also returns transformers' loading report: the
    tensors that were missing, unexpected or mismatched, in transformers' own words.

    From a bucket, rows are read directly into the model if its tensors match those of the files one to one
    (see `fill_rows`). Otherwise all tensors of the files are held in memory while transformers converts them.
    Raises what transformers raises, `ConfigError`, `StorageError`.
    """
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {"config": settings, "dtype": dtype, "attn_implementation": attention}
    storage = open_storage(where)
    if storage.folder is not None:
        with without_bars():
            opened: Any = AutoModelForCausalLM.from_pretrained(
                storage.folder,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **how,
            )
        return opened[0], opened[1]
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        settings, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    own = own_tensors(dict(model.state_dict(keep_vars=True)))
    with torch.no_grad():
        items = [whole_item(MODEL, name, tensor.detach(), sharded=False) for name, tensor in own]
        if fill_rows(config, named_state(model), items):
            return model, {}
    tensors = {name: read_whole(each) for name, each in stored_tensors(where).items()}
    with without_bars():
        made: Any = type(model).from_pretrained(None, state_dict=tensors, output_loading_info=True, **how)
    return made[0], made[1]


def read_whole(stored: StoredTensor) -> Tensor:
    """Reads a tensor of a file into new memory.

    Raises `ConfigError` for an unknown dtype, or if the file ends before the tensor does, and `StorageError`.
    """
    name = f"{stored.storage.root}/{stored.path}"
    if not stored.dtype:
        raise ConfigError(
            f"{name} has tensors of a dtype that this version does not read; give other weights",
            code="weights.unsupported_dtype",
        )
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    wanted = math.prod(stored.shape) * tensor.itemsize
    if (
        wanted
        and stored.storage.read_into(stored.path, stored.start, tensor_as_bytes(tensor).numpy().data) < wanted
    ):
        raise ConfigError(f"{name} ends before its tensors do; restore the file", code=FILE_SIZE)
    return tensor


# ---- rows
def fill_rows(config: ModelConfig, state: State, items: Sequence[Item]) -> bool:
    """Fills the items of the group MODEL with their rows of `model.init_from`, else of `model.pretrained`.

    Values are converted to the type of the items (rounded as torch does). Of `state`, that of the job's
    model, only names, shapes and dtypes are used.

    Returns False, and writes nothing, if the stored tensors do not match the model's one to one: other names,
    several in one, quantized, or adapters. transformers must then load them as a whole. Takes 8 MiB, or the
    memory of a row; for a point in another type also the memory of one item. Raises `ConfigError` as `fill`,
    `ResumePointError`, `StorageError`.
    """
    if config.init_from is not None:
        require_fit(config, state)
        if is_point(config.init_from):
            with _of_another_run(config.init_from):
                _fill_rows_from_point(config.init_from, items)
            return True
    found = _stored_tensors(config, state)
    if found is None:
        return False
    for item in items:
        _read(found[item.name], item)
    return True


def _fill_rows_from_point(where: str, items: Sequence[Item]) -> None:
    storage, manifest = open_point(where)
    reader = PointReader(storage, manifest)
    saved = {name: getattr(torch, t.dtype) for (group, name), t in manifest.tensors.items() if group == MODEL}
    fill_items(reader, manifest.point, [item for item in items if saved[item.name] == item.tensor.dtype])
    for item in items:
        if saved[item.name] != item.tensor.dtype:
            found = torch.empty(item.tensor.shape, dtype=saved[item.name])
            fill_items(reader, manifest.point, [replace(item, tensor=found)])
            item.tensor.copy_(found)


def _stored_tensors(config: ModelConfig, state: State) -> dict[str, StoredTensor] | None:
    """Maps each tensor of the model to the stored tensor with its values; None: see `fill_rows`."""
    where = str(config.init_from or config.pretrained)
    storage = open_storage(where)
    if storage.exists(SINGLE) == storage.exists(INDEX):  # with both or neither, transformers chooses
        return None
    if storage.exists(ADAPTER_SETTINGS):
        return None
    own = dict(own_tensors(state))
    names: Mapping[str, str] | None = {name: name for name in own}
    if config.factory is None:
        names = renames(config, own)
    if names is None:
        return None
    stored = stored_tensors(where)
    aliases = set(state) - set(names.values())
    if aliases & set(stored):  # tied here but stored as two tensors; only transformers knows which one counts
        return None
    found: dict[str, StoredTensor] = {}
    for name, tensor in own.items():
        each = stored.get(names[name])
        if each is None or each.shape != tuple(tensor.shape):
            return None
        if each.dtype not in SAFETENSORS or each.made_for != "pt":
            return None
        if getattr(torch, each.dtype).is_floating_point != tensor.dtype.is_floating_point:  # quantized
            return None
        found[name] = each
    return found


def _read(stored: StoredTensor, item: Item) -> None:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    row_bytes = dtype.itemsize * (item.whole.row_bytes // item.whole.itemsize)
    for rows in _row_ranges(item, dtype.itemsize):
        part = _part(item, rows)
        straight = part.dtype == dtype and part.device.type == "cpu"
        found = part if straight else torch.empty(part.shape, dtype=dtype)
        into = tensor_as_bytes(found).numpy().data
        start = stored.start + (item.first_row + rows.start) * row_bytes
        read = stored.storage.read_into(stored.path, start, into)
        if read != len(into):
            raise ConfigError(
                f"{stored.storage.root}/{stored.path} ends within {item.name}: {read} bytes of {len(into)} "
                "are left; restore the file",
                code=FILE_SIZE,
            )
        if not straight:
            part.copy_(found)


def _row_ranges(item: Item, itemsize: int) -> Iterator[range]:
    """Yields the rows that this member holds in ranges that fit into the buffer; at least one row each."""
    num_rows = len(item.tensor) if item.whole.shape else 1
    row_bytes = max(1, item.whole.row_bytes // item.whole.itemsize * itemsize)
    step = max(1, BUFFER_BYTES // row_bytes)
    for first in range(0, num_rows, step):
        yield range(first, min(first + step, num_rows))


def _part(item: Item, rows: range) -> Tensor:
    return item.tensor[rows.start : rows.stop] if item.whole.shape else item.tensor
