"""`python`: one record per item of the object that a user's function returns.

The object has `__len__`, and `__getitem__(i)` that returns the same in every process and at any time. It is
cut into runs of items by the mean size of a sample of them. Errors of the other items show when these are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from typing_extensions import override

from orchestrator.data.common.settings import CHECK_ONE_IN
from orchestrator.data.sources.access.input_file import BASE, CodeRecords
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Objects
from orchestrator.data.sources.formats.base import Attempt, Format, Parser, Units
from orchestrator.data.sources.lists.file_rows import Cut
from orchestrator.data.sources.records.content import (
    BadRecordError,
    Content,
    Conversation,
    Described,
    Document,
    Preference,
    Prompted,
    bare,
)
from orchestrator.data.sources.records.documents import described
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.data.sources.records.plain_values import num_bytes, own_copy, plain
from orchestrator.errors import DataError

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow
    from orchestrator.data.sources.readers import Part

# The approximate bytes of a run, the number of sampled records, spread over all, and the maximum number of
# runs. With more data, runs are longer.
_UNIT_BYTES, _NUM_LOOKED_AT, _MAX_UNITS = 2 << 20, 32, 1 << 16
# Records are yielded in batches of about this many bytes.
_BATCH_BYTES = 4 << 20
# Records are requested together up to about `_ASKED_BYTES`, estimated by that mean, and at most `_MAX_ASKED`,
# because the actual size of an item is not known.
_ASKED_BYTES, _MAX_ASKED = 1 << 20, 256
_NUM_FIRST = 64
_SHOWN = 80
# A document and its bytes, or the reason why there is none.
_Made = tuple[Document | Described | BadRecordError, int]


class PythonCode(Format):
    """One record per item."""

    name = "python"
    cut = Cut.UNITS
    has_files = False
    counts_records = True
    unit = "record"

    def units(self, file: InputFile, content: Content) -> Units:
        """Runs with about equal numbers of items."""
        records = _of(file)
        num = records.size
        looked_at = sorted({i * num // _NUM_LOOKED_AT for i in range(_NUM_LOOKED_AT)}) if num else []
        sizes = [_made(records.record(index), content)[1] for index in looked_at]
        mean = max(1, -(-sum(sizes) // max(1, len(sizes))))
        num_units = min(-(-num * mean // _UNIT_BYTES), num, _MAX_UNITS)
        rows = [num * (i + 1) // num_units - num * i // num_units for i in range(num_units)]
        return tuple(rows), tuple(mean * each for each in rows)

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """Raises `DataError` if the user's code fails.

        Also raises it if a record differs when read again. About one record in `CHECK_ONE_IN` is read again.
        """
        del whole
        assert part.group is not None, "items are cut into runs"
        records = _of(file)
        start = sum(row.group_rows[: part.group])
        at, stop = start, start + row.group_rows[part.group]
        mean = row.group_bytes[part.group] // row.group_rows[part.group]
        num_asked = min(max(1, _ASKED_BYTES // max(1, mean)), _MAX_ASKED)
        while at < stop:
            held, total = list[_Made](), 0
            while at + len(held) < stop and total < _BATCH_BYTES:
                begin = at + len(held)
                found = records.several(range(begin, min(begin + num_asked, stop)))
                held += (_made(record, content) for record in found)
                total += sum(size for _, size in held[begin - at :])
            documents = tuple(document for document, _ in held)
            for index in range(at, at + len(held)):
                if index % CHECK_ONE_IN == 0:
                    _require_same(records, index, content, documents[index - at])
            sizes = np.array([size for _, size in held], np.int64)
            yield at + 1, Objects(documents, sizes, ("",) * len(held)), at
            at += len(held)

    @override
    def parser(self, content: Content) -> Parser:
        """Records are documents already, so that no other part of them is held.

        Returns a copy of a mutable document: changing it does not change the one that was read.
        """
        if content.messages_at is None and not content.transform_fields:
            return lambda document: document
        return _copied

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """The first items, each read when its attempt is called."""
        del row
        records = _of(file)
        for index in range(min(records.size, _NUM_FIRST)):
            yield f"[{index}]", partial(_document, records, index, content)

    def place(self, path: str, part: Part, index: int, line: Callable[[], int | None]) -> str:
        """The expression that reads the item in the user's code."""
        del line
        return f"{path.removeprefix(BASE)}[{part.place_of(index)}]"

    @override
    def in_place(self, path: str) -> str:
        """Items cannot be edited, but the code that makes them can."""
        return f"in what {path.removeprefix(BASE)} returns, as many records as before"

    @override
    def lost(self, then: FileRow, now: FileRow) -> str | None:
        """Reports missing records."""
        if now.bytes >= then.bytes:
            return None
        return f"it had {then.bytes} records and has {now.bytes}"


