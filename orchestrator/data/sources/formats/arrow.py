"""`arrow`: a record per row of an Arrow IPC file (Feather V2) or IPC stream, cut at record batches.

Both are one sequence of messages, the file with a magic before and a footer behind. Their small headers are
read here, not their bodies, so that a file is cut without reading it; the rest is pyarrow's.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.data.sources.column_schema import columns_of, require_columns
from orchestrator.data.sources.columns import read_columns
from orchestrator.data.sources.documents import Content
from orchestrator.data.sources.formats.base import Format, Units
from orchestrator.data.sources.formats.parquet import RowFormat
from orchestrator.data.sources.input_file import LocalFile
from orchestrator.data.sources.line_records import Batch
from orchestrator.data.sources.ranged_reads import RangedReads
from orchestrator.errors import ConfigError, DataError

if TYPE_CHECKING:
    from orchestrator.data.sources.file_rows import FileRow
    from orchestrator.data.sources.fragments import FilePart
    from orchestrator.data.sources.input_file import InputFile

_MAGIC, _END, _CONTINUES = b"ARROW1\0\0", b"ARROW1", b"\xff\xff\xff\xff"
# Record batches are joined to units of at least so many bytes; a batch is held as a whole.
_UNIT_BYTES = 2 << 20
# Headers are read in such pieces.
_READ_BYTES = 1 << 12
# The kinds of messages (org.apache.arrow.flatbuf.MessageHeader).
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of a file: where it lies, header and body, its kind, and the rows of a record batch."""

    start: int
    stop: int
    kind: int
    rows: int


class ArrowFiles(RowFormat):
    """A record per row."""

    name = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather", ".arrows")

    def units(self, file: InputFile, content: Content) -> Units:
        """Runs of record batches, with the bytes that they take in the file: where a unit begins follows from
        those before it.
        """
        import pyarrow as pa

        units, begin = list[list[int]](), 0
        for message in _messages(file, file.size):
            if message.kind == _BATCH:
                if not units or units[-1][1] >= _UNIT_BYTES:
                    units.append([0, 0])
                units[-1][0] += message.rows
                units[-1][1] += message.stop - message.start
            elif units:
                raise ConfigError(
                    f"{file.name}: a dictionary stands behind record batches, so these cannot be read apart; "
                    "write the file anew with unify_dictionaries=True, or as Parquet"
                )
            else:
                begin = message.stop
        try:
            schema = pa.ipc.open_stream(_Joined(file, _head(file), begin, begin)).schema
            require_columns(file.name, schema, content)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file.name}: not a whole Arrow file: {error}; replace it") from error
        return tuple(rows for rows, _ in units), tuple(size for _, size in units)

    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """See `Format`."""
        import pyarrow as pa

        del whole
        assert part.group is not None, "an Arrow file is cut at record batches"
        begin = next(
            (message.start for message in _messages(file, row.bytes) if message.kind == _BATCH), row.bytes
        )
        start = begin + sum(row.group_bytes[: part.group])
        stop = start + row.group_bytes[part.group]
        if stop > row.bytes:
            raise OSError(f"bytes {start} to {stop} are asked for, it has {row.bytes}")
        try:
            with pa.ipc.open_stream(_Joined(file, _head(file), begin, start, stop)) as reader:
                columns = columns_of(reader.schema, content)
                first_row = sum(row.group_rows[: part.group])
                yield from read_columns(_sound(reader, columns), content, first_row, columns)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise OSError(str(error)) from error


def _sound(batches: Any, columns: dict[str, tuple[str, ...]]) -> Iterator[Any]:
    """The batches, once it is sure that no value of the columns reaches out of the memory that was read:
    pyarrow takes the offsets in a file as they are. What is no UTF-8 is another matter, that of its record.
    """
    for batch in batches:
        for name in dict.fromkeys(way[0] for way in columns.values()):
            column = batch.column(name)
            column.validate()
            column.view(_as_binary(column.type)).validate(full=True)
        yield batch


