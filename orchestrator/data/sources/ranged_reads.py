"""A file of a bucket, or of the hub, as pyarrow reads parts of it that are known before: each is asked for in
few large requests, and nothing beside it.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable

from orchestrator.data.sources.input_file import InputFile
from orchestrator.data.sources.records_in_memory import join

# Of a part so much is asked for, and held, at a time.
PIECE_BYTES = 4 << 20


class RangedReads(io.RawIOBase):
    """The file as a seekable stream. Not for several threads."""

    def __init__(self, file: InputFile) -> None:
        self._file, self._at = file, 0
        self._starts, self._stops = list[int](), list[int]()
        self._held: dict[int, tuple[int, bytes]] = {}  # of each part what was read last: its place, and it

    def expect(self, parts: Iterable[tuple[int, int]]) -> None:
        """What will be read: bytes [start, stop) each, which do not overlap."""
        ordered = sorted(parts)
        self._starts, self._stops = [start for start, _ in ordered], [stop for _, stop in ordered]
        self._held = {}

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def read(self, size: int = -1) -> bytes:
        """So many bytes, fewer at the file's end only."""
        stop = self._file.size if size < 0 else self._at + size
        found = self.read_at(self._at, stop - self._at)
        self._at += len(found)
        return found

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """See `InputFile`. The stream's place stays."""
        at, stop = offset, min(offset + num_bytes, self._file.size)
        found = list[bytes]()
        while at < stop:
            found.append(self._piece(at, stop - at))
            at += len(found[-1])
        return join(found) if found else b""

    def _piece(self, at: int, num_bytes: int) -> bytes:
        """Up to so many bytes from there."""
        number = bisect_right(self._starts, at) - 1
        if number < 0 or at >= self._stops[number]:
            ahead = self._starts[number + 1] if number + 1 < len(self._starts) else self._file.size
            return self._file.read_at(at, min(num_bytes, ahead - at))
        begin, held = self._held.get(number, (at, b""))
        if not begin <= at < begin + len(held):
            begin, held = at, self._file.read_at(at, min(self._stops[number] - at, PIECE_BYTES))
            self._held[number] = begin, held
        return held[at - begin : at - begin + num_bytes]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at
