"""Lines of a file as records: those that begin in a byte range, or all lines of a stream.

Of a line that is too long, only the size is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from orchestrator.data.sources.access.compressed import READ_BYTES
from orchestrator.data.sources.access.input_file import InputFile
from orchestrator.data.sources.access.records_in_memory import (
    MAX_RECORD_BYTES,
    Lines,
    Records,
    Whole,
    join,
    split_lines,
)
from orchestrator.data.sources.records.text_encoding import require_utf8, require_utf8_file

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
