"""Reads folders of exported weights, and identifies the weights that `model.init_from` names.

An exported folder has the file EXPORT, written last, which describes it. First weights are identified without
loading them: a resume point by its COMMIT, exported weights by the digests of their files. The result does
not depend on their location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blake3 import blake3

from orchestrator.checkpoint.node_local.node_storage import run_storage
from orchestrator.checkpoint.points import verify
from orchestrator.checkpoint.points.points import Commit, newest_first, parse_point_name
from orchestrator.checkpoint.points.verify import ReadingProgress
from orchestrator.errors import ConfigError, LaterFormatError, OrchestratorError, StorageError
from orchestrator.json_form import LaterSealError, canonical, decode, encode, unseal
from orchestrator.records.points import FileEntry
from orchestrator.storage.files import Storage
from orchestrator.storage.open import absolute, open_storage, split
from orchestrator.storage.parallel import at_once, entries_at_once
from orchestrator.trainer.weights.weight_files import INDEX, is_point, weight_files

MARKER = "EXPORT"
EXPORTS = "exports"  # the folder of a run for its automatic exports
FORMAT = 1  # of EXPORT
WHOLE, INCOMPLETE = "whole", "incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The content of EXPORT: the origin of the weights, and every other file with its size and digest.

    `dtype` is empty if numbers are as trained. `weights_digest` is the point's, of the weights before any
    `dtype`. `averaged`: they are the averages of `train.ema` in place of these weights. `merged`: adapters
    are merged into the weights that they belong to.
    """

    format: int
    run: str
    run_id: str
    point: str
    weights_digest: str
    dtype: str
    created: str
    files: tuple[FileEntry, ...]
    averaged: bool = False
    merged: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of all its files except EXPORT."""
        return sum(entry.bytes for entry in self.files)


def read_marker(storage: Storage, folder: str) -> Exported | None:
    """Returns the EXPORT of `folder` in `storage`; None if there is none.

    Raises `SealError` or `OrchestratorError` if it is not as it was written, `LaterSealError` or
    `LaterFormatError` if a later version wrote it.
    """
    try:
        content = unseal(storage.read(f"{folder}/{MARKER}" if folder else MARKER))
    except FileNotFoundError:
        return None
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise LaterFormatError(
            f"has format {found}, this version reads {FORMAT}; use the version that wrote it, or a later one"
        )
    return decode(Exported, content, MARKER)


def find_exports(storage: Storage) -> tuple[list[str], list[str]]:
    """Returns the points whose weights a run has copied to `exports/`, oldest first.

    The first list has the exports that are whole, the second those that are in progress or were cut off.
    """
    names = newest_first(storage.list(EXPORTS))[::-1]
    found = at_once(storage, lambda name: storage.exists(f"{EXPORTS}/{name}/{MARKER}"), names)
    whole = [name for name, is_whole in zip(names, found, strict=True) if is_whole]
    return whole, [name for name in names if name not in whole]


def export_states(storage: Storage) -> dict[str, str]:
    """Maps each point with a folder in `exports/` to whether that is whole or incomplete."""
    whole, incomplete = find_exports(storage)
    return dict.fromkeys(whole, WHOLE) | dict.fromkeys(incomplete, INCOMPLETE)


@contextmanager
def _naming_field() -> Iterator[None]:
    try:
        yield
    except (ConfigError, StorageError) as error:
        raise type(error)(f"model.init_from: {error}", code=error.code) from error


@_naming_field()
def weights_sentence(where: str) -> str:
    """Describes the first weights for people. Raises `ConfigError` if there are none to read, and
    `StorageError`.
    """
    if is_point(where):
        commit = _commit(where)
        return f"the first weights are those of resume point {where}, weights digest {commit.weights_digest}"
    exported, files = _marker(where), weight_files(where)
    what = f"{len(files)} file{'' if len(files) == 1 else 's'} of weights in {where}"
    if exported is None:
        return f"the first weights are those of {what}"
    made = f"exported from {exported.point} of run {exported.run}, weights digest {exported.weights_digest}"
    return (
        f"the first weights are those of {what}, {made}{f', as {exported.dtype}' if exported.dtype else ''}"
    )


@_naming_field()
def weights_identity(where: str, say: Callable[[str], None] = lambda text: None) -> str:
    """Returns an identity of the weights as 64 hex digits.

    For a point it is the digest of its weights, for a folder that of its weight files, all of which are read.
    `say` is called with the progress of a long reading. Raises `ConfigError`, also if they are not those that
    EXPORT lists, and `StorageError`.
    """
    if is_point(where):
        return _commit(where).weights_digest
    exported = _marker(where)
    listed = {entry.path: entry for entry in exported.files} if exported else {}
    storage, progress = open_storage(where), ReadingProgress(say, "first weights")
    try:
        found = entries_at_once(storage, weight_files(where), progress.expect, progress.read)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{where}: a file of weights that {INDEX} names is missing ({error}); restore it",
            code="weights.missing_file",
        ) from error
    for entry in found:
        if exported is not None and listed.get(entry.path) != entry:
            raise ConfigError(
                f"{where}: {entry.path} has {entry.bytes} bytes and digest {entry.digest}, "
                "and EXPORT "
                f"lists {listed.get(entry.path)}; export the point again",
                code="weights.damaged_export",
            )
    return blake3(canonical(encode(tuple(found)))).hexdigest()


def _commit(where: str) -> Commit:
    """Returns the COMMIT of a point's folder. Its list of tensors must be the one that COMMIT lists."""
    points, name = split(absolute(where))
    run, folder = split(points)
    if parse_point_name(name) is None or folder != verify.POINTS:
        raise ConfigError(
            f"{where} is not the folder of a resume point, <run>/points/<name>; correct it",
            code="point.bad_location",
        )
    storage = run_storage(run)
    try:
        commit = verify.read_commit(storage, name)
        verify.check_documents(storage, name, commit)
    except verify.DamageError as error:
        raise ConfigError(
            f"{error.damage}; restore the file, or take another point", code="point.damaged"
        ) from error
    return commit


def _marker(where: str) -> Exported | None:
    try:
        return read_marker(open_storage(where), "")
    except StorageError:
        raise
    except (LaterFormatError, LaterSealError) as error:
        raise ConfigError(f"{where}: EXPORT {error}", code=error.code) from error
    except OrchestratorError as error:
        raise ConfigError(
            f"{where}: EXPORT {error}; export the point again", code="weights.damaged_export"
        ) from error
