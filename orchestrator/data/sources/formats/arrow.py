"""`arrow`: one record per row of an Arrow IPC file (Feather V2) or IPC stream, cut at record batches.

A stream is a sequence of messages: its schema, dictionaries and record batches. A file holds messages at the
places that its footer lists, and the schema in the footer itself; other content differs between writers. Only
the small headers of messages are parsed here, not their bodies, so that a file is cut without reading it.
pyarrow reads the messages of a unit as a stream.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from orchestrator.data.sources.access.compressed import damage_code
from orchestrator.data.sources.access.input_file import LocalFile, RangedReads
from orchestrator.data.sources.formats.base import Format, Units
from orchestrator.data.sources.formats.parquet import RowFormat
from orchestrator.data.sources.records.columns import read_columns, require_readable
from orchestrator.data.sources.records.content import Content
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.data.sources.records.plain_values import columns_of, require_sound
from orchestrator.errors import ConfigError, DataError

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow

_MAGIC, _END, _CONTINUES = b"ARROW1\0\0", b"ARROW1", b"\xff\xff\xff\xff"
# Record batches are joined to units of at least this many bytes. A batch is held as a whole.
_UNIT_BYTES = 2 << 20
# Headers are read in pieces of this size.
_READ_BYTES = 1 << 12
# The types of messages (org.apache.arrow.flatbuf.MessageHeader).
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


# A footer's entry: where a message begins, the bytes of its header with the prefix, and of its body.
_BLOCK = np.dtype([("start", "<i8"), ("head", "<i4"), ("_", "<i4"), ("body", "<i8")])
_Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of a file.

    It has the bytes of the message in the file, its header and its body within them, and its kind. `rows` are
    those of a record batch. A dictionary has its number, and whether it adds to an earlier one.
    """

    start: int
    stop: int
    head: _Range
    body: _Range
    kind: int
    rows: int = 0
    dictionary: int = 0
    is_delta: bool = False


_Block = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Footer:
    """The content of a file's footer.

    It has the schema as a message, and for each message its beginning, its end, and the bytes of its header.
    """

    schema: bytes
    dictionaries: tuple[_Block, ...]
    batches: tuple[_Block, ...]


class ArrowFiles(RowFormat):
    """One record per row."""

    name = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather", ".arrows")

    def units(self, file: InputFile, content: Content) -> Units:
        """Joins record batches to units, with their bytes in the file.

        The beginning of a unit follows from the sizes of the units before it.
        """
        import pyarrow as pa

        units, before, schema, batches = list[list[int]](), list[_Range](), b"", _messages(file, file.size)
        if _has_magic(file):
            footer = _footer(file)
            _require_dictionaries(file, footer)
            schema, batches = footer.schema, (_message_at(file, *block) for block in footer.batches)
        for message in batches:
            if message.kind == _BATCH:
                if not units or units[-1][1] >= _UNIT_BYTES:
                    units.append([0, 0])
                units[-1][0] += message.rows
                units[-1][1] += message.stop - message.start
            elif units:
                raise ConfigError(
                    f"{file.name}: a dictionary follows record batches, so these cannot be read separately; "
                    "rewrite the file with unify_dictionaries=True, or as Parquet",
                    code="data.unreadable_type",
                )
            else:
                before = [(0, message.stop)]
        try:
            found = pa.ipc.open_stream(_Joined(file, schema, before)).schema
            require_readable(file.name, found, content)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _damaged(file, error) from error
        return tuple(rows for rows, _ in units), tuple(size for _, size in units)

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        import pyarrow as pa

        del whole
        assert part.group is not None, "an Arrow file is cut at record batches"
        start = sum(row.group_bytes[: part.group])
        stop = start + row.group_bytes[part.group]
        schema, ranges = _unit(file, row, start, stop)
        try:
            with pa.ipc.open_stream(_Joined(file, schema, ranges)) as reader:
                columns = columns_of(reader.schema, content)
                first_row = sum(row.group_rows[: part.group])
                yield from read_columns(_sound(reader, columns), content, first_row, columns)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise OSError(str(error)) from error


def schema_names(file: InputFile) -> list[str]:
    """The names of a file's columns. Raises `DataError` if its schema cannot be read."""
    import pyarrow as pa

    schema, ranges = b"", list[_Range]()
    if _has_magic(file):
        schema = _footer(file).schema
    else:
        ranges = [(0, message.stop) for message in islice(_messages(file, file.size), 1)]
    try:
        names: list[str] = pa.ipc.open_stream(_Joined(file, schema, ranges)).schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(file, error) from error
    return names


