"""Rows of the first weights, read from files straight to where a worker holds them: nobody holds a tensor
whole for it.

It knows names and forms of tensors and where their bytes lie; nothing of groups, optimizers or steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.parts.dtypes import SAFETENSORS
from orchestrator.parts.reading import PointReader
from orchestrator.storage.open import open_storage
from orchestrator.trainer.first_weights import open_point, require_fit
from orchestrator.trainer.loading import fill_items
from orchestrator.trainer.reshard import tensor_as_bytes
from orchestrator.trainer.saved_form import renames
from orchestrator.trainer.state import MODEL, Item, own_tensors
from orchestrator.trainer.weight_files import INDEX, SINGLE, StoredTensor, is_point, stored_tensors

if TYPE_CHECKING:
    from orchestrator.config.train_sections import ModelConfig

BUFFER_BYTES = 8 << 20


def fill_rows(config: ModelConfig, model: nn.Module, items: Sequence[Item]) -> bool:
    """Fills the items of the group MODEL with their rows of `model.init_from`, else of `model.pretrained`, in
    the type of the items (rounded as torch does). `model` is the job's, of shapes alone.

    False, and nothing is written, where the tensors there are not, each by itself, those of the model: other
    names, several in one, quantized, or adapters. transformers must load them then, whole. Takes 8 MiB, or a
    row, and of a point in another type one item more. Raises `ConfigError` as `first_weights.fill`,
    `ResumePointError`, `StorageError`.
    """
    if config.init_from is not None:
        require_fit(config, model)
        if is_point(config.init_from):
            _fill_from_point(config.init_from, items)
            return True
    found = _stored_tensors(config, model)
    if found is None:
        return False
    for item in items:
        _read(found[item.name], item)
    return True


# ---- points
def _fill_from_point(where: str, items: Sequence[Item]) -> None:
    storage, manifest = open_point(where)
    reader = PointReader(storage, manifest)
    saved = {name: getattr(torch, t.dtype) for (group, name), t in manifest.tensors.items() if group == MODEL}
    fill_items(reader, manifest.point, [item for item in items if saved[item.name] == item.tensor.dtype])
    for item in items:
        if saved[item.name] != item.tensor.dtype:
            found = torch.empty(item.tensor.shape, dtype=saved[item.name])
            fill_items(reader, manifest.point, [replace(item, tensor=found)])
            item.tensor.copy_(found)


# ---- folders
def _stored_tensors(config: ModelConfig, model: nn.Module) -> dict[str, StoredTensor] | None:
    """To each tensor of the model the one in the files that has its values; None: see `fill_rows`."""
    where = str(config.init_from or config.pretrained)
    storage = open_storage(where)
    if storage.exists(SINGLE) == storage.exists(INDEX):  # with both, or none, transformers chooses
        return None
    if storage.exists("adapter_config.json"):
        return None
    own = dict(own_tensors(dict(model.state_dict(keep_vars=True))))
    names: Mapping[str, str] | None = {name: name for name in own}
    if config.factory is None:
        names = renames(config, own)
    if names is None:
        return None
    stored = stored_tensors(where)
    aliases = set(model.state_dict()) - set(names.values())
    if aliases & set(stored):  # tied here, and two tensors there: which counts, transformers knows
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
                "are left; restore the file"
            )
        if not straight:
            part.copy_(found)


def _row_ranges(item: Item, itemsize: int) -> Iterator[range]:
    """The rows that this member holds, so many at a time as fit into the buffer; at least one."""
    num_rows = len(item.tensor) if item.whole.shape else 1
    row_bytes = max(1, item.whole.row_bytes // item.whole.itemsize * itemsize)
    step = max(1, BUFFER_BYTES // row_bytes)
    for first in range(0, num_rows, step):
        yield range(first, min(first + step, num_rows))


def _part(item: Item, rows: range) -> Tensor:
    return item.tensor[rows.start : rows.stop] if item.whole.shape else item.tensor
