"""Checks the size of content while it is written."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.errors import StorageError
from orchestrator.storage.store import Pieces


def exact(pieces: Pieces, size: int, name: str) -> Iterator[memoryview]:
    """The pieces, as bytes.

    Raises `StorageError` before the end if they are more or fewer than `size`. The caller must not publish
    what it has written so far.
    """
    found = 0
    for piece in pieces():
        view = memoryview(piece).cast("B")
        found += len(view)
        if found > size:
            break
        yield view
    if found != size:
        raise StorageError(
            f"cannot write {name}: {size} bytes were announced, its content has "
            f"{'more' if found > size else found}; nothing was published: what it is read from changed "
            "meanwhile; end whatever writes there, and run again"
        )
