"""`python`: a record per item of what a function of the user's returns, which has `__len__`, and
`__getitem__(i)` that gives the same in every process and at any time.

It is cut into runs of items by the mean size of some of them; what none of these has said shows when it is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from orchestrator.data.settings import CHECK_ONE_IN
from orchestrator.data.sources.code_records import BASE, CodeRecords
from orchestrator.data.sources.documents import (
    BadRecordError,
    Content,
    Conversation,
    Document,
    Prompted,
    document_of,
)
from orchestrator.data.sources.formats.base import Attempt, Cut, Format, Parser, Units
from orchestrator.data.sources.line_records import Batch
from orchestrator.data.sources.records_in_memory import MAX_RECORD_BYTES, Objects
from orchestrator.errors import DataError

if TYPE_CHECKING:
    from orchestrator.data.sources.file_rows import FileRow
    from orchestrator.data.sources.fragments import FilePart
    from orchestrator.data.sources.input_file import InputFile
    from orchestrator.data.sources.readers import Part

# Runs are about so long, by the mean of so many records spread over all; of more runs each is longer.
_UNIT_BYTES, _NUM_LOOKED_AT, _MAX_UNITS = 2 << 20, 32, 1 << 16
# Records are handed on in stretches of about so many bytes.
_BATCH_BYTES = 4 << 20
_NUM_FIRST = 64
_SHOWN = 80
# A document and its bytes, or why there is none.
_Made = tuple[Document | BadRecordError, int]


class PythonCode(Format):
    """A record per item."""

    name = "python"
    cut = Cut.UNITS
    has_files = False
    counts_records = True
    unit = "record"

    def units(self, file: InputFile, content: Content) -> Units:
        """Runs of items of about equal numbers."""
        records = _of(file)
        num = records.size
        looked_at = sorted({i * num // _NUM_LOOKED_AT for i in range(_NUM_LOOKED_AT)}) if num else []
        sizes = [_made(records, index, content)[1] for index in looked_at]
        mean = max(1, -(-sum(sizes) // max(1, len(sizes))))
        num_units = min(-(-num * mean // _UNIT_BYTES), num, _MAX_UNITS)
        rows = [num * (i + 1) // num_units - num * i // num_units for i in range(num_units)]
        return tuple(rows), tuple(mean * each for each in rows)

    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """See `Format`. Raises `DataError` where the user's code fails, or gives one of a sample of about one
        record in `CHECK_ONE_IN` otherwise when it is asked again.
        """
        del whole
        assert part.group is not None, "items are cut into runs"
        records = _of(file)
        start = sum(row.group_rows[: part.group])
        at, stop = start, start + row.group_rows[part.group]
        while at < stop:
            held, sizes, num_bytes = list[Any](), list[int](), 0
            while at + len(held) < stop and num_bytes < _BATCH_BYTES:
                document, size = _made(records, at + len(held), content)
                held.append(document)
                sizes.append(size)
                num_bytes += size
            for index in range(at, at + len(held)):
                if index % CHECK_ONE_IN == 0:
                    _require_same(records, index, content, held[index - at])
            yield at + 1, Objects(tuple(held), np.array(sizes, np.int64), ("",) * len(held)), at
            at += len(held)

    def parser(self, content: Content) -> Parser:
        """See `Format`: records are documents already, so that nothing else of them is held."""
        del content
        return lambda document: document

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """The first items, each read when it is tried."""
        del row
        records = _of(file)
        for index in range(min(records.size, _NUM_FIRST)):
            yield f"[{index}]", partial(_document, records, index, content)

    def place(self, path: str, part: Part, index: int, line: Callable[[], int | None]) -> str:
        """As the user would ask for it."""
        del line
        return f"{path.removeprefix(BASE)}[{part.place_of(index)}]"

    def in_place(self, path: str) -> str:
        """See `Format`: what is not there cannot be edited, but the code that makes it can."""
        return f"in what {path.removeprefix(BASE)} returns, as many records as before"

    def lost(self, then: FileRow, now: FileRow) -> str | None:
        """See `Format`: records."""
        if now.bytes >= then.bytes:
            return None
        return f"it had {then.bytes} records and has {now.bytes}"


def _of(file: InputFile) -> CodeRecords:
    assert isinstance(file, CodeRecords), f"{file.name} is a file"
    return file


def _document(records: CodeRecords, index: int, content: Content) -> Document:
    document, _ = _made(records, index, content)
    if isinstance(document, BadRecordError):
        raise document
    return document


def _made(records: CodeRecords, index: int, content: Content) -> _Made:
    record = records.record(index)
    try:
        document, size = _with_size(record, content)
        if size > MAX_RECORD_BYTES:
            raise BadRecordError(f"it has {size:,} bytes, and a record may have {MAX_RECORD_BYTES:,}")
    except BadRecordError as error:
        return error, 1
    return document, size


def _with_size(record: Any, content: Content) -> tuple[Document, int]:
    """The document, as a copy of what could change, and the UTF-8 bytes of what it is made of."""
    if isinstance(record, str) and content.kind == "text":
        return record, _num_bytes(record)
    if not isinstance(record, Mapping):
        wanted = "a mapping or a str is" if content.kind == "text" else "a mapping is"
        raise BadRecordError(f"a record is {type(record).__name__}, {wanted} expected")
    document = document_of(record, content)
    if isinstance(document, str):
        return document, _num_bytes(document)
    if isinstance(document, Prompted):
        return document, _num_bytes(document.prompt) + _num_bytes(document.completion)
    try:
        copy = orjson.dumps([document.messages, document.tools])
    except (TypeError, ValueError) as error:
        raise BadRecordError(f"its messages are no JSON: {error}") from error
    messages, tools = orjson.loads(copy)
    return Conversation(messages=tuple(messages), tools=tools), len(copy)


def _num_bytes(text: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise BadRecordError(f"no Unicode text: {error.reason} at character {error.start}") from error


def _require_same(records: CodeRecords, index: int, content: Content, then: Any) -> None:
    now, _ = _made(records, index, content)
    if isinstance(then, BadRecordError) and isinstance(now, BadRecordError):
        then, now = str(then), str(now)
    if type(then) is not type(now) or then != now:
        raise DataError(
            f"{records.name}[{index}]: it was {_short(then)} and, read again, is {_short(now)}; a resume "
            "would train something else than it should: make __getitem__(i) a function of i alone"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


FORMAT: Format = PythonCode()
