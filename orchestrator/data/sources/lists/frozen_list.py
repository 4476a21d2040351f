"""Reads a frozen list of files, from the run's storage or from this machine's cache of a bucket.

The digest identifies the list, wherever it was read from.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from orchestrator.data.sources.lists.manifest import Manifest, from_parquet
from orchestrator.errors import DataIdentityError, OrchestratorError, StorageError
from orchestrator.storage.home import cache_folder
from orchestrator.storage.open import is_bucket, join, open_storage


def read_list(storage: str, path: str, digest: str) -> Manifest:
    """The list at `path` of a run's storage.

    If that is a bucket, each user of a machine reads it once: `~/.cache/orchestrator/lists` (or in
    `XDG_CACHE_HOME`) keeps it under its digest. Raises `DataIdentityError` if it is missing, altered, or does
    not have that digest.
    """
    where = join(storage, path)
    cache = cache_folder()
    copy = cache / "lists" / f"{digest}.parquet" if cache is not None and is_bucket(storage) else None
    if copy is not None and (kept := _kept(copy, digest)) is not None:
        return kept
    try:
        data = open_storage(storage).read(path)
    except (OSError, StorageError) as error:
        raise DataIdentityError(
            f"{where}: the run's manifest cannot be read: {error}; restore it, or give this machine access "
            "to the run's storage",
            code="data.unreadable_list",
        ) from error
    manifest = from_parquet(data, where)
    if manifest.digest != digest:
        raise DataIdentityError(
            f"{where}: the run's manifest has digest {manifest.digest}, this process was started with "
            f"{digest}; restore the file",
            code="data.damaged_list",
        )
    if copy is not None:
        _keep(copy, data)
    return manifest


def _kept(copy: Path, digest: str) -> Manifest | None:
    """The cached list with that digest, if it is complete."""
    with suppress(OSError, OrchestratorError):
        manifest = from_parquet(copy.read_bytes(), str(copy))
        if manifest.digest == digest:
            return manifest
    return None


def _keep(copy: Path, data: bytes) -> None:
    """Caches the list. If that fails, each process reads the bucket."""
    part = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        copy.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(copy)
