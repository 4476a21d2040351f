"""Tests whether a run can be kept in a bucket, before a launch begins, with an object that is deleted."""

from __future__ import annotations

import secrets

from orchestrator.errors import NoConditionalCreateError, StorageError
from orchestrator.storage.buckets import no_conditional_create
from orchestrator.storage.files import Storage

PROBE = ".probe-"  # prefix of its name; one that is left by a kill is not part of a run


def check_bucket(storage: Storage) -> str:
    """Creates an object twice and deletes it, with about four requests.

    Returns a warning if the object cannot be deleted, else an empty text. Raises `NoConditionalCreateError`
    if the bucket creates a name that is taken (membership rule 9), and `StorageError` if it cannot be
    written.
    """
    name = f"{PROBE}{secrets.token_hex(8)}"
    try:
        created = [storage.create(f"{name}/a", data) for data in (b"1", b"2")]
    except NoConditionalCreateError as error:
        raise NoConditionalCreateError(f"run.storage: {error}") from error
    except StorageError as error:
        raise StorageError(f"run.storage cannot be written: {error}", code=error.code) from error
    finally:
        warning = _delete(storage, name)
    if created != [True, False]:
        raise NoConditionalCreateError(f"run.storage: {no_conditional_create(storage.root)}")
    return warning


def _delete(storage: Storage, name: str) -> str:
    try:
        storage.delete_folder(name)
    except StorageError as error:
        return (
            f"nothing can be deleted in run.storage ({error}), so that {name} stays there, and so do old "
            "resume points: storage fills up. Give this user the right to delete"
        )
    return ""
