"""Bytes of files as physical records: byte ranges of lines, compressed lines, row groups, whole files.

It knows no order and no JSON. Damage raises, whatever `on_bad_document` says: that covers records only.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader, RawIOBase
from typing import Any

import numpy as np
import zstandard

from orchestrator.data.sources.columns import read_column
from orchestrator.data.sources.fragments import FilePart, SourcePlan
from orchestrator.data.sources.input_file import open_input
from orchestrator.data.sources.manifest import require_unchanged
from orchestrator.data.sources.records_in_memory import (
    MAX_RECORD_BYTES,
    Lines,
    Records,
    Whole,
    join,
    split_lines,
)
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.records import Int64Array

# Compressed input and plain look-ahead are read in such pieces.
READ_BYTES = 1 << 20
# So much of a zstd file may decode to 64 MiB, but not to more.
_ZSTD_READ_BYTES = 1 << 11


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Consecutive records of one file within one fragment.

    `number` is the first record's number within the fragment, `line` the 1-based number of its line (or row)
    in the file, None where that would have to be counted. `place` is the first record's byte offset in the
    file, or its row where the records are `rows`.
    """

    fragment: int
    file: int
    number: int
    line: int | None
    records: Records
    place: int
    rows: bool

    @property
    def places(self) -> Int64Array:
        """(num_records,) the byte offset, or the row, of each."""
        if self.rows:
            return np.arange(self.place, self.place + len(self.records), dtype=np.int64)
        sizes = self.records.sizes
        return self.place + np.cumsum(sizes) - sizes

    def place_of(self, index: int) -> int:
        """The byte offset, or the row, of one record."""
        return self.place + (index if self.rows else self.records.bytes_before(index))

    def cut(self, start: int, stop: int) -> Part:
        """Records [start, stop) of it."""
        return Part(
            fragment=self.fragment,
            file=self.file,
            number=self.number + start,
            line=None if self.line is None else self.line + start,
            records=self.records.cut(start, stop),
            place=self.place_of(start) if start < len(self.records) else self.place,
            rows=self.rows,
        )


def read_fragment(plan: SourcePlan, fragment: int, accept_changed: bool = False) -> Iterator[Part]:
    """The records of a fragment in file order.

    Raises `DataIdentityError` if a file is gone or not what the run was started with, `DataError` if it is
    damaged or cannot be read.
    """
    number = 0
    for where in plan.parts(fragment):
        path, row = plan.manifest.path(where.file), plan.manifest.files[where.file]
        with naming_damage(path), open(path, "rb") as file:
            if not accept_changed:
                with open_input(plan.manifest.base, row.path) as same:
                    require_unchanged(row, path, same)
            for part in _parts(file, path, plan, where):
                yield replace(part, fragment=fragment, number=number)
                number += len(part.records)


def read_files(plan: SourcePlan, accept_changed: bool = False) -> Iterator[Part]:
    """The records of all files, each read from its first byte to its last; as if one fragment held them all.

    What it gives does not depend on how files are cut. Raises as `read_fragment` does.
    """
    number = 0
    for index, row in enumerate(plan.manifest.files):
        path = plan.manifest.path(index)
        groups = range(len(row.group_rows)) if plan.manifest.format == "parquet" else (None,)
        with naming_damage(path), open(path, "rb") as file:
            if not accept_changed:
                with open_input(plan.manifest.base, row.path) as same:
                    require_unchanged(row, path, same)
            for group in groups:
                where = FilePart(file=index, start=0, stop=row.bytes, group=group)
                for part in _parts(file, path, plan, where, whole=True):
                    yield replace(part, number=number)
                    number += len(part.records)


