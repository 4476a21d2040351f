"""The first weights of a new run, where `model.init_from` names them: a folder of exported weights, or a
resume point of another run.

The architecture is the job's own; names and shapes must be exactly its. It reads no optimizer state and
writes nothing. Reading what a folder holds needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError
from orchestrator.parts.documents import read_manifest
from orchestrator.parts.manifest import MODEL, Manifest, PartDamage, damaged
from orchestrator.parts.node_storage import run_storage
from orchestrator.parts.reading import PointReader
from orchestrator.storage.files import Storage

if TYPE_CHECKING:
    import torch
    from torch import nn

    from orchestrator.config.train_sections import ModelConfig

SINGLE, INDEX, PARTS = "model.safetensors", "model.safetensors.index.json", "parts.json"
Shapes = dict[str, tuple[int, ...]]


def is_point(where: str) -> bool:
    """Whether `where` is the folder of a resume point (else it is one of exported weights)."""
    return (folder_of(where) / PARTS).is_file()


def folder_of(where: str) -> Path:
    """`model.init_from` as an absolute path."""
    return Path(os.path.abspath(os.path.expanduser(where)))


def held_in(where: str) -> Shapes:
    """Names and shapes of the weights that lie there. Raises `ConfigError` if there are none to read."""
    if is_point(where):
        _, manifest = open_point(where)
        return {name: each.shape for (group, name), each in manifest.tensors.items() if group == MODEL}
    try:
        return {name: shape for file in weight_files(where) for name, shape in _header(file).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.init_from={where} cannot be read: {error}; give another folder") from error


def weight_files(where: str) -> list[Path]:
    """The files of weights in a folder, by name. Raises `ConfigError` if there are none."""
    folder = folder_of(where)
    try:
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text())
            return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"model.init_from={where}: {INDEX} cannot be read: {error}") from error
    if not (folder / SINGLE).is_file():
        raise ConfigError(
            f"model.init_from={where}: there is no {SINGLE}, no {INDEX} and no {PARTS} in it; give a folder "
            "that "
            "`orchestrator export` or transformers has made, or a resume point's, <run>/points/<name>"
        )
    return [folder / SINGLE]


def wanted_by(config: ModelConfig, model: nn.Module) -> Shapes:
    """Names and shapes that `model`, which may be one of shapes alone, needs of `model.init_from`:
    transformers' own where that reads the folder, else the model's.
    """
    from orchestrator.trainer.saved_form import SavedForm
    from orchestrator.trainer.state import own_tensors

    own = dict(own_tensors(dict(model.state_dict(keep_vars=True))))
    if config.factory is not None or is_point(str(config.init_from)):
        return {name: tuple(tensor.shape) for name, tensor in own.items()}
    tensors = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in own.items()}
    form = SavedForm(config, tensors, None)
    return {name: shape for group in form.groups for name, _, shape in group.becomes}


def require_fit(config: ModelConfig, model: nn.Module) -> None:
    """Raises `ConfigError` naming every tensor that `model.init_from` lacks, has beside the model's, or has
    in another shape.
    """
    where = str(config.init_from)
    wanted, held = wanted_by(config, model), held_in(where)
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
            f"model.init_from={where} does not hold the weights of this model, {len(problems)} tensors "
            "differ; "
            f"give the model's own architecture, or leave init_from out\n{lines}"
        )


def fill(
    config: ModelConfig, model: nn.Module, settings: Any, attention: str | None, dtype: torch.dtype
) -> nn.Module:
    """A model with the weights of `model.init_from` as `dtype` (rounded as torch does, where they have more
    bits). `model` is one of this job; `settings` and `attention` are transformers'. Raises `ConfigError`, and
    `ResumePointError` for a point whose files are damaged.
    """
    require_fit(config, model)
    if is_point(str(config.init_from)):
        _fill_from_point(model, str(config.init_from))
    elif config.factory is not None:
        _fill_from_files(model, str(config.init_from))
    else:
        from transformers import AutoModelForCausalLM

        from orchestrator.trainer.model import naming_model

        with naming_model(config):
            opened: Any = AutoModelForCausalLM.from_pretrained(
                folder_of(str(config.init_from)),
                config=settings,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        made: nn.Module = opened[0]
        info: dict[str, Any] = opened[1]
        wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
        if wrong:
            raise ConfigError(
                f"model.init_from={config.init_from}: transformers did not load all of it: {wrong}"
            )
        return made
    return model


def _fill_from_point(model: nn.Module, where: str) -> None:
    import torch

    from orchestrator.trainer.loading import fill_items
    from orchestrator.trainer.state import own_tensors, whole_item

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
    import torch
    from safetensors import safe_open

    from orchestrator.trainer.state import own_tensors

    own = dict(own_tensors(dict(model.state_dict(keep_vars=True))))
    with torch.no_grad():
        for path in weight_files(where):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no mapping
                    own[name].detach().copy_(file.get_tensor(name))


def open_point(where: str) -> tuple[Storage, Manifest]:
    """The storage of the run whose point's folder `where` is, and the point's tensors. Raises
    `ResumePointError`.
    """
    folder = folder_of(where)
    storage = run_storage(str(folder.parent.parent))
    try:
        return storage, read_manifest(storage, folder.name)
    except PartDamage as error:
        raise damaged(folder.name, error) from error


def _header(path: Path) -> Shapes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is not a valid safetensors file")
        header: Mapping[str, Any] = json.loads(file.read(length))
    end = max((each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"), default=0)
    if path.stat().st_size != 8 + length + end:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, its header says {8 + length + end}")
    return {name: tuple(each["shape"]) for name, each in header.items() if name != "__metadata__"}


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))
