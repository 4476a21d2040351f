"""The manifest of a committed point: its tensors, and the files that contain their rows.

It is built from parts.json, the document that lists the tensors of a point. Callers verify a document's
digest before they pass its content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
from blake3 import blake3

from orchestrator.checkpoint.files.part_file import FORMAT, SAFETENSORS, part_path
from orchestrator.errors import (
    Format1Error,
    LaterFormatError,
    OrchestratorError,
    OtherFormatError,
    StorageError,
)
from orchestrator.json_form import decode, unseal
from orchestrator.planning.state.state_layout import (
    Layout,
    StateTensor,
    held_rows,
    writing_replicas,
    written_rows,
)
from orchestrator.records.points import Damage, DamagedPointError, FileEntry, SavedTensor, damaged_point
from orchestrator.storage.files import Storage

MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"  # groups of tensors
Name = tuple[str, str]  # group and name of a tensor


class PartDamage(Exception):
    """A file of a point is surely absent, or is not as it was written.

    Carries this to the place where it is reported.
    """

    def __init__(self, file: str, reason: str) -> None:
        self.file, self.reason = file, reason
        super().__init__(f"{file} {reason}")


def damaged(point: str, damage: PartDamage) -> DamagedPointError:
    """Builds the error with which a process that loads the point reports the damage."""
    return damaged_point([Damage(point=point, file=damage.file, reason=damage.reason)])


@dataclass(frozen=True, kw_only=True)
class PartManifest:
    """The tensors of the point `point`, by (group, name), and its tensor files, by path.

    The rows in each file follow from `layout`. `fixed`: the digests of the weights that the state was trained
    with and does not contain, by their fields in the configuration.
    """

    point: str
    layout: Layout
    tensors: dict[Name, SavedTensor]
    files: dict[str, FileEntry]
    fixed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def state(self) -> tuple[StateTensor, ...]:
        """The tensors in the form of `planning.state.state_layout`, in the order of the point."""
        return tuple(state_tensor(tensor) for tensor in self.tensors.values())

    def rows_of_rank(self, rank: int) -> dict[Name, range]:
        """Returns the rows of each tensor in the file of `rank`. Tensors without any are left out."""
        rows = written_rows(self.state, self.layout, rank)
        return {name: found for name, found in zip(self.tensors, rows, strict=True) if found}

    def files_of(self, name: Name, rows: range) -> list[str]:
        """Returns the files that contain any of `rows` of a tensor."""
        number = self._numbers[name]
        tensor, first = self.state[number], self._replicas[number] * self.layout.num_shards
        shards = range(self.layout.num_shards if tensor.sharded else 1)
        held = ((shard, held_rows(tensor, self.layout.num_shards, shard)) for shard in shards)
        return [
            part_path(first + shard, self.layout.world_size)
            for shard, theirs in held
            if max(theirs.start, rows.start) < min(theirs.stop, rows.stop)
        ]

    @cached_property
    def _numbers(self) -> dict[Name, int]:
        return {name: number for number, name in enumerate(self.tensors)}

    @cached_property
    def _replicas(self) -> tuple[int, ...]:
        return writing_replicas(self.state, self.layout)


def state_tensor(saved: SavedTensor) -> StateTensor:
    """Converts a tensor of a point to the form of `planning.state.state_layout`."""
    return StateTensor(
        group=saved.group,
        name=saved.name,
        shape=saved.shape,
        itemsize=SAFETENSORS[saved.dtype][1],
        sharded=saved.sharded,
    )


COMMIT, PARTS = "COMMIT", "parts.json"


def parts_document(
    layout: Layout, saved: Iterable[SavedTensor], fixed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the content of parts.json of format 2.

    `items` are [group, name, dtype, shape, sharded], once for all ranks, in the order by which
    `planning.state.state_layout` divides them. `fixed`: see `PartManifest`; left out if it is empty.
    """
    beside = {"fixed": dict(fixed)} if fixed else {}
    return {
        **beside,
        "format": FORMAT,
        "layout": {"num_shards": layout.num_shards, "num_replicas": layout.num_replicas},
        "items": [[t.group, t.name, t.dtype, list(t.shape), t.sharded] for t in saved],
    }


