"""Whether a run can be kept in a bucket: tried, before a launch begins, with an object that is taken away
again.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from orchestrator.errors import StorageError
from orchestrator.storage.files import Storage

PROBE = ".probe-"  # the begin of its name; what a kill leaves is no part of a run


def check_bucket(storage: Storage) -> None:
    """Creates an object twice and deletes it: five requests. Raises `StorageError` if it cannot be written,
    with what to do, and if the second create is not refused: there two launches could claim one attempt, and
    both train on.
    """
    name = f"{PROBE}{secrets.token_hex(8)}"
    try:
        created = storage.create(name, b"1"), storage.create(name, b"2")
    except StorageError as error:
        raise StorageError(f"run.storage cannot be written: {error}") from error
    finally:
        with suppress(StorageError):
            storage.delete(name)
    if created != (True, False):
        raise StorageError(
            f"run.storage: {storage.root} lets an object be created that is there already (it does not heed "
            "If-None-Match), so two launches could train one run at the same time; nothing is started. Take "
            "a store that refuses this: S3, Google Cloud Storage, Azure, MinIO, Ceph or R2 in a version that "
            "does, or a folder"
        )
