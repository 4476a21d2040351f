"""Reads the headers of stored weights, exported or in a resume point, in a folder or a bucket.

It lists the tensors and the place of each one's bytes. torch is not needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.files.manifest import MODEL, PartDamage, PartManifest, damaged, read_manifest
from orchestrator.checkpoint.files.part_file import LENGTH_BYTES, SAFETENSORS, read_header
from orchestrator.checkpoint.node_local.node_storage import run_storage
from orchestrator.errors import ConfigError, ResumePointError, StorageError
from orchestrator.storage.files import Storage
from orchestrator.storage.open import absolute, open_storage, split

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig

SINGLE, INDEX, PARTS = "model.safetensors", "model.safetensors.index.json", "parts.json"
ADAPTER_SETTINGS, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
ADAPTERS_ALONE = "weights.adapters_alone"
FILE_SIZE = "weights.file_size"  # the code of an error: a file is shorter or longer than its header says
_TORCH_NAMES = {stored: name for name, (stored, _) in SAFETENSORS.items()} | {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file of `storage`. Its bytes begin at `start`.

    `dtype` is torch's name of its type, empty if the type is unknown. `made_for` is the library that the file
    names.
    """

    storage: Storage
    path: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    made_for: str


def require_reachable(config: ModelConfig) -> None:
    """Raises `StorageError` if the weights that adapters are trained beside (`model.lora`) cannot be reached.

    The points of a run do not hold them. So this is no damage of a point.
    """
    if config.lora is None or config.base is None:
        return
    storage = open_storage(config.base)
    there = storage.folder.is_dir() if storage.folder is not None else bool(storage.list(""))
    if not there:
        field = "pretrained" if config.init_from is None else "init_from"
        raise StorageError(
            f"model.{field}={config.base} cannot be reached: no files are there. Every start with model.lora "
            "reads its weights, which the run's points do not hold; mount or restore it. The points are not "
            "damaged",
            code="weights.unreachable",
        )


def holds_model(where: str) -> bool:
    """Whether a folder or bucket has a configuration and safetensors, by names alone.

    Raises as `open_storage`, and `StorageError`.
    """
    names = open_storage(where).list("")
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)


def holds_weights(where: str) -> bool:
    """Whether a resume point or exported weights are there, by names alone. Raises as `holds_model`."""
    if is_point(where):
        return True
    try:
        return bool(weight_files(where))
    except ConfigError:
        return False


def is_point(where: str) -> bool:
    """Whether a resume point is at this folder or URI (else exported weights).

    Raises as `open_storage`, and `StorageError`.
    """
    return open_storage(where).exists(PARTS)


def weight_files(where: str) -> list[str]:
    """Returns the names of the weight files in a folder, or below a URI.

    Raises `ConfigError` if there are none, `StorageError`.
    """
    storage = open_storage(where)
    try:
        index = json.loads(storage.read(INDEX))
        return sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{storage.root}/{INDEX} cannot be read: {error!r}; restore the file", code="weights.invalid_file"
        ) from error
    if not storage.exists(SINGLE):
        if storage.exists(ADAPTERS) or storage.exists(ADAPTER_SETTINGS):
            raise _adapters_alone(storage.root, _base_of(storage))
        raise ConfigError(
            f"{storage.root} holds no weights: there is no {SINGLE}, no {INDEX} and no {PARTS} in it; give a "
            "folder that `orchestrator export` or transformers has made, or a resume point's, "
            "<run>/points/<name>",
            code="weights.no_files",
        )
    return [SINGLE]


def stored_tensors(where: str) -> dict[str, StoredTensor]:
    """Returns all tensors of the weight files there, by name. Reads the header of each file.

    Raises `ConfigError` naming a file that does not match its header, `StorageError`.
    """
    storage = open_storage(where)
    return {name: each for path in weight_files(where) for name, each in _tensors_in(storage, path).items()}


def held_in(where: str) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the weights there. Raises `ConfigError` if there are none to read."""
    if is_point(where):
        _, manifest = open_point(where)
        found = {name: each.shape for (group, name), each in manifest.tensors.items() if group == MODEL}
        if all(".lora_" in name or ".modules_to_save." in name for name in found):
            raise _adapters_alone(where)
        return found
    try:
        return {name: each.shape for name, each in stored_tensors(where).items()}
    except ConfigError as error:
        raise ConfigError(f"model.init_from: {error}", code=error.code) from error


def require_weights_of_a_model(name: str, where: str) -> None:
    """Raises `ConfigError` if the folder or URI `where` holds adapters without the weights they belong to.

    `name` names it for people. A place that does not exist passes.
    """
    storage = open_storage(where)
    if not storage.exists(ADAPTER_SETTINGS):
        return
    if not (storage.exists(SINGLE) or storage.exists(INDEX)):
        raise _adapters_alone(name, _base_of(storage))


def _base_of(storage: Storage) -> str:
    """Returns where the weights of adapters are, as peft has written it; empty if it has not."""
    try:
        base = json.loads(storage.read(ADAPTER_SETTINGS))["base_model_name_or_path"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""
    return base if isinstance(base, str) else ""


def _adapters_alone(what: str, base: str = "") -> ConfigError:
    of = f" of the weights {base}" if base else ""
    return ConfigError(
        f"{what} holds adapters (LoRA){of}, without the weights that they belong to; make whole weights with "
        "`orchestrator export RUN OUT --merged` (of adapters of peft: `merge_and_unload`) and give these, or "
        f"give the base{f' {base}' if base else ''} itself, without the adapters",
        code=ADAPTERS_ALONE,
    )


def open_point(where: str) -> tuple[Storage, PartManifest]:
    """Opens the storage of the run whose point is at `where`, and returns it with the point's tensors.

    Raises `ResumePointError`, `StorageError`.
    """
    points, name = split(absolute(where))
    storage = run_storage(split(points)[0])
    try:
        return storage, read_manifest(storage, name)
    except PartDamage as error:
        found = damaged(name, error)
        raise ResumePointError(f"model.init_from={where}: {found}", code=found.code) from error


def _tensors_in(storage: Storage, path: str) -> dict[str, StoredTensor]:
    found = dict[str, StoredTensor]()
    try:
        size = storage.size(path)
        header = read_header(storage, path, size)
        content: dict[str, Any] = json.loads(header[LENGTH_BYTES:])
        made_for = content.pop("__metadata__", {}).get("format", "pt")
        end = len(header) + max((int(form["data_offsets"][1]) for form in content.values()), default=0)
        for name, form in content.items():
            found[name] = StoredTensor(
                storage=storage,
                path=path,
                dtype=_TORCH_NAMES.get(form["dtype"], ""),
                shape=tuple(form["shape"]),
                start=len(header) + int(form["data_offsets"][0]),
                made_for=made_for,
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{storage.root}/{path} is not a valid safetensors file: {error!r}; restore it",
            code="weights.invalid_file",
        ) from error
    if size != end:
        raise ConfigError(
            f"{storage.root}/{path} has {size} bytes, its header says {end}; restore the file, or give "
            "other weights",
            code=FILE_SIZE,
        )
    return found