def _as_binary(kind: Any) -> Any:
    """The type with bytes in the place of texts."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_binary(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_binary(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_binary(kind.value_type)))
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    return kind


def _head(file: InputFile) -> int:
    """Where the first message begins."""
    return len(_MAGIC) if file.read_at(0, len(_MAGIC)) == _MAGIC else 0


def _messages(file: InputFile, file_bytes: int) -> Iterator[_Message]:
    """The messages in order, up to the marker that ends them. Raises `ConfigError` if it is no Arrow file,
    `DataError` if it ends before that marker.
    """
    at, kind = _head(file), 0
    while True:
        data = file.read_at(at, min(_READ_BYTES, file_bytes - at)) if at < file_bytes else b""
        if kind == 0 and data[:4] != _CONTINUES:
            raise ConfigError(
                f"{file.name}: no Arrow file: it begins with {data[:8]!r}; is data.sources[].format=arrow "
                "right? If it is, leave this file out (a Feather file of version 1 is to be written anew)"
            )
        if len(data) >= 8 and data[:8] == _CONTINUES + bytes(4):
            if _head(file) and file.read_at(file_bytes - len(_END), len(_END)) != _END:
                raise DataError(_cut_off(file, at))
            return
        size = int.from_bytes(data[4:8], "little")
        if len(data) < 8 + size:
            data = file.read_at(at, min(8 + size, file_bytes - at)) if at < file_bytes else b""
        if data[:4] != _CONTINUES or len(data) < 8 + size:
            raise DataError(_cut_off(file, at))
        kind, rows, body = _header(data[8 : 8 + size])
        stop = at + 8 + size + body
        if stop > file_bytes or kind not in (_SCHEMA, _DICTIONARY, _BATCH):
            raise DataError(_cut_off(file, at))
        yield _Message(at, stop, kind, rows)
        at = stop


def _cut_off(file: InputFile, at: int) -> str:
    return (
        f"{file.name}: not a whole Arrow file: what begins at byte {at} of {file.size} is cut off, or what "
        "ends the file is missing; replace the file or leave it out"
    )


def _header(data: bytes) -> tuple[int, int, int]:
    """(kind, rows of a record batch, bytes of the body) of a message's header, a flatbuffer of the table
    `Message`: 1 header_type, 2 header (of a record batch: 0 length), 3 bodyLength.
    """
    try:
        (table,) = struct.unpack_from("<I", data)
        kind = _field(data, table, 1, "<B")
        body = _field(data, table, 3, "<q")
        at = _place(data, table, 2)
        rows = 0
        if kind == _BATCH and at:
            rows = _field(data, at + struct.unpack_from("<I", data, at)[0], 0, "<q")
    except struct.error:
        return 0, 0, 0
    return kind, rows, body


def _place(data: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table lies; 0 if it has its default."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    (size,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * number >= size:
        return 0
    offset = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    return table + offset if offset else 0


def _field(data: bytes, table: int, number: int, kind: str) -> int:
    at = _place(data, table, number)
    return int(struct.unpack_from(kind, data, at)[0]) if at else 0


class _Joined(io.RawIOBase):
    """Bytes [head, begin) of a file, which say what its columns are, and then bytes [start, stop)."""

    def __init__(self, file: InputFile, head: int, begin: int, start: int, stop: int | None = None) -> None:
        self._ranges = [(head, begin), (start, start if stop is None else stop)]
        self._file: LocalFile | RangedReads
        if isinstance(file, LocalFile):
            self._file = file
        else:  # pyarrow asks for a few bytes at a time
            self._file = RangedReads(file)
            self._file.expect(self._ranges)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._ranges:
            start, stop = self._ranges[0]
            if start < stop:
                data = self._file.read_at(start, min(len(buffer), stop - start))
                buffer[: len(data)] = data
                self._ranges[0] = (start + len(data), stop) if data else (stop, stop)
                return len(data)
            self._ranges.pop(0)
        return 0


FORMAT: Format = ArrowFiles()
