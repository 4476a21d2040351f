"""The form in which transformers saves a model.

It consists of the tensors' names in the files, the tensors that are split or merged on the way, and the
configuration files beside them. The form is computed by transformers itself, with a model on torch's meta
device. No weights are read or written.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestrator.errors import ResumePointError
from orchestrator.trainer.weights.state_tensors import own_tensors, tensor_bytes
from orchestrator.trainer.weights.ties import kept_in_float32, note_ties
from orchestrator.trainer.weights.transformers_model import (
    GENERATION,
    SETTINGS,
    naming_model,
    settings_folder,
    shape_only,
    transformers_settings,
)

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # name → (torch's name of the dtype, shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedGroup:
    """Tensors of the model that become tensors of the files together.

    `names` are as the model has them. `becomes` has the name, type and shape of each resulting tensor.
    """

    names: tuple[str, ...]
    becomes: tuple[tuple[str, str, tuple[int, ...]], ...]


class SavedForm:
    """The saved form of the model of `config`, with floating-point numbers as `dtype` (None: unchanged).

    `groups` are built from `tensors`, those of a point. `files` are config.json and generation_config.json.
    Raises `ResumePointError` if the installed transformers builds a model with other tensors, `ConfigError`
    if it cannot build one.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Shapes,
        dtype: str | None,
        special_ids: Mapping[str, int | None] | None = None,
    ) -> None:
        """`special_ids`: the tokenizer's `bos_token_id` and `eos_token_id` (None: it has none).

        They are used for a `model.config` that does not set them. transformers would otherwise use those of
        some other tokenizer.
        """
        self._dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        with torch.device("meta"):
            settings, attention = transformers_settings(config, "cpu", False)
            self._model: Any = shape_only(config, settings, attention, tensors)
        self._is_kept = kept_in_float32(self._model, self._dtype)
        self._saved_names = self._names(tensors)
        self._converts = True  # until it is known
        self._converts = self._changes_any(tensors)
        self.groups = self._grouped(tensors)
        self.files = self._files(config, tensors, special_ids or {})

    def make(
        self, group: SavedGroup, data: Mapping[str, tuple[bytearray, str, tuple[int, ...]]]
    ) -> dict[str, Any]:
        """Returns the bytes of what a group becomes, by name. `data`: bytes, type and shape of each name."""
        found = {self._saved_names[name]: _tensor(*data[name]) for name in group.names}
        made = {name: self._cast(name, tensor) for name, tensor in self._converted(found).items()}
        return {name: tensor_bytes(tensor) for name, tensor in made.items()}

    def renames(self, tensors: Shapes) -> dict[str, str] | None:
        """Returns the saved name of each tensor, if converting only renames them; otherwise None."""
        meta = _meta(tensors)
        owners = {meta[own].untyped_storage()._cdata: own for own in self._saved_names}
        made = self._converted({saved: meta[own] for own, saved in self._saved_names.items()})
        found: dict[str, str] = {}
        for name, tensor in made.items():
            own = owners.get(tensor.untyped_storage()._cdata, "")
            if not own or (tensor.shape, tensor.stride()) != (meta[own].shape, meta[own].stride()):
                return None
            found[own] = name
        return found if found.keys() == tensors.keys() and len(made) == len(found) else None

    # ------------------------------------------------------------------------------------------------ inside
    def _names(self, tensors: Shapes) -> dict[str, str]:
        """Maps each tensor of a point to the name under which transformers saves it.

        A point has each tensor once, under the first of its names. Tensors that transformers does not save
        are left out.
        """
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        held: dict[str, Tensor] = dict(self._model.state_dict(keep_vars=True))
        own = dict(own_tensors(held))
        theirs = {name: (str(t.dtype), tuple(t.shape)) for name, t in own.items()}
        missing, unknown = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
        other = [n for n in sorted(set(own) & set(tensors)) if theirs[n][1] != tuple(tensors[n][1])]
        if missing or unknown or other:
            raise ResumePointError(
                "the installed transformers builds another model from this run's configuration: only the "
                f"model has {missing[:5]}, only the point has {unknown[:5]}, and the shapes of {other[:5]} "
                "differ; export with the version of transformers that trained the run",
                code="export.other_model",
            )
        ignored = set(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        saved = {name: tensor for name, tensor in held.items() if name not in ignored}
        kept = {id(held[name]): name for name in remove_tied_weights_from_state_dict(saved, self._model)}
        return {name: kept[id(tensor)] for name, tensor in own.items() if id(tensor) in kept}

    def _changes_any(self, tensors: Shapes) -> bool:
        """Whether transformers saves any tensor in another form. Most models have none, and each conversion
        walks all modules.
        """
        meta = _meta(tensors)
        held = {saved: meta[own] for own, saved in self._saved_names.items()}
        made = self._converted(held)
        return made.keys() != held.keys() or any(made[name] is not tensor for name, tensor in held.items())

    def _grouped(self, tensors: Shapes) -> tuple[SavedGroup, ...]:
        """Finds the smallest groups that yield the same tensors as all tensors at once."""
        meta = _meta({own: tensors[own] for own in self._saved_names})
        whole = self._form_of(meta, tuple(meta))
        by: Sequence[Callable[[str], str]] = (str, _layer_of, lambda name: "")
        for key in by:
            names: dict[str, list[str]] = {}
            for own in meta:
                names.setdefault(key(own), []).append(own)
            groups = tuple(
                SavedGroup(names=tuple(of), becomes=self._form_of(meta, tuple(of))) for of in names.values()
            )
            if sorted(form for group in groups for form in group.becomes) == sorted(whole):
                return groups
        raise AssertionError("one group of all gives what all give")

    def _form_of(
        self, meta: Mapping[str, Tensor], names: tuple[str, ...]
    ) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        made = self._converted({self._saved_names[name]: meta[name] for name in names})
        return tuple(
            (name, str(self._cast(name, t).dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in made.items()
        )

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """`cast`, except for tensors that transformers keeps in float32."""
        return tensor if self._is_kept(name) else cast(tensor, self._dtype)

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts tensors as transformers does when it saves. Some architectures are split differently in
        files.
        """
        from transformers.core_model_loading import revert_weight_conversion

        if not self._converts:
            return {name: tensor.contiguous() for name, tensor in tensors.items()}
        return {
            name: tensor.contiguous()
            for name, tensor in revert_weight_conversion(self._model, tensors).items()
        }

    def _files(
        self, config: ModelConfig, tensors: Shapes, special_ids: Mapping[str, int | None]
    ) -> dict[str, bytes]:
        model: Any = self._model
        given = config.config or {}
        missing = {
            name: number
            for name, number in special_ids.items()
            if config.pretrained is None and name not in given
        }
        for name, number in missing.items():
            with suppress(Exception):  # some types of configurations require a number and keep theirs
                setattr(model.config, name, number)
            if getattr(model, "generation_config", None) is not None:
                setattr(model.generation_config, name, number)
        model.config.dtype = str(self._dtype).removeprefix("torch.") if self._dtype else main_dtype(tensors)
        note_ties(model)
        model.config.architectures = [type(model).__name__]
        with naming_model(config), tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            if model.can_generate():
                own = Path(settings_folder(config.pretrained or "")) / GENERATION
                if config.pretrained is not None and own.is_file():
                    (Path(folder) / GENERATION).write_bytes(own.read_bytes())
                else:
                    model.generation_config.save_pretrained(folder)
            paths = [Path(folder) / name for name in (SETTINGS, GENERATION)]
            return {path.name: path.read_bytes() for path in paths if path.is_file()}


def main_dtype(tensors: Shapes) -> str:
    """Returns the floating-point type of most numbers in these tensors; of several, the first by name."""
    sizes: dict[str, int] = {}
    for dtype, shape in tensors.values():
        if getattr(torch, dtype).is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
    return max(sorted(sizes), key=sizes.__getitem__)


def shapes_of(model: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns type and shape of each tensor of the model's state, by name."""
    own = own_tensors(dict(model.state_dict(keep_vars=True)))
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in own}


def renames(config: ModelConfig, own: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Maps the tensors `own` of a model to the names of the equal tensors in its files.

    Equal tensors have the same values in the same order. `own` may be in any form. Returns None if some are
    saved in another form: split, merged, transposed, or not at all. Raises as `SavedForm`.
    """
    shapes = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in own.items()}
    return SavedForm(config, shapes, None).renames(shapes)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Casts floating-point numbers to `dtype`, rounded as torch does. Others stay unchanged."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def cast_name(dtype: str, wanted: str) -> str:
    """Returns the type that numbers of `dtype` have after `cast` to `wanted`."""
    return wanted if getattr(torch, dtype).is_floating_point else dtype


def cast_bytes(data: bytearray, dtype: str, wanted: str) -> memoryview:
    """`cast` for a tensor's bytes."""
    size = len(data) // getattr(torch, dtype).itemsize
    return tensor_bytes(cast(_tensor(data, dtype, (size,)), getattr(torch, wanted)))


def _meta(tensors: Shapes) -> dict[str, Tensor]:
    """Returns tensors without values."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (dtype, shape) in tensors.items()
    }


def _tensor(data: bytearray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor that shares the memory of these bytes."""
    kind = getattr(torch, dtype)
    return torch.frombuffer(data, dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def _layer_of(name: str) -> str:
    """Returns the part of a tensor's name up to its layer number; empty without one."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""
