"""The interface of remote storages, and the properties of their objects."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteObject:
    """An object as its storage lists it.

    `name` is relative to the requested base. `etag` has no quotes (`W/` before a weak one stays).
    """

    name: str
    size: int
    mtime_ns: int
    etag: str


class RemoteStore(Protocol):
    """A kind of storage. It raises `OSError` with an explanation; an error with `errno.EIO` may be
    temporary.
    """

    def head(self, uri: str) -> RemoteObject | None:
        """The object of this URI, which is its name; None if there is none."""
        ...

    def below(self, folder: str) -> Iterator[RemoteObject]:
        """Every object below a folder, which may be a whole bucket."""
        ...

    def read(self, uri: str, start: int, stop: int, etag: str) -> bytes:
        """Bytes [start, stop) of an object. Raises `OSError` if it no longer has this etag."""
        ...


def passes(error: BaseException) -> bool:
    """Whether an error of a storage is worth a retry."""
    return isinstance(error, OSError) and error.errno == errno.EIO
