"""Decides which tensors of a model stay tied, and keeps buffers shared when a model is moved or made.

The ties follow the stored weights, not only the configuration. A folder may have `tie_word_embeddings: true`
and nevertheless contain a separate head, as a merged adapter does. transformers then trains two tensors, and
so does every layout here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from orchestrator.errors import ConfigError
from orchestrator.trainer.weights.weight_files import StoredTensor, held_in, is_point, stored_tensors

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig

_BUFFER_BYTES = 8 << 20


def follow_files(config: ModelConfig, model: Any) -> None:
    """Unties tensors that `model.init_from`, else `model.pretrained`, stores as two.

    If it has no weight files, the configuration decides. Raises `ConfigError`, `StorageError`.
    """
    where = config.init_from or config.pretrained
    if where is None or not getattr(model, "all_tied_weights_keys", None):
        return
    if is_point(where):
        follow_names(model, held_in(where))
        return
    try:
        stored = stored_tensors(where)
    except ConfigError:
        if config.init_from is not None and config.init_from != config.pretrained:
            raise
        return
    untie(model, _separate(model, stored))


def follow_names(model: Any, names: Collection[str]) -> None:
    """Unties tensors that a state with tensors of these names holds as two."""
    held: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    aliases = [name for name, tensor in held.items() if first.setdefault(id(tensor), name) != name]
    untie(model, [name for name in aliases if name in names and first[id(held[name])] in names])


def untie(model: Any, names: Sequence[str]) -> None:
    """Gives each of these tied tensors its own memory, with the same values."""
    if not names:
        return
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if (parameter := module._parameters.get(leaf)) is not None:
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            module._parameters[leaf] = copied
        else:
            module._buffers[leaf] = module._buffers[leaf].detach().clone()
    held = dict(model.state_dict(keep_vars=True))
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(tied.items()):
        if held.get(target) is not held.get(source):
            del tied[target]


def note_ties(model: Any) -> None:
    """Sets `tie_word_embeddings` to false in the model's configuration if nothing is tied.

    The configuration is saved with the model.
    """
    if getattr(model, "all_tied_weights_keys", None):
        return
    for module in model.modules():
        settings = getattr(module, "config", None)
        if getattr(settings, "tie_word_embeddings", False) and getattr(module, "_tied_weights_keys", None):
            settings.tie_word_embeddings = False  # type: ignore[union-attr]


def kept_in_float32(model: Any, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Returns a predicate: whether transformers keeps the tensor of a name in float32.

    This applies when transformers loads the model as `dtype`.
    """
    plan = model._get_dtype_plan(dtype) if dtype is not None and hasattr(model, "_get_dtype_plan") else {}
    if not plan:
        return lambda name: False
    pattern = re.compile("|".join(each.replace("*", ".*") for each in plan))
    return lambda name: pattern.search(name) is not None


def keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Gives parameters and persistent buffers the types that transformers loads them in from files."""
    is_kept = kept_in_float32(model, dtype)
    for name, tensor in dict(model.state_dict(keep_vars=True)).items():
        if is_kept(name) and tensor.is_floating_point() and tensor.dtype != torch.float32:
            tensor.data = tensor.data.float()


# --------------------------------------------------------------------------------------------- shared buffers
@contextmanager
def shared_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Wraps code that may replace buffers in the modules of `model`, and keeps shared buffers shared.

    Buffers that were one tensor before are one afterwards: the one under the first name. When torch moves a
    model to another device or type, it keeps parameters tied, but makes one tensor per name of a buffer. The
    state would then have other names.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    kept: list[Tensor] = []  # an address is unique only while its tensor lives
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append(buffer)
                places.setdefault(id(buffer), []).append((module, name))
    yield
    for (first, name), *others in places.values():
        for module, alias in others:
            module._buffers[alias] = first._buffers[name]


# ---------------------------------------------------------------------------------------------------- inside
def _separate(model: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Returns the tied names that files store separately, with other values.

    These are the tensors that transformers does not tie (`PreTrainedModel.tie_weights`).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    own = dict(model.state_dict(keep_vars=True))
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if name not in own and key in own:
            name, _ = rename_source_key(key, [], [], model.base_model_prefix, own)
        found.setdefault(name, tensor)
    return [
        target
        for target, source in model.all_tied_weights_keys.items()
        if target in found and source in found and not _equal(found[target], found[source], own[target].dtype)
    ]


def _equal(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Whether two stored tensors have the same values as `dtype`. Reads 8 MiB of each at a time."""
    if one.shape != other.shape or not one.dtype or not other.dtype:
        return False
    size, step = math.prod(one.shape), _BUFFER_BYTES // 8
    with _disable_current_modes(), torch.device("cpu"):  # also while weights are deferred
        return all(
            torch.equal(_part(one, part, dtype), _part(other, part, dtype))
            for part in (range(first, min(first + step, size)) for first in range(0, size, step))
        )


def _part(stored: StoredTensor, part: range, dtype: torch.dtype) -> Tensor:
    kind: torch.dtype = getattr(torch, stored.dtype)
    data = bytearray(len(part) * kind.itemsize)
    stored.storage.read_into(stored.path, stored.start + part.start * kind.itemsize, memoryview(data))
    return torch.frombuffer(data, dtype=kind).to(dtype)
