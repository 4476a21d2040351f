"""The formats of text files: `jsonl`, `lines`, `text`, `csv` and `tsv`.

`jsonl` is one JSON object per line. orjson defines what is valid. For duplicate keys the last value counts.
`lines` is one document per line. It drops one trailing carriage return, and blank lines are no documents.
`text` is one document per file. `csv` is one record per row, with a header in each file (RFC 4180). `tsv` is
the same with tabs. A row ends at a newline outside of quotes, which only the content before it determines. So
a file of rows is read from its first byte to its last, in bounded memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
from typing_extensions import override

from orchestrator.data.sources.access.compressed import COMPRESSED, READ_BYTES, decoded, with_compressed
from orchestrator.data.sources.access.records_in_memory import (
    MAX_RECORD_BYTES,
    Lines,
    Made,
    Records,
    Whole,
    join,
)
from orchestrator.data.sources.formats.base import Attempt, Format, HeadedFormat, Parser
from orchestrator.data.sources.lists.file_rows import Cut
from orchestrator.data.sources.records.content import (
    BadRecordError,
    Content,
    Described,
    Document,
    kind_of,
    names,
)
from orchestrator.data.sources.records.documents import described, utf8_text
from orchestrator.data.sources.records.line_records import Batch, range_lines, stream_lines, utf8_pieces
from orchestrator.errors import DataError
from orchestrator.records.steps import PREFERENCE

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow
    from orchestrator.data.sources.readers import Part

_BOM = b"\xef\xbb\xbf"


class LineFormat(Format):
    """A format whose records are lines: only a newline ends one."""

    cut = Cut.RANGES
    drops_bom = True

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        del content
        if whole or row.path.endswith(COMPRESSED):
            yield from stream_lines(utf8_pieces(file.name, decoded(file, row.path, row.bytes)))
        else:
            yield from range_lines(file, part.start, part.stop, row.bytes)

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """The lines that end in the file's first MiB and are not blank."""
        parse = self.parser(content)
        begin, whole = beginning(file, row)
        lines = begin.split(b"\n")
        for number, record in enumerate(lines if whole else lines[:-1], start=1):
            if record.strip():
                yield f"line {number}", partial(parse, record)


def beginning(file: InputFile, row: FileRow) -> tuple[bytes, bool]:
    """(the first MiB of the decoded file without a byte order mark, whether that is the whole file)."""
    pieces = utf8_pieces(file.name, decoded(file, row.path, row.bytes))
    begin = next(pieces, b"")[:READ_BYTES]
    whole = len(begin) < READ_BYTES and next(pieces, None) is None
    return begin.removeprefix(_BOM), whole


class Jsonl(LineFormat):
    """One JSON object per line."""

    name = "jsonl"
    suffixes = with_compressed(".jsonl")

    @override
    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """If the file is one JSON array, only its first line: others may be objects."""
        begin, _ = beginning(file, row)
        if begin.lstrip()[:1] == b"[":
            first = begin.lstrip().partition(b"\n")[0]
            yield "the file's first line", partial(self.parser(content), first)
        else:
            yield from super().first_records(file, row, content)

    @override
    def parser(self, content: Content) -> Parser:
        """Blank lines are no documents."""
        field = content.text_field

        def text(line: bytes) -> Document | Described | None:
            try:
                found = orjson.loads(line)[field]
            except (orjson.JSONDecodeError, TypeError, KeyError):
                found = None
            # `document` finds the reason, and supports inner fields
            return found if isinstance(found, str) else document(line)

        def document(line: bytes) -> Document | Described | None:
            if not line.strip():
                return None
            return described(_line_object(line), content)

        return text if content.kind == "text" and not content.transform_fields else document


