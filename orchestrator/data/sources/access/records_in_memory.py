"""Physical records in memory: one buffer and the end of each record in it, without an object for each.

Of a record that is too long to be held, only the size is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from orchestrator.records.tokens import Int64Array

# A longer record is not held: only its size is kept, and it gives no document.
MAX_RECORD_BYTES = 1 << 30
_NEWLINE = 10
# Newlines are searched in pieces of this size, which bounds the memory beside the buffer.
_STRETCH_BYTES = 1 << 20
# The number of line ends that are Python integers at a time.
_STRETCH_LINES = 1 << 12


class Records(Protocol):
    """Records in file order: bytes, or the values that their format makes documents of.

    `records[i]` is None for a null, and for a record that is too long to be held.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    @property
    def sizes(self) -> Int64Array:
        """(num_records,) decoded bytes of each, with line ends; 0 for a null."""
        ...

    def size(self, index: int) -> int:
        """Decoded bytes of one record, with its line end."""
        ...

    def bytes_before(self, index: int) -> int:
        """The sum of the sizes before it."""
        ...

    def cut(self, start: int, stop: int) -> Records:
        """Records [start, stop)."""
        ...


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a buffer, without their newline.

    `ends[i]` is the end of line i in it, after its newline, and `begin` the beginning of the first line. It
    takes 4 bytes a line, or 8 in a buffer of 2 GiB or more.
    """

    data: bytes
    ends: npt.NDArray[Any]
    begin: int = 0

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> bytes:
        begin, end = self.ends.item(index - 1) if index else self.begin, self.ends.item(index)
        return self.data[begin : end - (self.data[end - 1] == _NEWLINE)]

    def __iter__(self) -> Iterator[bytes]:
        data, begin = self.data, self.begin
        for first in range(0, len(self), _STRETCH_LINES):
            for end in self.ends[first : first + _STRETCH_LINES].tolist():
                yield data[begin : end - (data[end - 1] == _NEWLINE)]
                begin = end

    @property
    def sizes(self) -> Int64Array:
        """Newlines included."""
        return np.diff(self.ends, prepend=np.asarray(self.begin, self.ends.dtype)).astype(np.int64)

    def size(self, index: int) -> int:
        """Newline included."""
        return int(self.ends.item(index) - self._begin(index))

    def bytes_before(self, index: int) -> int:
        """Newlines included."""
        return self._begin(index) - self.begin

    def cut(self, start: int, stop: int) -> Lines:
        """Lines [start, stop) of the same buffer."""
        begin = self._begin(start) if start < len(self) else self.begin
        return Lines(self.data, self.ends[start:stop], begin)

    def _begin(self, index: int) -> int:
        return int(self.ends.item(index - 1)) if index else self.begin


def split_lines(data: bytes) -> Lines:
    """The lines of a buffer. Only a newline ends one, and the last may lack it."""
    view, found = np.frombuffer(data, np.uint8), []
    kind = np.int32 if len(data) < 1 << 31 else np.int64
    for start in range(0, len(data), _STRETCH_BYTES):
        here = np.flatnonzero(view[start : start + _STRETCH_BYTES] == _NEWLINE)
        found.append((here + (start + 1)).astype(kind))
    if data and data[-1] != _NEWLINE:
        found.append(np.array([len(data)], kind))
    return Lines(data, np.concatenate(found) if found else np.empty(0, kind))


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a column: value i is `data[offsets[i] : offsets[i + 1]]`, a null if `valid[i]` is false."""

    data: memoryview
    offsets: Int64Array
    valid: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes | None:
        if self.valid is not None and not self.valid.item(index):
            return None
        return self.data[self.offsets.item(index) : self.offsets.item(index + 1)].tobytes()

    def __iter__(self) -> Iterator[bytes | None]:
        return (self[i] for i in range(len(self)))

    @property
    def sizes(self) -> Int64Array:
        """0 for a null: Arrow's readers keep no bytes of it."""
        return np.diff(self.offsets)

    def size(self, index: int) -> int:
        """0 for a null."""
        return int(self.offsets.item(index + 1) - self.offsets.item(index))

    def bytes_before(self, index: int) -> int:
        """Of the values."""
        return int(self.offsets.item(index) - self.offsets.item(0))

    def cut(self, start: int, stop: int) -> Values:
        """Values [start, stop) of the same buffers."""
        valid = None if self.valid is None else self.valid[start:stop]
        return Values(self.data, self.offsets[start : stop + 1], valid)


@dataclass(frozen=True, slots=True)
class Whole:
    """One record: a file, or one too long to be held (None), with its size."""

    content: bytes | None
    num_bytes: int

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bytes | None:
        if index != 0:
            raise IndexError(index)
        return self.content

    def __iter__(self) -> Iterator[bytes | None]:
        return iter((self.content,))

    @property
    def sizes(self) -> Int64Array:
        """Of the one record."""
        return np.array([self.num_bytes], np.int64)

    def size(self, index: int) -> int:
        """Of the one record."""
        assert index == 0, f"record {index} of one"
        return self.num_bytes

    def bytes_before(self, index: int) -> int:
        """Always 0."""
        assert index == 0, f"record {index} of one"
        return 0

    def cut(self, start: int, stop: int) -> Records:
        """Itself, or no record."""
        return self if (start, stop) == (0, 1) else Lines(b"", np.empty(0, np.int32))


def join(pieces: Sequence[bytes]) -> bytes:
    """The pieces joined. A single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Made:
    """Records that are made from their bytes on access."""

    raw: Records
    make: Callable[[bytes], Any]

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> Any:
        raw = self.raw[index]
        return None if raw is None else self.make(raw)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    @property
    def sizes(self) -> Int64Array:
        """Of the bytes."""
        return self.raw.sizes

    def size(self, index: int) -> int:
        """Of the bytes."""
        return self.raw.size(index)

    def bytes_before(self, index: int) -> int:
        """Of the bytes."""
        return self.raw.bytes_before(index)

    def cut(self, start: int, stop: int) -> Made:
        """Records [start, stop) of the same bytes."""
        return Made(self.raw.cut(start, stop), self.make)


@dataclass(frozen=True, slots=True)
class Objects:
    """Records that are objects already, or the error of a bad one. `names` are for messages."""

    items: tuple[Any, ...]
    sizes: Int64Array
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        found = self.items[index]
        if isinstance(found, Exception):
            raise found
        return found

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def size(self, index: int) -> int:
        """As estimated."""
        return int(self.sizes.item(index))

    def bytes_before(self, index: int) -> int:
        """As estimated."""
        return int(self.sizes[:index].sum())

    def cut(self, start: int, stop: int) -> Objects:
        """Records [start, stop)."""
        return Objects(self.items[start:stop], self.sizes[start:stop], self.names[start:stop])


def packed(pieces: Sequence[bytes]) -> Values:
    """The pieces as records of one buffer."""
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return Values(memoryview(b"".join(pieces)), offsets)
