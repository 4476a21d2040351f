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
            f"cannot write {name}: expected {size} bytes, its content has "
            f"{'more' if found > size else found}, because its source changed meanwhile. Nothing was "
            "published; end the process that writes the source, and run again",
            code="storage.changed_while_read",
        )
