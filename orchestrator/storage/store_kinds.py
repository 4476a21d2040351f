"""Selects the kind of store for a location: a folder on a disk, or a prefix of a bucket."""

from __future__ import annotations

import re
from collections.abc import Callable

from orchestrator.errors import ConfigError
from orchestrator.storage.buckets import AZURE, SCHEMES, is_uri
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.store import Store

_QUERY = re.compile(r"\?[^/=]*=")


def store_at(location: str, sleep: Callable[[float], None]) -> Store:
    """The store of a folder's path or of a bucket's URI. Makes no request yet; `sleep` waits between tries.

    Raises `ConfigError` as `open_storage`.
    """
    if not is_uri(location):
        return LocalStore(location, None, sleep)
    require_plain(location)
    from orchestrator.storage.object_store import ObjectStore

    return ObjectStore(location, sleep)


def require_plain(uri: str, *, pattern: bool = False) -> None:
    """Raises `ConfigError` for a URI of another kind than a bucket's, and for one with credentials or
    options.

    The error does not repeat text after the scheme that may be a secret. `pattern`: for names of objects, in
    which `?` and `#` are plain characters, unless they begin a query.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        scheme, _, rest = uri.partition(":")
        rest = rest.lstrip("/")
    elif scheme not in SCHEMES:
        raise ConfigError(
            f"{scheme}:// is not a supported storage; give a folder, e.g. ./runs, or the URI of a bucket "
            "(s3://, gs:// or az://) with a prefix in it",
            code="config.storage_uri",
        )
    before, at, _ = rest.partition("/")[0].partition("@")
    options = _QUERY.search(rest) if pattern else re.search("[?#]", rest)
    # Azure's container@account contains no secret
    if (at and (scheme not in AZURE or ":" in before)) or options:
        raise ConfigError(
            f"the {scheme}:// URI has more than a bucket and a prefix in it ('@', '?' or '#'), which may be "
            "a secret. Write only those two, and set credentials in the environment of each machine "
            "(docs/storage.md)",
            code="config.uri_with_secret",
        )
