"""Lines of a text file as records, the number of a line, and the encodings of text that are refused.

Of a line that is too long, only the size is kept. Newlines are counted once per file and process and the
counts are kept, so that many bad records cost one reading of the file. A file in UTF-16 or UTF-32 is detected
by its first bytes and refused by name.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from orchestrator.data.sources.access.compressed import READ_BYTES
from orchestrator.data.sources.access.input_file import InputFile, open_input
from orchestrator.data.sources.access.records_in_memory import (
    MAX_RECORD_BYTES,
    Lines,
    Records,
    Whole,
    join,
    split_lines,
)
from orchestrator.errors import ConfigError, DataError

# (line number, records, place of the first) of consecutive records. The line number is None if it would have
# to be counted.
Batch = tuple[int | None, Records, int]


def range_lines(file: InputFile, start: int, stop: int, file_bytes: int) -> Iterator[Batch]:
    """The lines that begin in [start, stop) of the file's first `file_bytes`.

    Raises `DataError` if the file's first bytes are UTF-16 or UTF-32.
    """
    begin, data = read_range(file, start, stop, file_bytes)
    if start == 0:
        require_utf8(file.name, data)
    else:
        require_utf8_file(file, file_bytes)
    lines = split_lines(data)
    first = 1 if begin == 0 else None
    if len(data) > MAX_RECORD_BYTES:
        yield from _without_long_ones(lines, first, begin)
    elif len(lines):
        yield first, lines, begin
    after = begin + len(data)
    if after < stop and (size := _line_bytes(file, after, file_bytes)):
        yield None if first is None else first + len(lines), Whole(None, size), after


def _without_long_ones(lines: Lines, first: int | None, place: int) -> Iterator[Batch]:
    """The lines; of those that are too long only the sizes."""
    sizes, begin = lines.sizes, 0
    for index in [*np.flatnonzero(sizes > MAX_RECORD_BYTES).tolist(), len(lines)]:
        if index > begin:
            line = None if first is None else first + begin
            yield line, lines.cut(begin, index), place + int(sizes[:begin].sum())
        if index < len(lines):
            line = None if first is None else first + index
            yield line, Whole(None, int(sizes[index])), place + int(sizes[:index].sum())
        begin = index + 1


def _line_bytes(file: InputFile, start: int, file_bytes: int) -> int:
    """Bytes of the line that begins at `start`, with its newline, at any length; 0 at the file's end."""
    size = 0
    while piece := file.read_at(start + size, min(READ_BYTES, file_bytes - start - size)):
        newline = piece.find(b"\n")
        if newline >= 0:
            return size + newline + 1
        size += len(piece)
    return size


def read_range(file: InputFile, start: int, stop: int, file_bytes: int) -> tuple[int, bytes]:
    """(offset, bytes) of the lines whose first byte lies in [start, stop).

    The last line is complete, however far it extends within the file's first `file_bytes`. If it is longer
    than `MAX_RECORD_BYTES`, it is left out.

    Reading begins at start - 1: a line begins at `start` exactly if the byte before it ends one. Beginning at
    `start` itself would lose that line (data rule 10).
    """
    begin = max(0, start - 1)
    data = file.read_at(begin, stop - begin)
    if start > 0:
        newline = data.find(b"\n")
        # the last byte may end a line, but the next line begins at `stop`
        if newline < 0 or newline >= len(data) - 1:
            return stop, b""
        begin, data = begin + newline + 1, data[newline + 1 :]
    if not data or data.endswith(b"\n"):
        return begin, data
    last = len(data) - data.rfind(b"\n") - 1  # bytes of the line that extends beyond the range
    pieces, position, ends = [data], begin + len(data), False
    while not ends and last <= MAX_RECORD_BYTES:
        if not (piece := file.read_at(position, min(READ_BYTES, file_bytes - position))):
            break
        newline = piece.find(b"\n")
        ends = newline >= 0
        pieces.append(piece[: newline + 1] if ends else piece)
        position += len(piece)
        last += len(pieces[-1])
    if last > MAX_RECORD_BYTES:
        return begin, data[: data.rfind(b"\n") + 1]
    return begin, b"".join(pieces)