def _unit(file: InputFile, row: FileRow, start: int, stop: int) -> tuple[bytes, list[_Range]]:
    """The schema's message, and the ranges of the rest of a stream of some record batches.

    The record batches are those at bytes [start, stop) of all batches' bytes.
    """
    if not _has_magic(file):
        begin = next((m.start for m in _messages(file, row.bytes) if m.kind == _BATCH), row.bytes)
        if begin + stop > row.bytes:
            raise OSError(f"bytes {begin + start} to {begin + stop} are asked for, it has {row.bytes}")
        return b"", [(0, begin), (begin + start, begin + stop)]
    footer = _footer(file)
    ends = np.cumsum([0, *(end - begin for begin, end, _ in footer.batches)])
    first, last = np.searchsorted(ends, [start, stop]).tolist()
    if last >= len(ends) or (ends[first], ends[last]) != (start, stop):
        raise OSError(
            f"record batches of bytes {start} to {stop} are asked for, it has other ones, of {ends[-1]} bytes"
        )
    messages = [_message_at(file, *block) for block in (*footer.dictionaries, *footer.batches[first:last])]
    return footer.schema, [each for message in messages for each in (message.head, message.body)]


def _sound(batches: Any, columns: dict[str, tuple[str, ...]]) -> Iterator[Any]:
    """Yields the batches, after checking that no value of the columns lies outside the memory that was read.

    pyarrow does not check the offsets in a file.
    """
    for batch in batches:
        for name in dict.fromkeys(way[0] for way in columns.values()):
            require_sound(batch.column(name))
        yield batch


def _has_magic(file: InputFile) -> bool:
    return file.read_at(0, len(_MAGIC)) == _MAGIC


def _messages(file: InputFile, file_bytes: int) -> Iterator[_Message]:
    """The messages of a stream in order, up to the end marker.

    Raises `ConfigError` if it is no Arrow stream, `DataError` if it ends before that marker.
    """
    at, kind = 0, 0
    while True:
        data = file.read_at(at, min(_READ_BYTES, file_bytes - at)) if at < file_bytes else b""
        if kind == 0 and data[:4] != _CONTINUES:
            raise ConfigError(
                f"{file.name}: not an Arrow file: it begins with {data[:8]!r}; correct "
                "data.sources[].format=arrow, or leave this file out (rewrite a Feather file of version 1 as "
                "version 2)",
                code="data.wrong_format",
            )
        if len(data) >= 8 and data[:8] == _CONTINUES + bytes(4):
            return
        size = int.from_bytes(data[4:8], "little")
        if data[:4] != _CONTINUES:
            raise _cut_off(file, at)
        message = _message(file, at, data, 8 + size, file_bytes)
        kind = message.kind
        yield message
        at = message.stop


def _message(file: InputFile, at: int, data: bytes, head_bytes: int, file_bytes: int) -> _Message:
    """The message that begins at `at`, of which `data` were read.

    Raises `DataError` if there is none, or if it ends beyond the file.
    """
    prefix = 8 if data[:4] == _CONTINUES else 4  # 4: a writer from before version 0.15
    size = int.from_bytes(data[prefix - 4 : prefix], "little")
    if not 0 < size <= head_bytes - prefix or at + head_bytes > file_bytes:
        raise _cut_off(file, at)
    if len(data) < prefix + size:
        data = file.read_at(at, prefix + size)
    kind, body_bytes, facts = _header(data[prefix : prefix + size])
    body = (at + head_bytes, at + head_bytes + body_bytes)
    if body_bytes < 0 or body[1] > file_bytes or kind not in (_SCHEMA, _DICTIONARY, _BATCH):
        raise _cut_off(file, at)
    message = _Message(at, body[1], (at, at + prefix + size), body, kind)
    if kind == _BATCH:
        return replace(message, rows=facts[0])
    return replace(message, dictionary=facts[0], is_delta=bool(facts[1]))


def _message_at(file: InputFile, start: int, stop: int, head_bytes: int) -> _Message:
    """The message that a footer lists. Raises `DataError` as `_message`."""
    data = file.read_at(start, min(_READ_BYTES, head_bytes))
    message = _message(file, start, data, head_bytes, file.size)
    if message.stop > stop:
        raise _cut_off(file, start)
    return replace(message, stop=stop)


def _footer(file: InputFile) -> _Footer:
    """The footer: a flatbuffer of the table `Footer`: 0 version, 1 schema, 2 dictionaries, 3 recordBatches.

    Its size and a magic follow it. Raises `DataError` if there is none.
    """
    end = file.size - len(_END) - 4
    tail = file.read_at(max(end, 0), 4 + len(_END))
    size = int.from_bytes(tail[:4], "little")
    if tail[4:] != _END or not 0 < size <= end - len(_MAGIC):
        raise _cut_off(file, max(end, 0))
    data = file.read_at(end - size, size)
    try:
        (table,) = struct.unpack_from("<I", data)
        schema = _place(data, table, 1)
        schema += struct.unpack_from("<I", data, schema)[0] if schema else 0
        version = _field(data, table, 0, "<h")
        lists = [_blocks(file, data, _place(data, table, number)) for number in (2, 3)]
    except (struct.error, ValueError) as error:
        raise _cut_off(file, end - size) from error
    if not schema:
        raise _cut_off(file, end - size)
    return _Footer(_schema_message(data, schema, version), *lists)