def _line_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises `BadRecordError`, with specific reasons for files that are one array, or have objects over several
    lines.
    """
    begin = line.lstrip()[:2]
    try:
        return json_object(line)
    except BadRecordError as error:
        if begin[:1] == b"[":
            raise BadRecordError(
                f"{error}: the file seems to be one JSON array; write each of its objects on a line of its "
                "own (jq -c '.[]')",
                code="record.json_array_file",
            ) from error
        if line.strip() == b"{":
            raise BadRecordError(
                f"{error}: an object goes over several lines; write each on a line of its own (jq -c .)",
                code="record.json_over_lines",
            ) from error
        raise


def json_object(data: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises `BadRecordError`."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRecordError(f"not JSON: {_why(data) or error}", code="record.not_json") from error
    if not isinstance(value, dict):
        raise BadRecordError(f"a JSON {kind_of(value)}, an object is expected", code="record.not_object")
    return value


def _why(data: bytes) -> str | None:
    """Why data are not JSON, if it is a common reason; else None."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in data[:4]:
        return "it is UTF-16 or UTF-32; write the file in UTF-8"
    constants: list[str] = []
    try:
        json.loads(data, parse_constant=constants.append)
    except ValueError:
        return None
    if not constants:
        return None
    return f"it has {constants[0]}, which JSON does not know; write null, or leave the field out"


class PlainLines(LineFormat):
    """One document per line."""

    name = "lines"
    contents = ("text",)
    has_fields = False

    @override
    def parser(self, content: Content) -> Parser:
        del content
        return _line_text


def _line_text(line: bytes) -> Document | None:
    return utf8_text(line.removesuffix(b"\r")) if line.strip() else None


class TextFiles(Format):
    """One document per file."""

    name = "text"
    cut = Cut.WHOLE
    contents = ("text",)
    has_fields = False
    drops_bom = True

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        del part, content, whole
        held, num_bytes = list[bytes](), 0
        for piece in utf8_pieces(file.name, decoded(file, row.path, row.bytes)):
            num_bytes += len(piece)
            if num_bytes <= MAX_RECORD_BYTES:
                held.append(piece)
            else:
                held.clear()
        yield 1, Whole(b"".join(held) if num_bytes <= MAX_RECORD_BYTES else None, num_bytes), 0

    @override
    def parser(self, content: Content) -> Parser:
        del content
        return utf8_text

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """The lines of the one record that end in the file's first MiB."""
        del content
        begin, whole = beginning(file, row)
        record = begin if whole else begin[: max(0, begin.rfind(b"\n"))]
        if record.strip():
            yield "line 1", partial(utf8_text, record)


# ------------------------------------------------------------------------------------------------------- rows
_QUOTE, _NEWLINE = ord('"'), ord("\n")
Row = dict[str, str]


class Csv(HeadedFormat):
    """One record per row, of fields separated by `delimiter`."""

    contents = ("text", "prompt", PREFERENCE)

    def __init__(self, name: str, delimiter: str) -> None:
        self.name, self._delimiter = name, delimiter
        self.suffixes = with_compressed(f".{name}")

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """Raises `DataError` if the header lacks the fields."""
        del part, whole
        make: Callable[[bytes], Row | None] | None = None
        pieces = utf8_pieces(file.name, decoded(file, row.path, row.bytes))
        for number, found, found_at in stream_rows(pieces):
            records: Records = found
            place, first = found_at, number
            if make is None:
                header = self._header(file, records[0], content)
                make = partial(_row, header, self._delimiter)
                records, place, first = records.cut(1, len(records)), place + records.size(0), 2
            if len(records):
                yield first, records if isinstance(records, Whole) else Made(records, make), place

    def _header(self, file: InputFile, first: bytes | None, content: Content) -> tuple[str, ...]:
        try:
            if first is None:
                raise BadRecordError("it does not end", code="record.too_long")
            header = fields_of(utf8_text(first.removeprefix(_BOM)).removesuffix("\r"), self._delimiter)
        except BadRecordError as error:
            raise DataError(
                f"{file.name}: its first row is not a header: {error}; fix the file",
                code="data.invalid_header",
            ) from error
        lacks = [field for field in content.read if header.count(field) != 1]
        if lacks:
            what = "several columns" if lacks[0] in header else "no column"
            raise DataError(
                f"{file.name}: the header has {what} `{lacks[0]}`; it has: "
                f"{names(dict.fromkeys(header))}. Set {content.setting_of(lacks[0])}, or fix the file",
                code="data.ambiguous_field" if lacks[0] in header else "data.missing_field",
            )
        return tuple(header)

    @override
    def parser(self, content: Content) -> Parser:
        """Blank rows are no documents."""

        def document(row: Row | _Blank) -> Document | Described | None:
            return None if isinstance(row, _Blank) else described(row, content)

        return document

    def place(self, path: str, part: Part, index: int, line: Callable[[], int | None]) -> str:
        """The byte and the row; the header is row 1."""
        del line
        assert part.line is not None, "rows are counted as they are read"
        return f"{path}: byte {part.place_of(index)}, row {part.line + index}"


