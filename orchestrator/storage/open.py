"""From where a user says that something lies to the storage there: a folder's path, or a bucket's URI.

It knows what is written in configurations and commands; it asks no storage anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import PurePath

from orchestrator.storage.buckets import split_bucket
from orchestrator.storage.files import Storage
from orchestrator.storage.store_kinds import store_at


def is_bucket(location: str) -> bool:
    """Whether this names a bucket, or what lies in one, and no folder."""
    return split_bucket(location) is not None


def open_storage(location: str, *, sleep: Callable[[float], None] = time.sleep) -> Storage:
    """What lies at a folder's path (absolute or not, with `~`) or at a bucket's URI, `s3://bucket/prefix`
    (`gs://`, `az://` and their other names). Asks nothing yet; credentials come from where
    `storage.buckets` looks for them. `sleep` waits between tries.

    Raises `ConfigError` for an empty text, a URI of another kind, what only begins as a bucket's (a folder
    that is called so is `./s3:`), and one that contains credentials or options.
    """
    return Storage.on(store_at(location, sleep))


def absolute(location: str) -> str:
    """The same place, said so that every process means it: an absolute path, or a URI without a slash at its
    end. Raises as `open_storage`.
    """
    return open_storage(location).root


def join(location: str, *names: str) -> str:
    """What lies in a folder, or below a prefix."""
    return "/".join((location.rstrip("/"), *names))


def split(location: str) -> tuple[str, str]:
    """The folder, or the prefix, in which something lies, and its name there. A bucket itself has no name."""
    if "://" in location and location.rstrip("/").count("/") == _SLASHES_OF_A_BUCKET:
        return location.rstrip("/"), ""
    return os.path.split(location.rstrip("/") or "/")


def above(location: str) -> tuple[str, ...]:
    """All that a place lies in, the nearest first: the folders up to `/`, the prefixes up to the bucket."""
    if not is_bucket(location):
        return tuple(map(str, PurePath(location).parents))
    found, folder = list[str](), location
    while (outer := split(folder)[0]) != folder:
        found.append(folder := outer)
    return tuple(found)


_SLASHES_OF_A_BUCKET = 2
