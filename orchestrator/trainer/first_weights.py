"""The first weights of a new run, where `model.init_from` names them: exported weights, or a resume point of
another run, in a folder or in a bucket.

The architecture is the job's own; names and shapes must be exactly its. It reads no optimizer state and
writes nothing. Reading what a folder holds needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError, ResumePointError
from orchestrator.parts.documents import read_manifest
from orchestrator.parts.manifest import MODEL, Manifest, PartDamage, damaged
from orchestrator.parts.node_storage import run_storage
from orchestrator.parts.reading import PointReader
from orchestrator.records.points import DamagedPointError
from orchestrator.storage.files import Storage
from orchestrator.storage.open import absolute, split
from orchestrator.trainer.weight_files import is_point, stored_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from orchestrator.config.train_sections import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def held_in(where: str) -> Shapes:
    """Names and shapes of the weights that lie there. Raises `ConfigError` if there are none to read."""
    if is_point(where):
        _, manifest = open_point(where)
        return {name: each.shape for (group, name), each in manifest.tensors.items() if group == MODEL}
    try:
        return {name: each.shape for name, each in stored_tensors(where).items()}
    except ConfigError as error:
        raise ConfigError(f"model.init_from: {error}") from error


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
    if config.factory is None and not is_point(where):
        # what is tied may be there twice: with other values it would not be tied (`stored_ties`)
        held = {name: shape for name, shape in held.items() if name in wanted or name not in _aliases(model)}
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


def _aliases(model: nn.Module) -> set[str]:
    """Names of tensors of the state that come after another name of the same tensor."""
    from orchestrator.trainer.state import own_tensors

    held = dict(model.state_dict(keep_vars=True))
    return set(held) - {name for name, _ in own_tensors(held)}


def fill(
    config: ModelConfig, model: nn.Module, settings: Any, attention: str | None, dtype: torch.dtype
) -> nn.Module:
    """A model with the weights of `model.init_from` as `dtype` (rounded as torch does, where they have more
    bits). `model` is one of this job; `settings` and `attention` are transformers'. Raises `ConfigError`, and
    `ResumePointError` for a point whose files are damaged.
    """
    require_fit(config, model)
    if is_point(str(config.init_from)):
        try:
            _fill_from_point(model, str(config.init_from))
        except DamagedPointError as error:  # no point of this run: nothing older can take its place
            raise ResumePointError(f"model.init_from={config.init_from}: {error}") from error
    elif config.factory is not None:
        _fill_from_files(model, str(config.init_from))
    else:
        from orchestrator.trainer.model import naming_model
        from orchestrator.trainer.opened_model import open_model

        with naming_model(config):
            made, info = open_model(config, str(config.init_from), settings, attention, dtype)
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

    from orchestrator.trainer.opened_model import read_whole
    from orchestrator.trainer.state import own_tensors

    own = dict(own_tensors(dict(model.state_dict(keep_vars=True))))
    with torch.no_grad():
        for name, stored in stored_tensors(where).items():
            own[name].detach().copy_(read_whole(stored))


def open_point(where: str) -> tuple[Storage, Manifest]:
    """The storage of the run whose point lies at `where`, and the point's tensors. Raises `ResumePointError`,
    `StorageError`.
    """
    points, name = split(absolute(where))
    storage = run_storage(split(points)[0])
    try:
        return storage, read_manifest(storage, name)
    except PartDamage as error:
        raise ResumePointError(f"model.init_from={where}: {damaged(name, error)}") from error


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))
