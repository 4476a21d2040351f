"""A remote file for pyarrow, whose parts to be read are known in advance.

Each part is requested in few large requests, and nothing else.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable

from orchestrator.data.sources.access.input_file import InputFile
from orchestrator.data.sources.access.records_in_memory import join

# The bytes of a part that are requested, and held, at a time.
PIECE_BYTES = 4 << 20


class RangedReads(io.RawIOBase):
    """The file as a seekable stream. Not thread-safe."""

    def __init__(self, file: InputFile) -> None:
        self._file, self._at = file, 0
        self._starts, self._stops = list[int](), list[int]()
        self._held: dict[int, tuple[int, bytes]] = {}  # by part, its last piece: place and bytes

    def expect(self, parts: Iterable[tuple[int, int]]) -> None:
        """Declares the parts that will be read: bytes [start, stop) each, which do not overlap."""
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
        """`size` bytes, fewer only at the file's end."""
        stop = self._file.size if size < 0 else self._at + size
        found = self.read_at(self._at, stop - self._at)
        self._at += len(found)
        return found

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """See `InputFile`. Does not move the stream's position."""
        at, stop = offset, min(offset + num_bytes, self._file.size)
        found = list[bytes]()
        while at < stop:
            found.append(self._piece(at, stop - at))
            at += len(found[-1])
        return join(found) if found else b""

    def _piece(self, at: int, num_bytes: int) -> bytes:
        """Up to `num_bytes` bytes from `at`."""
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
