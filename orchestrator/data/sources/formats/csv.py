"""`csv`: one record per row, with a header in each file (RFC 4180). `tsv` is the same with tabs.

A row ends at a newline outside of quotes, which only the content before it determines. So a file is read from
its first byte to its last, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from orchestrator.data.sources.access.compressed import decoded, with_compressed
from orchestrator.data.sources.access.records_in_memory import (
    MAX_RECORD_BYTES,
    Lines,
    Made,
    Records,
    Whole,
    join,
)
from orchestrator.data.sources.formats.base import Format, HeadedFormat, Parser
from orchestrator.data.sources.records.content import BadRecordError, Content, Described, Document, names
from orchestrator.data.sources.records.documents import described, utf8_text
from orchestrator.data.sources.records.line_records import Batch, utf8_pieces
from orchestrator.errors import DataError
from orchestrator.records.steps import PREFERENCE

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow
    from orchestrator.data.sources.readers import Part

_QUOTE, _NEWLINE, _BOM = ord('"'), ord("\n"), b"\xef\xbb\xbf"
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


FORMATS: tuple[Format, ...] = (Csv("csv", ","), Csv("tsv", "\t"))
