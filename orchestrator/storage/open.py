"""Opens the storage at a location from a configuration or command: a folder's path, or a bucket's URI.

It makes no requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import PurePath

from orchestrator.storage.buckets import split_bucket
from orchestrator.storage.files import Storage
from orchestrator.storage.store_kinds import installed_scheme, store_at


def is_bucket(location: str) -> bool:
    """Whether this names a bucket, a prefix in one, or a place of an installed scheme; not a folder."""
    return split_bucket(location) is not None or installed_scheme(location) is not None


def open_storage(location: str, *, sleep: Callable[[float], None] = time.sleep) -> Storage:
    """The storage at a folder's path (absolute or not, with `~`) or at a bucket's URI.

    URIs are `s3://bucket/prefix` (`gs://`, `az://` and their other names). Makes no request yet.
    `storage.buckets` documents the credentials. `sleep` waits between tries.

    Raises `ConfigError` for an empty text, a URI of another kind, a path that begins like a bucket's URI (a
    folder with such a name is `./s3:`), and a URI that contains credentials or options.
    """
    return Storage.on(store_at(location, sleep))


def absolute(location: str) -> str:
    """The same place in a form that means the same in every process.

    It is an absolute path, or a URI without a trailing slash. Raises as `open_storage`.
    """
    return open_storage(location).root


def join(location: str, *names: str) -> str:
    """A place in a folder, or below a prefix."""
    return "/".join((location.rstrip("/"), *names))


def split(location: str) -> tuple[str, str]:
    """The folder or prefix of a place, and its name there. A bucket itself has no name."""
    if "://" in location and location.rstrip("/").count("/") == _SLASHES_OF_A_BUCKET:
        return location.rstrip("/"), ""
    return os.path.split(location.rstrip("/") or "/")


def above(location: str) -> tuple[str, ...]:
    """All places above a place, the nearest first: the folders up to `/`, the prefixes up to the bucket."""
    if not is_bucket(location):
        return tuple(map(str, PurePath(location).parents))
    found, folder = list[str](), location
    while (outer := split(folder)[0]) != folder:
        found.append(folder := outer)
    return tuple(found)


_SLASHES_OF_A_BUCKET = 2
