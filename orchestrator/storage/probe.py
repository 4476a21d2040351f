"""Whether a run can be kept in a bucket: tried, before a launch begins, with objects that are taken away
again.
"""

from __future__ import annotations

import secrets

from orchestrator.errors import StorageError
from orchestrator.storage.files import Storage

PROBE = ".probe-"  # the begin of its name; what a kill leaves is no part of a run
_LISTS = 4
_TAKE = (
    "Take a store that refuses this: S3, Google Cloud Storage, Azure, MinIO, Ceph or R2 in a version that "
    "does, or a folder"
)


def check_bucket(storage: Storage) -> str:
    """Creates an object twice and takes it away: about eight requests. Returns what the store lacks and what
    that means for the run, in a sentence; empty where it lacks nothing.

    Raises `StorageError` if it cannot be written, with what to do. Also if two have created one name, or
    could, because the store refuses no second create and its lists come late: there two launches could claim
    one attempt, and both train on.
    """
    name = f"{PROBE}{secrets.token_hex(8)}"
    try:
        by_agreement = not storage.creates_exclusively()
        lists_late = by_agreement and not _lists_at_once(storage, f"{name}/b")
        created = not lists_late and [storage.create(f"{name}/a", data) for data in (b"1", b"2")]
    except StorageError as error:
        raise StorageError(f"run.storage cannot be written: {error}") from error
    finally:
        keeps = _taken_away(storage, name)
    if created != [True, False]:
        late = ", and its lists do not show at once what was written" if lists_late else ""
        raise StorageError(
            f"run.storage: {storage.root} lets an object be created that is there already (it does not heed "
            f"If-None-Match){late}, so two launches could train one run at the same time; nothing is "
            f"started. {_TAKE}"
        )
    if not by_agreement:
        return keeps
    agreed = (
        f"{storage.root} lets an object be created that is there already (it does not heed If-None-Match): "
        "who claims an attempt, a pin or a request first is agreed on by plain writes and lists, by six "
        "requests instead of one, and safe only as long as its lists show at once what was written"
    )
    return f"{agreed}. {keeps}" if keeps else agreed


def _taken_away(storage: Storage, name: str) -> str:
    try:
        storage.delete_folder(name)
    except StorageError as error:
        return (
            f"nothing can be deleted in run.storage ({error}), so that {name} stays there, and so do old "
            "resume points: storage fills up. Give this user the right to delete"
        )
    return ""


def _lists_at_once(storage: Storage, folder: str) -> bool:
    names = [str(number) for number in range(_LISTS)]
    for number, name in enumerate(names, start=1):
        storage.write(f"{folder}/{name}", b"")
        if storage.list(folder) != names[:number]:
            return False
    return True
