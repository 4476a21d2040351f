"""The number of a line from its byte offset: newlines are counted once per file and process, never again.

It knows no record; what is counted stays, so that many bad records cost one reading of the file, not many.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from functools import cache

from orchestrator.data.sources.compressed import READ_BYTES
from orchestrator.data.sources.input_file import open_input

# While it reads it notes the count so often: places may be asked for in any order, backwards, too.
_NOTE_EVERY_BYTES = 4 * READ_BYTES
# For one record at most so much is read: a tokenizer may not stand still for its sake.
LIMIT_BYTES = 16 << 30


class LineNumbers:
    """How many newlines lie before places of a file that does not change. Not for several threads."""

    def __init__(self, base: str, path: str) -> None:
        self._base, self._path = base, path
        self._known = [(0, 0)]  # (offset, newlines before it), sorted

    def newlines_before(self, offset: int, limit_bytes: int = LIMIT_BYTES) -> int | None:
        """Newlines in the file's first `offset` bytes; None if more than `limit_bytes` would have to be read:
        the next call goes on where this one has stopped. Reads from the nearest place counted before.
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
    """Those of this process for the file that has this size and probe (`manifest.FileRow`)."""
    del size, probe
    return LineNumbers(base, path)
