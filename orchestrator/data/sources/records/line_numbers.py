"""The number of a line from its byte offset.

Newlines are counted once per file and process and the counts are kept, so that many bad records cost one
reading of the file.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from functools import cache

from orchestrator.data.sources.access.compressed import READ_BYTES
from orchestrator.data.sources.access.input_file import open_input

# The count is noted this often while reading, because places may be requested in any order, also backwards.
_NOTE_EVERY_BYTES = 4 * READ_BYTES
# At most this much is read for one record, so that a tokenizer does not stall for it.
LIMIT_BYTES = 16 << 30


class LineNumbers:
    """The number of newlines before places of a file that does not change. Not thread-safe."""

    def __init__(self, base: str, path: str) -> None:
        self._base, self._path = base, path
        self._known = [(0, 0)]  # (offset, newlines before it), sorted

    def newlines_before(self, offset: int, limit_bytes: int = LIMIT_BYTES) -> int | None:
        """Newlines in the file's first `offset` bytes. Reads from the nearest place counted before.

        None if more than `limit_bytes` would have to be read; the next call continues where this one stopped.
        """
        at, found = self._known[bisect_right(self._known, (offset, offset)) - 1]
        stop = min(offset, at + limit_bytes)
        noted = at
        with open_input(self._base, self._path) as file:
            while at < stop and (piece := file.read_at(at, min(READ_BYTES, stop - at))):
                found += piece.count(b"\n")
                at += len(piece)
                if at - noted >= _NOTE_EVERY_BYTES:
                    self._remember(at, found)
                    noted = at
        self._remember(at, found)
        return found if at == offset else None

    def _remember(self, at: int, found: int) -> None:
        if (at, found) != self._known[bisect_right(self._known, (at, at)) - 1]:
            insort(self._known, (at, found))


@cache
def line_numbers(base: str, path: str, size: int, probe: str) -> LineNumbers:
    """The counts of this process for the file with this size and probe (`file_rows.FileRow`)."""
    del size, probe
    return LineNumbers(base, path)
