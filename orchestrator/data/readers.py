"""Bytes of files as physical records: byte ranges of lines, compressed lines, row groups, whole files.

It knows no order and no JSON. Damage raises, whatever `on_bad_document` says: that covers records only.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader

import numpy as np
import zstandard

from orchestrator.data.fragments import FilePart, SourcePlan
from orchestrator.data.manifest import require_unchanged
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.records import Int64Array

# Compressed input and plain look-ahead are read in such pieces.
READ_BYTES = 1 << 20
_ZSTD_READ_BYTES = 1 << 16
_PARQUET_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Consecutive records of one file within one fragment.

    `number` is the first record's number within the fragment, `line` the 1-based number of its line (or row)
    in the file, None where that would have to be counted. `places` are byte offsets, in a Parquet file rows.
    """

    fragment: int
    file: int
    number: int
    line: int | None
    records: Sequence[bytes | None]
    sizes: Int64Array  # (num_records,) decoded bytes, line ends included
    places: Int64Array  # (num_records,)

    def cut(self, start: int, stop: int) -> Part:
        """Records [start, stop) of it."""
        return Part(
            fragment=self.fragment,
            file=self.file,
            number=self.number + start,
            line=None if self.line is None else self.line + start,
            records=self.records[start:stop],
            sizes=self.sizes[start:stop],
            places=self.places[start:stop],
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
                require_unchanged(row, path, file.fileno())
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
                require_unchanged(row, path, file.fileno())
            for group in groups:
                where = FilePart(file=index, start=0, stop=row.bytes, group=group)
                for part in _parts(file, path, plan, where, whole=True):
                    yield replace(part, number=number)
                    number += len(part.records)


def _count(records: Sequence[object]) -> Int64Array:
    return np.arange(len(records), dtype=np.int64)


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
    for line, records, sizes, start in _records(file, path, plan, where, whole):
        places = start + np.cumsum(sizes) - sizes if where.group is None else start + _count(records)
        yield Part(
            fragment=0, file=where.file, number=0, line=line, records=records, sizes=sizes, places=places
        )


_Batch = tuple[int | None, Sequence[bytes | None], Int64Array, int]


def _records(
    file: BufferedReader, path: str, plan: SourcePlan, where: FilePart, whole: bool
) -> Iterator[_Batch]:
    """(line, records, sizes, place of the first) of the part's records, in one or more batches."""
    text_field, format_ = plan.manifest.text_field, plan.manifest.format
    if where.group is not None:
        yield from _rows(
            path, where.group, text_field, sum(plan.manifest.files[where.file].group_rows[: where.group])
        )
    elif format_ == "text":
        content = b"".join(decoded(file, path))
        yield 1, [content], np.array([len(content)], np.int64), 0
    elif whole or path.endswith((".gz", ".zst")):
        yield from _stream_lines(decoded(file, path))
    else:
        start, data = read_range(file.fileno(), where.start, where.stop)
        lines, sizes = split_lines(data)
        if lines:
            yield 1 if start == 0 else None, lines, sizes, start


# ---------------------------------------------------------------------------------------- lines
def read_range(handle: int, start: int, stop: int) -> tuple[int, bytes]:
    """(offset, bytes) of the lines whose first byte lies in [start, stop), whole, however far the last goes.

    Reading begins at start - 1: a line begins at `start` exactly if the byte before it ends one. Beginning at
    `start` itself would lose that line (DATA.md rule 10).
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
    pieces, position = [data], begin + len(data)
    while piece := os.pread(handle, READ_BYTES, position):
        newline = piece.find(b"\n")
        if newline >= 0:
            pieces.append(piece[: newline + 1])
            break
        pieces.append(piece)
        position += len(piece)
    return begin, b"".join(pieces)


def _read(handle: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop); fewer only at the end of the file (a read may give less than asked)."""
    pieces = []
    while start < stop and (piece := os.pread(handle, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def split_lines(data: bytes) -> tuple[list[bytes], Int64Array]:
    """The lines without their newline, and their sizes with it. Nothing else ends a line."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    sizes = np.fromiter(map(len, lines), np.int64, len(lines)) + 1
    if lines and not data.endswith(b"\n"):
        sizes[-1] -= 1
    return lines, sizes


def _stream_lines(pieces: Iterator[bytes]) -> Iterator[_Batch]:
    """Lines of a stream, in batches of about one piece; a line that spans pieces is joined once."""
    line, place, held = 1, 0, list[bytes]()
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if not end:
            held.append(piece)
            continue
        data = b"".join([*held, piece[:end]])
        held = [piece[end:]]
        lines, sizes = split_lines(data)
        yield line, lines, sizes, place
        line, place = line + len(lines), place + len(data)
    lines, sizes = split_lines(b"".join(held))
    if lines:
        yield line, lines, sizes, place


# ---------------------------------------------------------------------------------------- compressed
def decoded(file: BufferedReader, path: str) -> Iterator[bytes]:
    """The decoded content in pieces, by the name's ending. A stream that is cut off raises `EOFError`."""
    if path.endswith(".gz"):
        yield from _gunzip(file)
    elif path.endswith(".zst"):
        yield from _unzstd(file)
    else:
        while piece := file.read(READ_BYTES):
            yield piece


def _gunzip(file: BufferedReader) -> Iterator[bytes]:
    if not file.peek(1):
        raise EOFError("it is empty, which no gzip file is")
    with gzip.GzipFile(fileobj=file, mode="rb") as stream:
        while piece := stream.read(READ_BYTES):
            yield piece


def _unzstd(file: BufferedReader) -> Iterator[bytes]:
    """Frame after frame. python-zstandard's own reader ends silently where the file is cut off."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, data = None, b""
    while data := data or file.read(_ZSTD_READ_BYTES):
        frame = frame or decompressor.decompressobj()
        piece = frame.decompress(data)
        data = b""
        if frame.eof:
            data, frame = frame.unused_data, None
        if piece:
            yield piece
    if frame is not None or not file.tell():
        raise EOFError("the compressed stream is cut off: its last frame does not end")


# ---------------------------------------------------------------------------------------- Parquet
def _rows(path: str, group: int, column: str, first_row: int) -> Iterator[_Batch]:
    """The column's values of a row group as bytes (None: null), in batches. Places are rows of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            done = first_row
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=[column]):
                values = batch.column(0)
                if pa.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                # as binary: what is no UTF-8 must show as a bad document, not end the reading
                records = values.cast(pa.large_binary()).to_pylist()
                sizes = np.fromiter((len(r or b"") for r in records), np.int64, len(records))
                yield done + 1, records, sizes, done
                done += len(records)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