def stream_lines(pieces: Iterator[bytes]) -> Iterator[Batch]:
    """The lines of a stream, in batches of about one piece. A line that spans pieces is joined once."""
    line, place, held, num_held = 1, 0, list[bytes](), 0
    for read in pieces:
        piece, first = read, read.find(b"\n") + 1
        if first and num_held + first > MAX_RECORD_BYTES:
            yield line, Whole(None, num_held + first), place
            line, place = line + 1, place + num_held + first
            piece, held, num_held = piece[first:], [], 0
        end = piece.rfind(b"\n") + 1
        if end:
            lines = split_lines(join([*held, piece[:end]]))
            yield line, lines, place
            line, place = line + len(lines), place + num_held + end
            piece, held, num_held = piece[end:], [], 0
        num_held += len(piece)
        if num_held <= MAX_RECORD_BYTES:
            held.append(piece)
        else:
            held.clear()
    if num_held > MAX_RECORD_BYTES:
        yield line, Whole(None, num_held), place
    elif num_held:
        yield line, split_lines(join(held)), place


# ------------------------------------------------------------------------------------------- numbers of lines
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


# --------------------------------------------------------------------------------------------------- encoding
TEXT_ENCODING = "data.text_encoding"
# The number of first bytes by which a file's encoding is detected.
BEGIN_BYTES = 4 << 10
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32LE"),  # before UTF-16LE, whose mark it begins with
    (codecs.BOM_UTF32_BE, "UTF-32BE"),
    (codecs.BOM_UTF16_LE, "UTF-16LE"),
    (codecs.BOM_UTF16_BE, "UTF-16BE"),
)
_LOW = bytes(range(0x20))
_LAST_PLANE = 3  # the highest Unicode plane with letters and signs
_NUM_KNOWN = 1 << 14
_known: set[tuple[str, int, int, str]] = set()


def other_encoding(begin: bytes) -> str | None:
    """The encoding of a text with these first bytes, if that is UTF-16 or UTF-32.

    It is shown by a byte order mark, or by zero bytes at every other place. A text in UTF-8 may have zero
    bytes at any other places.
    """
    begin = begin[:BEGIN_BYTES]
    for mark, name in _MARKS:
        if begin.startswith(mark):
            return name
    if begin.count(0) < 2:
        return None
    first, second, third, fourth = (begin[i : len(begin) - len(begin) % 4 : 4] for i in range(4))
    if _is_utf32(first, third, fourth):
        return "UTF-32LE"
    if _is_utf32(fourth, second, first):
        return "UTF-32BE"
    even, odd = (begin[i : len(begin) - len(begin) % 2 : 2] for i in range(2))
    if _is_utf16(even, odd, begin):
        return "UTF-16LE"
    return "UTF-16BE" if _is_utf16(odd, even, begin) else None


def _is_utf32(lowest: bytes, second_highest: bytes, highest: bytes) -> bool:
    """Whether these bytes of each four are those of characters."""
    has_planes = not any(highest) and max(second_highest, default=0) <= _LAST_PLANE
    return len(lowest) > 1 and has_planes and 2 * lowest.count(0) <= len(lowest)


def _is_utf16(low: bytes, high: bytes, begin: bytes) -> bool:
    """Whether these are the lower and higher bytes of characters.

    In most alphabets most of the higher bytes are below 0x20, and those of spaces and line ends are 0.
    """
    num_zeros = high.count(0)
    if num_zeros < 2 or 16 * low.count(0) > len(low):
        return False
    num_low = len(high) - len(high.translate(None, _LOW))
    return 4 * num_low >= 3 * len(high) or (8 * num_zeros >= len(high) and not _is_utf8(begin))


def _is_utf8(begin: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        return False
    return True


@contextmanager
def before_a_start() -> Iterator[None]:
    """Before a run has started, a file in another encoding raises `ConfigError`."""
    try:
        yield
    except DataError as error:
        if error.code != TEXT_ENCODING:
            raise
        raise ConfigError(str(error), code=error.code) from error


def require_utf8(name: str, begin: bytes) -> None:
    """Raises `DataError` if the file `name` with these first bytes is UTF-16 or UTF-32."""
    if (encoding := other_encoding(begin)) is not None:
        raise DataError(
            f"{name}: it is {encoding}, and texts are read as UTF-8; convert it, for example by "
            f"iconv -f {encoding} -t UTF-8",
            code=TEXT_ENCODING,
        )


def require_utf8_file(file: InputFile, file_bytes: int) -> None:
    """The same for a file of which another part is read. Its first bytes are read once in a process."""
    key = (file.name, file.size, file.mtime_ns, file.etag)
    if key not in _known:
        require_utf8(file.name, file.read_at(0, min(BEGIN_BYTES, file_bytes)))
        if len(_known) >= _NUM_KNOWN:
            _known.clear()
        _known.add(key)


def utf8_pieces(name: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the decoded pieces of the file `name`. Raises as `require_utf8`."""
    for number, piece in enumerate(pieces):
        if number == 0:
            require_utf8(name, piece)
        yield piece