@contextmanager
def naming_damage(path: str) -> Iterator[None]:
    """Whatever a reader raises about the file at `path`, as `DataError` or `DataIdentityError` naming it."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataIdentityError(
            f"{path}: the run was started with this file and it is gone; put it back or start a new run"
        ) from error
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            f"{path}: cannot be read: {error}; put back the whole file, or start a run without it"
        ) from error


def _parts(
    file: BufferedReader, path: str, plan: SourcePlan, where: FilePart, whole: bool = False
) -> Iterator[Part]:
    """The records there, numbered by nobody yet. `whole`: plain lines are read as a stream, too."""
    for line, records, place in _records(file, path, plan, where, whole):
        yield Part(
            fragment=0,
            file=where.file,
            number=0,
            line=line,
            records=records,
            place=place,
            rows=where.group is not None,
        )


_Batch = tuple[int | None, Records, int]


def _records(
    file: BufferedReader, path: str, plan: SourcePlan, where: FilePart, whole: bool
) -> Iterator[_Batch]:
    """(line, records, place of the first) of the part's records, in one or more batches."""
    text_field, format_ = plan.manifest.text_field, plan.manifest.format
    size = plan.manifest.files[where.file].bytes  # what lies behind was appended, and is not the run's
    if where.group is not None:
        first_row = sum(plan.manifest.files[where.file].group_rows[: where.group])
        yield from read_column(path, where.group, text_field, first_row)
    elif format_ == "text":
        yield 1, _one_record(decoded(file, path, size)), 0
    elif whole or path.endswith((".gz", ".zst")):
        yield from _stream_lines(decoded(file, path, size))
    else:
        yield from _range_lines(file.fileno(), where.start, where.stop, size)


def _one_record(pieces: Iterator[bytes]) -> Whole:
    held, num_bytes = [], 0
    for piece in pieces:
        num_bytes += len(piece)
        if num_bytes <= MAX_RECORD_BYTES:
            held.append(piece)
        else:
            held.clear()
    return Whole(b"".join(held) if num_bytes <= MAX_RECORD_BYTES else None, num_bytes)


# ---------------------------------------------------------------------------------------- lines
def _range_lines(handle: int, start: int, stop: int, file_bytes: int) -> Iterator[_Batch]:
    begin, data = read_range(handle, start, stop, file_bytes)
    lines = split_lines(data)
    first = 1 if begin == 0 else None
    if len(data) > MAX_RECORD_BYTES:
        yield from _without_long_ones(lines, first, begin)
    elif len(lines):
        yield first, lines, begin
    after = begin + len(data)
    if after < stop and (size := _line_bytes(handle, after, file_bytes)):
        yield None if first is None else first + len(lines), Whole(None, size), after


def _without_long_ones(lines: Lines, first: int | None, place: int) -> Iterator[_Batch]:
    """The lines, of those that are too long the sizes alone."""
    sizes, begin = lines.sizes, 0
    for index in [*np.flatnonzero(sizes > MAX_RECORD_BYTES).tolist(), len(lines)]:
        if index > begin:
            line = None if first is None else first + begin
            yield line, lines.cut(begin, index), place + int(sizes[:begin].sum())
        if index < len(lines):
            line = None if first is None else first + index
            yield line, Whole(None, int(sizes[index])), place + int(sizes[:index].sum())
        begin = index + 1


def _line_bytes(handle: int, start: int, file_bytes: int) -> int:
    """Bytes of the line that begins there, its newline included, however long; 0 at the file's end."""
    size = 0
    while piece := os.pread(handle, min(READ_BYTES, file_bytes - start - size), start + size):
        newline = piece.find(b"\n")
        if newline >= 0:
            return size + newline + 1
        size += len(piece)
    return size