def require_known(written: Any, what: str) -> None:
    """Raises `Format1Error` or `LaterFormatError` for a format that is not read here.

    `what` names a run or a part of a point. The caller handles values that are no number.
    """
    if type(written) is not int or written == FORMAT:
        return
    if written == 1:
        raise Format1Error(
            f"{what} has format 1, which versions before 23 November 2026 wrote; this version reads format "
            f"{FORMAT}. Nothing is damaged. Export the weights with an earlier version (`orchestrator "
            "export`; CHANGELOG.md names the last one that reads format 1), and start a new run from them "
            "with model.init_from"
        )
    raise LaterFormatError(
        f"{what} has format {written}, this version reads {FORMAT}; use the version that wrote it, or a "
        "later one"
    )


def read_manifest(storage: Storage, point: str) -> PartManifest:
    """Reads the manifest of a point from the point's own folder. parts.json must be the one that COMMIT
    lists.

    Raises `PartDamage`, `StorageError`, and `OtherFormatError` if another version wrote it.
    """
    folder = f"points/{point}"
    try:
        content = unseal(storage.read(f"{folder}/{COMMIT}"))
        require_known(content["format"], f"resume point {point}")
        files = tuple(decode(FileEntry, each) for each in content["files"])
    except FileNotFoundError as error:
        raise PartDamage(COMMIT, "is missing") from error
    except (OtherFormatError, StorageError):
        raise
    except (OrchestratorError, KeyError, TypeError) as error:
        raise PartDamage(COMMIT, f"{error}") from error
    try:
        data = storage.read(f"{folder}/{PARTS}")
        parts = orjson.loads(data)
    except FileNotFoundError as error:
        raise PartDamage(PARTS, "is missing") from error
    except orjson.JSONDecodeError as error:
        raise PartDamage(PARTS, f"is not JSON: {error}") from error
    listed = FileEntry(path=PARTS, bytes=len(data), digest=blake3(data).hexdigest())
    if listed not in files or not isinstance(parts, dict):
        raise PartDamage(PARTS, f"has digest {listed.digest}, which is not the one that COMMIT lists")
    return manifest_of(point, files, parts)


def manifest_of(point: str, files: Sequence[FileEntry], parts: Mapping[str, Any]) -> PartManifest:
    """Builds the manifest of a point from the list of files in its COMMIT and the content of its parts.json.

    Raises `PartDamage` of parts.json if they do not fit together, `OtherFormatError` if another version wrote
    it.
    """
    listed = {entry.path: entry for entry in files if "/" in entry.path}
    found = parts.get("format")
    require_known(found, f"resume point {point}: {PARTS}")
    try:
        if found == FORMAT:
            return _manifest(point, listed, parts)
    except (OrchestratorError, KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise PartDamage(PARTS, f"is not as this version writes it: {error}") from error
    raise PartDamage(PARTS, f"has format {found}, this version reads {FORMAT}")


def _manifest(point: str, listed: dict[str, FileEntry], parts: Mapping[str, Any]) -> PartManifest:
    sizes = parts["layout"]
    layout = Layout(num_shards=sizes["num_shards"], num_replicas=sizes["num_replicas"])
    tensors: dict[Name, SavedTensor] = {}
    for group, name, dtype, shape, sharded in parts["items"]:
        saved = decode(
            SavedTensor,
            {"group": group, "name": name, "dtype": dtype, "shape": shape, "sharded": sharded},
            f"item {group}/{name}",
        )
        fits = dtype in SAFETENSORS and all(size >= 0 for size in saved.shape)
        if not fits or (group, name) in tensors:
            raise ValueError(f"its item {group}/{name} {dtype} {shape} cannot be, or is there twice")
        state_tensor(saved)
        tensors[group, name] = saved
    expected = {part_path(rank, layout.world_size) for rank in range(layout.world_size)}
    if listed.keys() != expected:
        odd = sorted(listed.keys() ^ expected)
        raise ValueError(f"its layout {layout} and the files in COMMIT differ by {odd[:5]}")
    fixed = {str(name): str(digest) for name, digest in parts.get("fixed", {}).items()}
    return PartManifest(point=point, layout=layout, tensors=tensors, files=listed, fixed=fixed)
