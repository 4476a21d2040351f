"""Selects the kind of store for a location: a disk, a bucket, or what an installed package adds.

An installed package adds a scheme by an entry point of the group `orchestrator.storage`: its name is the
scheme, and its object is called with a URI and a function that sleeps, and returns a `Store`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.storage.buckets import AZURE, SCHEMES, is_uri
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.store import Store

GROUP = "orchestrator.storage"
_NEEDED = (
    *("root", "traits", "beside", "within", "put", "sync", "read", "facts", "list", "delete"),
    "delete_folder",
)
_QUERY = re.compile(r"\?[^/=]*=")


def store_at(location: str, sleep: Callable[[float], None]) -> Store:
    """The store of a folder's path or of a bucket's URI. Makes no request yet; `sleep` waits between tries.

    Raises `ConfigError` as `open_storage`.
    """
    if not is_uri(location):
        return LocalStore(location, None, sleep)
    if (installed := installed_scheme(location)) is not None:
        return _installed(installed, location, sleep)
    require_plain(location)
    from orchestrator.storage.object_store import ObjectStore

    return ObjectStore(location, sleep)


def installed_scheme(location: str) -> EntryPoint | None:
    """The entry point of a location's scheme; None if no installed package adds it. Imports nothing."""
    scheme, separator, _ = location.partition("://")
    if not separator or scheme in SCHEMES:
        return None
    return next((entry for entry in entry_points(group=GROUP) if entry.name == scheme), None)


def _installed(entry: EntryPoint, location: str, sleep: Callable[[float], None]) -> Store:
    try:
        store: Store = entry.load()(location, sleep)
    except OrchestratorError:
        raise
    except Exception as error:  # another package's code may raise anything
        raise ConfigError(
            f"the storage {entry.name}:// ({entry.value}) cannot be opened: {type(error).__name__}: {error}; "
            "correct or uninstall the package that adds it",
            code="user_code.storage_failed",
        ) from error
    if lacking := [name for name in _NEEDED if not hasattr(store, name)]:
        raise ConfigError(
            f"the storage {entry.name}:// ({entry.value}) is no orchestrator.storage.store.Store: it has no "
            f"{', '.join(lacking)}",
            code="user_code.no_storage",
        )
    return store


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