def read_range(handle: int, start: int, stop: int, file_bytes: int) -> tuple[int, bytes]:
    """(offset, bytes) of the lines whose first byte lies in [start, stop), whole, however far the last goes
    in the first `file_bytes` of the file; without that one where it is longer than `MAX_RECORD_BYTES`.

    Reading begins at start - 1: a line begins at `start` exactly if the byte before it ends one. Beginning at
    `start` itself would lose that line (data rule 10).
    """
    begin = max(0, start - 1)
    data = _read(handle, begin, stop)
    if start > 0:
        newline = data.find(b"\n")
        # the last byte may end a line, but what begins after it begins at `stop`
        if newline < 0 or newline >= len(data) - 1:
            return stop, b""
        begin, data = begin + newline + 1, data[newline + 1 :]
    if not data or data.endswith(b"\n"):
        return begin, data
    last = len(data) - data.rfind(b"\n") - 1  # bytes of the line that goes on after the range
    pieces, position, ends = [data], begin + len(data), False
    while not ends and last <= MAX_RECORD_BYTES:
        if not (piece := os.pread(handle, min(READ_BYTES, file_bytes - position), position)):
            break
        newline = piece.find(b"\n")
        ends = newline >= 0
        pieces.append(piece[: newline + 1] if ends else piece)
        position += len(piece)
        last += len(pieces[-1])
    if last > MAX_RECORD_BYTES:
        return begin, data[: data.rfind(b"\n") + 1]
    return begin, b"".join(pieces)


def _read(handle: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop); fewer only at the end of the file (a read may give less than asked)."""
    pieces = []
    while start < stop and (piece := os.pread(handle, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _stream_lines(pieces: Iterator[bytes]) -> Iterator[_Batch]:
    """Lines of a stream, in batches of about one piece; a line that spans pieces is joined once."""
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


# ---------------------------------------------------------------------------------------- compressed
def decoded(file: BufferedReader, path: str, file_bytes: int) -> Iterator[bytes]:
    """The decoded content of the file's first `file_bytes` in pieces, by the name's ending. A stream that is
    cut off there raises `EOFError`.
    """
    begin = BufferedReader(_Begin(file.fileno(), file_bytes))
    try:
        if path.endswith(".gz"):
            yield from _gunzip(begin)
        elif path.endswith(".zst"):
            yield from _unzstd(begin)
        else:
            while piece := begin.read(READ_BYTES):
                yield piece
    except EOFError as error:
        size = os.fstat(file.fileno()).st_size
        if size <= file_bytes:
            raise
        raise EOFError(
            f"{error}; it has {size} bytes, and the run reads the {file_bytes} that it was started with"
        ) from error


class _Begin(RawIOBase):
    """The first bytes of an open file, as a file: what is appended while it is read is not seen."""

    def __init__(self, handle: int, num_bytes: int) -> None:
        self._handle, self._at, self._left = handle, 0, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num = os.preadv(self._handle, [memoryview(buffer)[: self._left]], self._at)
        self._at, self._left = self._at + num, self._left - num
        return num

    def tell(self) -> int:
        return self._at


def _gunzip(file: BufferedReader[Any]) -> Iterator[bytes]:
    if not file.peek(1):
        raise EOFError("it is empty, which no gzip file is")
    with gzip.GzipFile(fileobj=file, mode="rb") as stream:
        while piece := stream.read(READ_BYTES):
            yield piece


def _unzstd(file: BufferedReader[Any]) -> Iterator[bytes]:
    """Frame after frame. python-zstandard's own reader ends without an error where the file is cut off."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, data = None, b""
    pieces, num_bytes = list[bytes](), 0
    while data := data or file.read(_ZSTD_READ_BYTES):
        frame = frame or decompressor.decompressobj()
        pieces.append(frame.decompress(data))
        num_bytes += len(pieces[-1])
        data = b""
        if frame.eof:
            data, frame = frame.unused_data, None
        if num_bytes >= READ_BYTES:
            yield from _cut(join(pieces))
            pieces, num_bytes = [], 0
    yield from _cut(b"".join(pieces))
    if frame is not None or not file.tell():
        raise EOFError("the compressed stream is cut off: its last frame does not end")


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[start : start + READ_BYTES] for start in range(0, len(data), READ_BYTES))
