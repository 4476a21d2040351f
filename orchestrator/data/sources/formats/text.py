"""The formats of text files: `jsonl`, `lines` and `text`.

`jsonl` is one JSON object per line. orjson defines what is valid. For duplicate keys the last value counts.
`lines` is one document per line. It drops one trailing carriage return, and blank lines are no documents.
`text` is one document per file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from typing_extensions import override

from orchestrator.data.sources.access.compressed import COMPRESSED, READ_BYTES, decoded, with_compressed
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Whole
from orchestrator.data.sources.formats.base import Attempt, Format, Parser
from orchestrator.data.sources.lists.file_rows import Cut
from orchestrator.data.sources.records.content import BadRecordError, Content, Described, Document, kind_of
from orchestrator.data.sources.records.documents import described, utf8_text
from orchestrator.data.sources.records.line_records import Batch, range_lines, stream_lines, utf8_pieces

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow

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


FORMATS: tuple[Format, ...] = (Jsonl(), PlainLines(), TextFiles())
