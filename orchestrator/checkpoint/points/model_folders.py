"""The folders of weights that a run reads: where relative paths lead, and the configuration kept of one.

A relative path is looked up from the current folder. Attempts record to which folder it led (`places` in the
journal), so that a process in another folder finds the weights. The run keeps `config.json` of
`model.pretrained`, from the first attempt that reads it (`model/0001.json`). So an export, and a resume from
a point, do not need the folder.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, TypeVar

import orjson
from blake3 import blake3

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.ray_inventory import JOB_COPIES
from orchestrator.config.field_rules import nested
from orchestrator.config.loading import parse_config
from orchestrator.config.sections import FrozenModelConfig, ModelConfig
from orchestrator.errors import (
    LaterFormatError,
    OrchestratorError,
    RefusedError,
    ResumePointError,
    StorageError,
)
from orchestrator.history.journal.journal_reader import beginning_of
from orchestrator.json_form import LaterSealError, SealError, canonical, seal, unseal
from orchestrator.storage.files import Storage
from orchestrator.storage.open import absolute, is_bucket, open_storage
from orchestrator.trainer.weights.weight_files import holds_model, holds_weights

MODEL_FOLDER = "model"
SETTINGS, GENERATION = "config.json", "generation_config.json"
FORMAT = 1  # of the files in `model/`
# Keys that name a version or a place, and no part of a model
_UNREAD = ("transformers_version", "_name_or_path")
_OF_FILES = (*_UNREAD, "architectures", "dtype", "torch_dtype")  # of the files of weights
_MAX_ATTEMPTS = 20  # the newest attempts, whose journals are opened
_MAX_FORKS = 20  # forks of forks; ends circles of run.json files that name each other
_Model = TypeVar("_Model", ModelConfig, FrozenModelConfig)


# ----------------------------------------------------------------------------------------- paths of weights
_WEIGHTS = re.compile(r"model\.(frozen\.[A-Za-z]\w*\.)?(pretrained|init_from)\s*=")


def names_weights(override: str) -> bool:
    """Whether an override (`key=value`) says where weights of a model are."""
    return _WEIGHTS.match(override.strip()) is not None


def as_read(
    store: RunStore, attempt: int, flat: Mapping[str, Any], model: ModelConfig, overrides: Sequence[str]
) -> ModelConfig:
    """Returns `model` with paths at which its weights are read, to look at a state of an attempt.

    `flat` is the attempt's configuration, of which the model is made with `overrides`; those of
    `names_weights` name other places. Raises `RefusedError` if one gives another model than the attempt's.
    Everything that loads a point compares the digests of weights that the point does not hold.
    """
    if not any(map(names_weights, overrides)):
        return located(model, store, recorded_first=True)
    old, new = model_of(flat), located(model, store)
    if old.pretrained != new.pretrained:
        was = located(old, store, recorded_first=True)
        if why := why_other(store.storage, attempt, was, new):
            raise RefusedError(
                f"attempt {attempt} of {store.storage.root} was started with model.pretrained="
                f"{old.pretrained}, and model.pretrained={new.pretrained} is another model ({why}); give the "
                "place where the same model is now",
                code="weights.changed",
            )
    return new


def model_given(flat: Mapping[str, Any], overrides: Sequence[str]) -> ModelConfig:
    """Returns the model of a flat configuration, with `overrides` of `names_weights`.

    Raises `RefusedError` for others, and `ConfigError`.
    """
    if not overrides:
        return model_of(flat)
    if wrong := [each for each in overrides if not names_weights(each)]:
        raise RefusedError(
            f"{wrong[0]}: an export takes its configuration from the point; only the places of weights "
            "(model.pretrained, model.init_from) can be given",
            code="command.override_not_allowed",
        )
    return parse_config(nested({**flat, "resume.from": "latest"}), overrides).model


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the `model` section of a point's flat configuration."""
    fields = {path.removeprefix("model."): v for path, v in config.items() if path.startswith("model.")}
    return ModelConfig.model_validate_json(orjson.dumps(fields))