@dataclass(frozen=True, slots=True)
class _Blank:
    """A row without characters."""


def _row(header: tuple[str, ...], delimiter: str, row: bytes) -> Any:
    text = utf8_text(row).removesuffix("\r")
    if not text:
        return _Blank()
    found = fields_of(text, delimiter)
    if len(found) != len(header):
        raise BadRecordError(
            f"it has {len(found)} fields, and the header has {len(header)}: {names(dict.fromkeys(header))}",
            code="record.num_fields",
        )
    return dict(zip(header, found, strict=True))


def fields_of(row: str, delimiter: str) -> list[str]:
    """A row's fields, without their quotes. Raises `BadRecordError` if it violates RFC 4180."""
    if '"' not in row:
        return row.split(delimiter)
    found, at = list[str](), 0
    while True:
        if row[at : at + 1] == '"':
            end = _closing(row, at + 1)
            field, at = row[at + 1 : end].replace('""', '"'), end + 1
            if at < len(row) and row[at] != delimiter:
                raise BadRecordError(
                    f"field {len(found) + 1} continues after its closing quote",
                    code="record.csv_after_quote",
                )
        else:
            end = row.find(delimiter, at)
            end = len(row) if end < 0 else end
            field, at = row[at:end], end
            if '"' in field:
                raise BadRecordError(
                    f"a quote stands inside of field {len(found) + 1}, which has none around",
                    code="record.csv_stray_quote",
                )
        found.append(field)
        if at == len(row):
            return found
        at += 1


def _closing(row: str, at: int) -> int:
    """The index of the quote that closes the field."""
    while (end := row.find('"', at)) >= 0:
        if row[end + 1 : end + 2] != '"':
            return end
        at = end + 2
    raise BadRecordError("a quote is not closed", code="record.csv_open_quote")


def stream_rows(pieces: Iterator[bytes]) -> Iterator[tuple[int, Lines | Whole, int]]:
    """(number, rows, place of the first row) of a stream, in batches of about one piece.

    A row ends at a newline that an even number of quotes precedes. A row that spans pieces is joined once.
    """
    number, place, held, num_held, inside = 1, 0, list[bytes](), 0, False
    for piece in pieces:
        ends, inside = _row_ends(piece, inside)
        begin = 0
        if len(ends) and num_held + int(ends[0]) > MAX_RECORD_BYTES:
            begin = int(ends[0])
            yield number, Whole(None, num_held + begin), place
            number, place, held, num_held, ends = number + 1, place + num_held + begin, [], 0, ends[1:]
        if len(ends):
            stop = int(ends[-1])
            rows = Lines(join([*held, piece[begin:stop]]), ends - begin + num_held)
            yield number, rows, place
            number, place, held, num_held = number + len(rows), place + num_held + stop - begin, [], 0
            begin = stop
        num_held += len(piece) - begin
        if num_held <= MAX_RECORD_BYTES:
            held.append(piece[begin:])
        else:
            held.clear()
    if num_held > MAX_RECORD_BYTES:
        yield number, Whole(None, num_held), place
    elif num_held:
        yield number, Lines(join(held), np.array([num_held], np.int64)), place


def _row_ends(piece: bytes, inside: bool) -> tuple[npt.NDArray[np.int64], bool]:
    """The ends of rows in the piece, after their newlines, and whether the piece ends inside quotes."""
    view = np.frombuffer(piece, np.uint8)
    newlines, quotes = np.flatnonzero(view == _NEWLINE), np.flatnonzero(view == _QUOTE)
    odd = (np.searchsorted(quotes, newlines) + inside) % 2 == 1
    return (newlines[~odd] + 1).astype(np.int64), bool((len(quotes) + inside) % 2)


FORMATS: tuple[Format, ...] = (Jsonl(), PlainLines(), TextFiles(), Csv("csv", ","), Csv("tsv", "\t"))
