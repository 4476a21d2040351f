"""Reads a point's files and compares every one with what was committed: the one place that says "damaged".

Only surely absent files and wrong bytes are damage; storage that cannot be read raises `StorageError`.
Nothing it reads is ever executed.
"""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from blake3 import blake3

from orchestrator.errors import OrchestratorError, ResumePointError
from orchestrator.json_form import decode
from orchestrator.planning.weights_digest import weights_digest
from orchestrator.records import Cursor, FileEntry, TensorEntry
from orchestrator.resume import points
from orchestrator.resume.points import COMMIT, CONFIG, CURSOR, DOCUMENTS, FORMAT, PARTS, RNG, Commit, Damage
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import SealError, unseal

Kind = TypeVar("Kind")

POINTS = "points"


class DamageError(Exception):
    """Carries a damage from where it is found to where it is reported."""

    def __init__(self, point: str, file: str, reason: str) -> None:
        self.damage = Damage(point=point, file=file, reason=reason)
        super().__init__(str(self.damage))


def point_path(name: str, file: str) -> str:
    """Where a file of a point lies, relative to the run."""
    return f"{POINTS}/{name}/{file}"


def read_commit(storage: Storage, name: str) -> Commit:
    """The content of a point's COMMIT, checked in itself. Raises `DamageError`."""
    assert points.parse_point_name(name) is not None, f"{name!r} is no point's name"

    def damage(reason: str) -> DamageError:
        return DamageError(name, COMMIT, reason)

    try:
        content = unseal(storage.read(point_path(name, COMMIT)))
    except FileNotFoundError as error:
        gone = name not in storage.list(POINTS)
        raise damage("is missing, with the point's whole folder" if gone else "is missing") from error
    except SealError as error:
        raise damage(str(error)) from error
    written = content.get("format") if isinstance(content, dict) else None
    if isinstance(written, int) and written != FORMAT:
        raise ResumePointError(
            f"resume point {name} has format {written}, this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    commit = decoded(name, COMMIT, Commit, content)
    if commit.key.point_name != name:
        raise damage(f"is that of point {commit.key.point_name}")
    if points.files_digest(commit.files) != commit.files_digest:
        raise damage("lists other files than its digest of the list says")
    paths = [entry.path for entry in commit.files]
    if (
        len(set(paths)) != len(paths)
        or not all(points.is_part_path(p) or p in DOCUMENTS for p in paths)
        or {*DOCUMENTS} - {*paths}
    ):
        raise damage("lists files that cannot be those of a point")
    return commit


def check_file(storage: Storage, name: str, entry: FileEntry, with_digest: bool) -> None:
    """Raise `DamageError` unless the file has the committed size and, if asked for, digest."""
    path = point_path(name, entry.path)
    try:
        found_bytes = storage.size(path)
        found = storage.entry(path) if with_digest and found_bytes == entry.bytes else None
    except FileNotFoundError as error:
        raise DamageError(name, entry.path, "is missing") from error
    if found_bytes != entry.bytes:
        raise DamageError(name, entry.path, f"has {found_bytes} bytes, committed were {entry.bytes}")
    if found is not None and found.digest != entry.digest:
        raise DamageError(name, entry.path, f"has digest {found.digest}, committed was {entry.digest}")


def read_document(storage: Storage, commit: Commit, file: str) -> dict[str, Any]:
    """The JSON object that is a point's document, its digest checked. Raises `DamageError`."""
    try:
        found = orjson.loads(read_listed(storage, commit, file))
    except orjson.JSONDecodeError as error:
        raise DamageError(commit.key.point_name, file, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DamageError(commit.key.point_name, file, "is JSON, but no object")
    return found


def read_listed(storage: Storage, commit: Commit, file: str) -> bytes:
    """A file of a point, which must be one that COMMIT lists, and have the size and the digest that stand
    there. Raises `DamageError`.
    """
    name = commit.key.point_name
    entry = next((entry for entry in commit.files if entry.path == file), None)
    if entry is None:
        raise DamageError(name, file, "is not listed in COMMIT")
    try:
        data = storage.read(point_path(name, file))
    except FileNotFoundError as error:
        raise DamageError(name, file, "is missing") from error
    digest = blake3(data).hexdigest()
    if (len(data), digest) != (entry.bytes, entry.digest):
        committed = f"{entry.bytes} with digest {entry.digest}"
        raise DamageError(
            name, file, f"has {len(data)} bytes with digest {digest}, committed were {committed}"
        )
    return data


def read_parts(storage: Storage, commit: Commit) -> tuple[TensorEntry, ...]:
    """A point's tensors. Raises `DamageError`."""
    name, tensors = commit.key.point_name, read_document(storage, commit, PARTS).get("tensors")
    if not isinstance(tensors, list):
        raise DamageError(name, PARTS, "holds no list of tensors")
    return tuple(decoded(name, PARTS, TensorEntry, tensor) for tensor in tensors)


def check_documents(storage: Storage, name: str, commit: Commit) -> None:
    """Raise `DamageError` if the documents, each as committed, do not fit together: a writer's mistake."""
    decoded(name, CURSOR, Cursor, read_document(storage, commit, CURSOR))
    for file in (CONFIG, RNG):
        read_document(storage, commit, file)
    tensors = read_parts(storage, commit)
    files = {entry.path for entry in commit.files}
    if elsewhere := {chunk.file for tensor in tensors for chunk in tensor.chunks} - files:
        raise DamageError(name, PARTS, f"names {sorted(elsewhere)}, which COMMIT does not list")
    found = weights_digest(tensors)
    if found != commit.weights_digest:
        raise DamageError(name, PARTS, f"gives weights digest {found}, committed was {commit.weights_digest}")


def decoded(name: str, file: str, kind: type[Kind], content: Any) -> Kind:
    """`content` as a record of `kind`. Raises `DamageError`."""
    try:
        return decode(kind, content, file)
    except OrchestratorError as error:
        raise DamageError(name, file, f"is not as this version writes it: {error}") from error
