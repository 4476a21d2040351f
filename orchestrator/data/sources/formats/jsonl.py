"""`jsonl`: a JSON object per line. orjson decides what is valid; of equal keys the last counts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from orchestrator.data.sources.compressed import COMPRESSED, READ_BYTES, decoded, with_compressed
from orchestrator.data.sources.documents import (
    BadRecordError,
    Content,
    Described,
    Document,
    described,
    kind_of,
)
from orchestrator.data.sources.formats.base import Attempt, Cut, Format, Parser
from orchestrator.data.sources.line_records import Batch, range_lines, stream_lines

if TYPE_CHECKING:
    from orchestrator.data.sources.file_rows import FileRow
    from orchestrator.data.sources.fragments import FilePart
    from orchestrator.data.sources.input_file import InputFile

_BOM = b"\xef\xbb\xbf"


class LineFormat(Format):
    """A format of which every record is a line: only a newline ends one."""

    cut = Cut.RANGES
    drops_bom = True

    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """See `Format`."""
        del content
        if whole or row.path.endswith(COMPRESSED):
            yield from stream_lines(decoded(file, row.path, row.bytes))
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
    """(the first MiB of the decoded file without a byte order mark, whether that is all of it)."""
    pieces = decoded(file, row.path, row.bytes)
    begin = next(pieces, b"")[:READ_BYTES]
    whole = len(begin) < READ_BYTES and next(pieces, None) is None
    return begin.removeprefix(_BOM), whole


class Jsonl(LineFormat):
    """A JSON object per line."""

    name = "jsonl"
    suffixes = with_compressed(".jsonl")

    def parser(self, content: Content) -> Parser:
        """See `Format`; blank lines are no documents."""
        field = content.text_field

        def text(line: bytes) -> Document | Described | None:
            try:
                found = orjson.loads(line)[field]
            except (orjson.JSONDecodeError, TypeError, KeyError):
                found = None
            # what follows says what is wrong, and knows inner fields
            return found if isinstance(found, str) else document(line)

        def document(line: bytes) -> Document | Described | None:
            if not line.strip():
                return None
            return described(json_object(line), content)

        return text if content.kind == "text" and not content.transform_fields else document


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object that it is. Raises `BadRecordError`."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRecordError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRecordError(f"a JSON {kind_of(value)}, an object is expected")
    return value


FORMAT: Format = Jsonl()
