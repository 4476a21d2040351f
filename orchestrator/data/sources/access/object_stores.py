"""Buckets as a storage of input files: their objects, behind the interface `RemoteStore`.

`orchestrator.storage.buckets` documents how a bucket is reached, and with which credentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.config.redaction import redacted_text
from orchestrator.data.sources.access.hub_datasets import is_hub, split_hub
from orchestrator.data.sources.access.remote_objects import RemoteObject
from orchestrator.errors import ConfigError
from orchestrator.storage.buckets import SCHEMES, bucket_of, called_so, explained, is_uri, split_bucket
from orchestrator.storage.store_kinds import require_plain

_NS = 1_000_000_000


def is_remote(path: str) -> bool:
    """Whether a path is a URI, or is probably meant as one."""
    return is_uri(path) or path.startswith("hf:")


def split_uri(uri: str) -> tuple[str, str]:
    """(the bucket's own URI, the key in it); for the hub, that of the dataset at its revision.

    Raises `ConfigError` if it is no bucket of a known kind, and as `require_plain`.
    """
    if is_hub(uri):
        hub = split_hub(uri)
        return hub.root, hub.key
    at = split_bucket(uri)
    if at is None:
        shown = redacted_text(uri)
        raise ConfigError(
            f"{shown}: the URI is not supported; files are read from local paths, from a bucket "
            f"({', '.join(f'{s}://' for s in SCHEMES)} with its name) and from hf://datasets/. Mount the "
            f"storage, or give such a URI{called_so(shown)}",
            code="config.storage_uri",
        )
    require_plain(uri, pattern=True)
    return at


class Buckets:
    """Buckets as a storage; see `RemoteStore`."""

    def head(self, uri: str) -> RemoteObject | None:
        """See `RemoteStore`. One request."""
        bucket, key = split_uri(uri)
        store = bucket_of(bucket)  # raises if the library is not installed
        import obstore

        try:
            with explained(uri):
                return _object(obstore.head(store, key), uri)
        except FileNotFoundError:
            return None

    def below(self, folder: str) -> Iterator[RemoteObject]:
        """See `RemoteStore`. One request for 1,000 objects."""
        bucket, prefix = split_uri(folder)
        store, begin = bucket_of(bucket), f"{prefix}/" if prefix else ""
        import obstore

        with explained(folder):
            for found in obstore.list(store, prefix=prefix or None, chunk_size=1000):
                for meta in found:
                    name = meta["path"].removeprefix(begin)
                    if name and not name.endswith("/"):  # not a folder marker, which consoles create
                        yield _object(meta, name)

    def read(self, uri: str, start: int, stop: int, etag: str) -> bytes:
        """See `RemoteStore`. One request."""
        import obstore

        bucket, key = split_uri(uri)
        options: Any = {"range": (start, stop)}
        if etag:
            options["if_match"] = f'"{etag}"'
        with explained(uri):
            return bytes(obstore.get(bucket_of(bucket), key, options=options).bytes())


def _object(meta: Any, name: str) -> RemoteObject:
    at = meta["last_modified"]
    # Azure's list returns it without the quotes of its other answers
    etag = (meta["e_tag"] or "").strip('"')
    mtime_ns = int(at.replace(microsecond=0).timestamp()) * _NS + at.microsecond * 1000
    return RemoteObject(name=name, size=meta["size"], mtime_ns=mtime_ns, etag=etag)