def with_paths(model: ModelConfig, find: Callable[[str], str]) -> ModelConfig:
    """Returns the model with `find(path)` in place of each path of weights, also of its frozen models."""

    def changed(each: _Model) -> _Model:
        named = {"pretrained": each.pretrained, "init_from": each.init_from}
        return each.model_copy(update={name: find(path) for name, path in named.items() if path is not None})

    frozen = {name: changed(each) for name, each in model.frozen.items()}
    return changed(model).model_copy(update={"frozen": frozen})


def located(model: ModelConfig, store: RunStore, *, recorded_first: bool = False) -> ModelConfig:
    """Returns the model with paths that lead to its weights from the current folder.

    A relative path that leads to no folder becomes the place that the newest attempt recorded for it and
    where there still is one. With `recorded_first` such a place comes before the current folder: for commands
    that take the configuration from the run. Raises `StorageError`.
    """
    return with_paths(model, _finder(store, recorded_first))


def places_of(model: ModelConfig, store: RunStore) -> dict[str, str]:
    """Returns the folders to which the relative paths of a model's weights lead (`located`), absolute.

    Folders in a Ray job's copy of its working directory are left out, because Ray deletes it.
    """
    found, find = dict[str, str](), _finder(store, recorded_first=False)

    def note(path: str) -> str:
        place = absolute(find(path))
        if _is_relative(path) and _is_folder(place) and JOB_COPIES not in PurePath(place).parts:
            found[path] = place
        return path

    with_paths(model, note)
    return found


def _finder(store: RunStore, recorded_first: bool) -> Callable[[str], str]:
    recorded: list[Mapping[str, str]] | None = None

    def find(path: str) -> str:
        nonlocal recorded
        if not _is_relative(path) or (not recorded_first and _is_folder(path)):
            return path
        recorded = list(_recorded(store)) if recorded is None else recorded
        places = (places[path] for places in recorded if path in places)
        return next(filter(_is_folder, places), path)

    return find


def _is_relative(path: str) -> bool:
    return not is_bucket(path) and not os.path.isabs(os.path.expanduser(path))


def _is_folder(path: str) -> bool:
    return Path(absolute(path)).is_dir()


def _recorded(store: RunStore, num_forks: int = _MAX_FORKS) -> Iterator[Mapping[str, str]]:
    """Yields the places that attempts recorded, the newest first, then those of the run that it forked."""
    for number in sorted(store.claim_numbers(), reverse=True)[:_MAX_ATTEMPTS]:
        yield (beginning_of(store.storage, number) or {}).get("places") or {}
    run = store.read_run()
    if run is not None and run.forked_from is not None and num_forks:
        with suppress(OrchestratorError):  # the run needs nothing of the other one
            yield from _recorded(RunStore(store.storage.beside(run.forked_from.run)), num_forks - 1)


# ------------------------------------------------------------------------------------ the kept configuration
def keep_configuration(storage: Storage, attempt: int, model: ModelConfig) -> None:
    """Keeps the configuration of `model.pretrained` for points from this attempt on, unless that is kept.

    Keeps nothing if it cannot be read here. Raises `StorageError` if the run's storage cannot be written.
    """
    if model.pretrained is None:
        return
    files = dict[str, str]()
    try:
        there = open_storage(model.pretrained)
        for name in (SETTINGS, GENERATION):
            with suppress(FileNotFoundError):
                files[name] = there.read(name).decode()
    except (StorageError, UnicodeDecodeError):
        return
    if SETTINGS in files and kept_configuration(storage, attempt) != files:
        storage.create(_path(attempt), seal({"format": FORMAT, "files": files}))


