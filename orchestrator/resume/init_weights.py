"""What `model.init_from` names, told and identified without loading it: a resume point by its COMMIT, a
folder of exported weights by the digests of its files.
"""

from __future__ import annotations

from blake3 import blake3

from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.json_form import encode
from orchestrator.parts.node_storage import run_storage
from orchestrator.resume import verify
from orchestrator.resume.export_files import Exported, read_marker
from orchestrator.resume.points import Commit, parse_point_name
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import canonical
from orchestrator.trainer.first_weights import folder_of, is_point, weight_files


def weights_sentence(where: str) -> str:
    """What the first weights are, for people. Raises `ConfigError` if there are none to read."""
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


def weights_identity(where: str) -> str:
    """What the weights are, as 64 hex digits: of a point the digest of its weights, of a folder that of its
    files of weights, all of which are read. Raises `ConfigError`, also if they are not those that EXPORT
    lists.
    """
    if is_point(where):
        return _commit(where).weights_digest
    exported = _marker(where)
    listed = {entry.path: entry for entry in exported.files} if exported else {}
    found = [Storage(str(path.parent)).entry(path.name) for path in weight_files(where)]
    for entry in found:
        if exported is not None and listed.get(entry.path) != entry:
            raise ConfigError(
                f"model.init_from={where}: {entry.path} has {entry.bytes} bytes and digest {entry.digest}, "
                "and EXPORT "
                f"lists {listed.get(entry.path)}; export the point again"
            )
    return blake3(canonical(encode(tuple(found)))).hexdigest()


def _commit(where: str) -> Commit:
    """Of a point's folder, whose list of tensors must be the one that COMMIT lists."""
    folder = folder_of(where)
    if parse_point_name(folder.name) is None or folder.parent.name != verify.POINTS:
        raise ConfigError(
            f"model.init_from={where} is no resume point's folder, <run>/points/<name>; correct it"
        )
    storage = run_storage(str(folder.parent.parent))
    try:
        commit = verify.read_commit(storage, folder.name)
        verify.check_documents(storage, folder.name, commit)
    except verify.DamageError as error:
        raise ConfigError(
            f"model.init_from: {error.damage}; restore the file, or take another point"
        ) from error
    return commit


def _marker(where: str) -> Exported | None:
    try:
        return read_marker(Storage(str(folder_of(where))), "")
    except OrchestratorError as error:
        raise ConfigError(f"model.init_from={where}: EXPORT {error}; export the point again") from error
