"""Describes and identifies what `model.init_from` names, without loading it.

A resume point is identified by its COMMIT, exported weights by the digests of their files. The result does
not depend on their location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blake3 import blake3

from orchestrator.checkpoint.export.export_files import Exported, read_marker
from orchestrator.checkpoint.node_local.node_storage import run_storage
from orchestrator.checkpoint.points import verify
from orchestrator.checkpoint.points.points import Commit, parse_point_name
from orchestrator.checkpoint.points.verify import ReadingProgress
from orchestrator.errors import ConfigError, LaterFormatError, OrchestratorError, StorageError
from orchestrator.json_form import encode
from orchestrator.storage.at_once import entries_at_once
from orchestrator.storage.open import absolute, open_storage, split
from orchestrator.storage.sealed import LaterSealError, canonical
from orchestrator.trainer.weights.weight_files import INDEX, is_point, weight_files


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