def kept_configuration(storage: Storage, attempt: int) -> dict[str, str] | None:
    """Returns the files of `model.pretrained` for points of an attempt, by name; None if none are kept.

    Raises `ResumePointError` if the file is damaged, `LaterFormatError`, `StorageError`.
    """
    found = [int(name.partition(".")[0]) for name in storage.list(MODEL_FOLDER) if _is_kept(name)]
    number = max((each for each in found if each <= attempt), default=None)
    if number is None:
        return None
    path = f"{storage.root}/{_path(number)}"
    try:
        content: dict[str, Any] = unseal(storage.read(_path(number)))
    except LaterSealError as error:
        raise LaterFormatError(f"{path} {error}") from error
    except (SealError, FileNotFoundError) as error:
        raise ResumePointError(
            f"{path} is damaged: {error}; restore it from a copy, or delete it: then the folder of "
            "model.pretrained is read",
            code="run.damaged_model_file",
        ) from error
    if content["format"] != FORMAT:
        raise LaterFormatError(
            f"{path} has format {content['format']}, this version reads {FORMAT}; use the version that wrote "
            "it, or a later one"
        )
    return dict(content["files"])


def copy_configuration(source: Storage, attempt: int, target: Storage) -> None:
    """Copies the configuration kept for points of an attempt into a fork of one of them."""
    files = kept_configuration(source, attempt)
    if files is not None and not target.exists(_path(0)):
        target.create(_path(0), seal({"format": FORMAT, "files": files}))


def configuration_digest(text: str) -> str:
    """Returns the blake3 of a `config.json`, without keys that name a version or a place."""
    values = json.loads(text)
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if name not in _UNREAD}
    return blake3(canonical(values)).hexdigest()


@contextmanager
def kept_folder(model: ModelConfig, storage: Storage, attempt: int) -> Iterator[ModelConfig]:
    """Yields the model with the configuration that is kept for points of an attempt, as a folder.

    `model.pretrained` is then a temporary folder without weights. Without a kept one the model stays as it
    is. Raises as `kept_configuration`.
    """
    kept = kept_configuration(storage, attempt) if model.pretrained is not None else None
    if kept is None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, text in kept.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        yield model.model_copy(update={"pretrained": folder, "init_from": folder})


def without_folder(model: ModelConfig, storage: Storage, attempt: int) -> ModelConfig:
    """Returns the model for a state that is a point's, without the places of weights where none are.

    In place of `model.pretrained` it then has the configuration that is kept for points of this attempt, if
    there is one. A model with adapters needs its weights. Raises as `kept_configuration`.
    """
    if model.lora is not None:
        return model
    if model.init_from is not None and not holds_weights(model.init_from):
        model = model.model_copy(update={"init_from": None})
    if model.pretrained is None or holds_model(model.pretrained):
        return model
    kept = kept_configuration(storage, attempt)
    if kept is None:
        return model
    values = {name: value for name, value in json.loads(kept[SETTINGS]).items() if name not in _OF_FILES}
    return model.model_copy(update={"pretrained": None, "config": values})


def why_other(storage: Storage, attempt: int, old: ModelConfig, new: ModelConfig) -> str:
    """Returns why the model in another folder is not the one of this run's points; empty if it may be.

    Compares `config.json` with the one kept for points of this attempt, else with that of the old folder. If
    neither is there, the weights of adapters' base are still compared by all that load them, and any other
    model counts as another one. Raises as `kept_configuration`.
    """
    if old.pretrained is None or new.pretrained is None:
        return "there was a folder before" if old.pretrained else "there was none before"
    kept = kept_configuration(storage, attempt) or {}
    before = kept.get(SETTINGS) or _settings_in(old.pretrained)
    now = _settings_in(new.pretrained)
    if before is None:
        return "" if new.lora is not None else "the run has kept no config.json to compare it with"
    if now is None:
        return f"there is no {SETTINGS}"
    digests = configuration_digest(before), configuration_digest(now)
    if digests[0] == digests[1]:
        return ""
    return f"its {SETTINGS} has digest {digests[1]}, that of the run {digests[0]}"


def _settings_in(folder: str) -> str | None:
    try:
        return open_storage(folder).read(SETTINGS).decode()
    except (FileNotFoundError, StorageError, UnicodeDecodeError):
        return None


def _path(attempt: int) -> str:
    return f"{MODEL_FOLDER}/{attempt:04d}.json"


def _is_kept(name: str) -> bool:
    stem, _, ending = name.partition(".")
    return stem.isdigit() and ending == "json"
