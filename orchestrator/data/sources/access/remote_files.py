"""Files of a bucket or of the hub: resolves URIs to objects, and opens one as an `InputFile`.

`object_stores` and `hub_datasets` implement the access to the storages.
"""

from __future__ import annotations

import errno
import io
import os
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from orchestrator.data.sources.access.hub_datasets import HubDatasets, is_hub
from orchestrator.data.sources.access.matches import fits, split_glob
from orchestrator.data.sources.access.object_stores import Buckets, split_uri
from orchestrator.data.sources.access.remote_objects import RemoteObject, RemoteStore, passes

_BUFFER_BYTES = 4 << 20
# A read whose answer is interrupted or too short is tried this often, with waits of at most this many
# seconds.
_TRIES, _WAIT_S = 4, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteMatches:
    """The matches of a URI: `objects` below `base`.

    `looked_for` is the pattern, for messages. `is_folder`: all objects below are meant. `passed_over` are the
    names that do not match the format's.
    """

    base: str
    looked_for: str
    objects: tuple[RemoteObject, ...]
    is_folder: bool = False
    passed_over: tuple[str, ...] = ()


def remote_matches(uri: str) -> RemoteMatches:
    """The objects that `uri` means, by the rules of local paths.

    They are an object of this name, else the matches of a pattern, else everything below it that is not
    hidden. One request for 1,000 objects below the part without a wildcard. Raises `OSError` with an
    explanation, `FileNotFoundError` if there is no such bucket.
    """
    bucket, key = split_uri(uri)
    store = store_of(uri)
    whole = store.head(uri) if key else None
    if whole is not None:
        base, _, name = f"{bucket}/{key}".rpartition("/")
        return RemoteMatches(base=base, looked_for="that object", objects=(replace(whole, name=name),))
    folder, pattern = split_glob(f"{bucket}/{key}", "/")
    if pattern:
        parts = tuple(pattern.split("/"))
        objects = tuple(o for o in store.below(folder) if name_fits(tuple(o.name.split("/")), parts))
        return RemoteMatches(base=folder, looked_for=pattern, objects=objects)
    base = f"{bucket}/{key}".rstrip("/")
    visible = tuple(o for o in store.below(base) if not any(p.startswith(".") for p in o.name.split("/")))
    return RemoteMatches(base=base, looked_for="**/*", objects=visible, is_folder=True)


def store_of(uri: str) -> RemoteStore:
    """The storage that a URI names."""
    return HubDatasets() if is_hub(uri) else Buckets()


def name_fits(name: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether a name, split into parts, matches a pattern.

    `**` matches any number of folders, also none, but no hidden folder.
    """
    if not parts or not name:
        return not parts and not name
    if parts[0] != "**":
        return fits(name[0], parts[0]) and name_fits(name[1:], parts[1:])
    rest = parts[1:] or ("*",)
    deepest = next((i for i, part in enumerate(name) if part.startswith(".")), len(name))
    return any(name_fits(name[skipped:], rest) for skipped in range(deepest + 1))


class RemoteFile:
    """An object as it was when opened: reading raises `OSError` if it was replaced since.

    Holds no connection. Thread-safe. See `InputFile`.
    """

    def __init__(self, uri: str) -> None:
        """Raises `FileNotFoundError`, or another `OSError` with an explanation. One request."""
        self.name, self._store = uri, store_of(uri)
        found = self._store.head(uri)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", uri)
        self.size, self.mtime_ns, self.etag = found.size, found.mtime_ns, found.etag

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """See `InputFile`. One request, with retries if its answer is interrupted."""
        end = min(offset + num_bytes, self.size)
        return self._range(offset, end) if offset < end else b""

    @retry(
        retry=retry_if_exception(passes),
        stop=stop_after_attempt(_TRIES),
        wait=wait_exponential(max=_WAIT_S),
        reraise=True,
    )
    def _range(self, start: int, end: int) -> bytes:
        data = self._store.read(self.name, start, end, self.etag)
        if len(data) != end - start:
            raise OSError(
                errno.EIO, f"bytes [{start}, {end}) were asked for, and {len(data)} came", self.name
            )
        return data

    def stream(self) -> io.BufferedIOBase:
        """See `InputFile`. Reads 4 MiB at a time."""
        return io.BufferedReader(_Remote(self), _BUFFER_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class _Remote(io.RawIOBase):
    """An object, read from its own position."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read_at(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at