def _of(file: InputFile) -> CodeRecords:
    assert isinstance(file, CodeRecords), f"{file.name} is a file"
    return file


def _document(records: CodeRecords, index: int, content: Content) -> Document | Described:
    document, _ = _made(records.record(index), content)
    if isinstance(document, BadRecordError):
        raise document
    return document


def _copied(document: Document | Described) -> Document | Described:
    if isinstance(document, Described):
        found = bare(_copied(document.document))
        assert found is not None, "a document's copy is one"
        return Described(document=found, fields=own_copy(document.fields))
    if isinstance(document, Preference):
        return Preference(chosen=_own_copy(document.chosen), rejected=_own_copy(document.rejected))
    return _own_copy(document) if isinstance(document, Conversation) else document


def _own_copy(document: Conversation | Prompted) -> Conversation | Prompted:
    if isinstance(document, Prompted):
        return document
    return replace(
        document,
        messages=tuple(own_copy(list(document.messages))),
        tools=own_copy(document.tools),
        template_kwargs=own_copy(dict(document.template_kwargs)),
    )


def _made(record: Any, content: Content) -> _Made:
    try:
        document, size = _with_size(record, content)
        if size > MAX_RECORD_BYTES:
            raise BadRecordError(
                f"it has {size:,} bytes, and a record may have {MAX_RECORD_BYTES:,}", code="record.too_long"
            )
    except BadRecordError as error:
        return error, 1
    return document, size


def _with_size(record: Any, content: Content) -> tuple[Document | Described, int]:
    """The document, with a copy of its mutable parts, and about the bytes of its content."""
    may_be_text = content.kind == "text" and not content.transform_fields
    if isinstance(record, str) and may_be_text:
        return record, _num_bytes(record)
    if not isinstance(record, Mapping):
        wanted = "a mapping or a str is" if may_be_text else "a mapping is"
        raise BadRecordError(
            f"a record is {type(record).__name__}, {wanted} expected", code="record.not_object"
        )
    found = described(record, content, plain)
    if not isinstance(found, Described):
        return _own_document(found)
    document, size = _own_document(found.document)
    return Described(document=document, fields=found.fields), size + num_bytes(found.fields)


def _own_document(document: Document) -> tuple[Document, int]:
    if isinstance(document, str):
        return document, _num_bytes(document)
    if isinstance(document, Preference):
        chosen, rejected = _own(document.chosen), _own(document.rejected)
        return Preference(chosen=chosen[0], rejected=rejected[0]), chosen[1] + rejected[1]
    return _own(document)


def _own(document: Conversation | Prompted) -> tuple[Conversation | Prompted, int]:
    if isinstance(document, Prompted):
        return document, _num_bytes(document.prompt) + _num_bytes(document.completion)
    try:
        copy = orjson.dumps([document.messages, document.tools, document.template_kwargs])
    except (TypeError, ValueError) as error:
        raise BadRecordError(f"its messages are no JSON: {error}", code="record.value_type") from error
    messages, tools, kwargs = orjson.loads(copy)
    found = replace(document, messages=tuple(messages), tools=tools, template_kwargs=kwargs)
    return found, len(copy)


def _num_bytes(text: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise BadRecordError(
            f"no Unicode text: {error.reason} at character {error.start}", code="record.not_utf8"
        ) from error


def _require_same(records: CodeRecords, index: int, content: Content, then: Any) -> None:
    now: Any = _made(records.record(index), content)[0]
    if isinstance(then, BadRecordError) and isinstance(now, BadRecordError):
        then, now = str(then), str(now)
    # NaN is not equal to itself, so texts are compared too
    if type(then) is not type(now) or (then != now and repr(then) != repr(now)):
        raise DataError(
            f"{records.name}[{index}]: it was {_short(then)} and, read again, is {_short(now)}; a resume "
            "would train on other records: let __getitem__(i) depend on i alone, and __getitems__ return the "
            "same records",
            code="user_code.not_repeatable",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


FORMATS: tuple[Format, ...] = (PythonCode(),)