def _blocks(file: InputFile, data: bytes, at: int) -> tuple[_Block, ...]:
    """A footer's list of messages. Raises `ValueError` if one lies outside the file."""
    if not at:
        return ()
    at += struct.unpack_from("<I", data, at)[0]
    blocks = np.frombuffer(data, _BLOCK, struct.unpack_from("<I", data, at)[0], at + 4)
    starts, heads, bodies = (blocks[name].astype(np.int64) for name in ("start", "head", "body"))
    inside = (starts >= 0) & (heads > 0) & (bodies >= 0) & (bodies <= file.size)
    stops = starts + heads + bodies
    if not (inside & (starts <= file.size) & (stops <= file.size)).all():
        raise ValueError("a message lies outside of the file")
    return tuple(zip(starts.tolist(), stops.tolist(), heads.tolist(), strict=True))


def _schema_message(footer: bytes, schema: int, version: int) -> bytes:
    """A message for the schema at byte `schema` of a footer.

    Offsets in a flatbuffer are relative, so a table `Message` is put before the footer and refers to the
    schema in it.
    """
    table, begin = 16, 32
    head = struct.pack("<I6H", table, 12, 12, 8, 10, 4, 0)
    head += struct.pack("<iIhB", table - 4, begin + schema - (table + 4), version, _SCHEMA)
    data = head.ljust(begin, b"\0") + footer
    data += bytes(-len(data) % 8)
    return _CONTINUES + struct.pack("<I", len(data)) + data


def _require_dictionaries(file: InputFile, footer: _Footer) -> None:
    """Raises `ConfigError` if a dictionary replaces another one.

    The file does not record which record batches each of them belongs to.
    """
    numbers = set[int]()
    for block in footer.dictionaries:
        message = _message_at(file, *block)
        if message.dictionary in numbers and not message.is_delta:
            raise ConfigError(
                f"{file.name}: it has two dictionaries of number {message.dictionary}, and does not record "
                "which record batches each belongs to; rewrite the file with unify_dictionaries=True, or as "
                "Parquet",
                code="data.unreadable_type",
            )
        numbers.add(message.dictionary)


def _cut_off(file: InputFile, at: int) -> DataError:
    return DataError(
        f"{file.name}: not a whole Arrow file: the part at byte {at} of {file.size} is cut off, or the end "
        "of the file is missing; replace the file or leave it out",
        code="data.damaged_file",
    )


def _damaged(file: InputFile, error: Exception) -> DataError:
    return DataError(f"{file.name}: not a whole Arrow file: {error}; replace it", code=damage_code(error))


def _header(data: bytes) -> tuple[int, int, tuple[int, int]]:
    """(kind, bytes of the body, facts) of a message's header, a flatbuffer of the table `Message`.

    Its fields: 1 header_type, 2 header, 3 bodyLength. The facts of a record batch: 0 length; of a dictionary:
    0 id, 2 isDelta.
    """
    try:
        (table,) = struct.unpack_from("<I", data)
        kind = _field(data, table, 1, "<B")
        body = _field(data, table, 3, "<q")
        at = _place(data, table, 2)
        facts = (0, 0)
        if kind in (_BATCH, _DICTIONARY) and at:
            inner = at + struct.unpack_from("<I", data, at)[0]
            is_delta = _field(data, inner, 2, "<B") if kind == _DICTIONARY else 0
            facts = _field(data, inner, 0, "<q"), is_delta
    except struct.error:
        return 0, 0, (0, 0)
    return kind, body, facts


def _place(data: bytes, table: int, number: int) -> int:
    """The offset of a field of a flatbuffer's table; 0 if it has its default."""
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
    """Bytes, followed by ranges of a file, as one stream."""

    def __init__(self, file: InputFile, begin: bytes, ranges: Sequence[_Range]) -> None:
        self._begin, self._ranges = begin, list(ranges)
        self._file: LocalFile | RangedReads
        if isinstance(file, LocalFile):
            self._file = file
        else:  # pyarrow reads a few bytes at a time
            self._file = RangedReads(file)
            self._file.expect(_merged(self._ranges))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._begin:
            data, self._begin = self._begin[: len(buffer)], self._begin[len(buffer) :]
            buffer[: len(data)] = data
            return len(data)
        while self._ranges:
            start, stop = self._ranges[0]
            if start < stop:
                data = self._file.read_at(start, min(len(buffer), stop - start))
                buffer[: len(data)] = data
                self._ranges[0] = (start + len(data), stop) if data else (stop, stop)
                return len(data)
            self._ranges.pop(0)
        return 0


def _merged(ranges: Sequence[_Range]) -> list[_Range]:
    """The ranges, with adjacent or overlapping ones merged."""
    found = list[_Range]()
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


FORMATS: tuple[Format, ...] = (ArrowFiles(),)
