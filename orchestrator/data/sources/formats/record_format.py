"""The base class for formats outside of this package: a subclass yields a file's records, one after another.

A file is read from its first byte to its last, in bounded memory, as those of `webdataset` are.
"""

from __future__ import annotations

import io
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from orchestrator.data.sources.access.compressed import DAMAGE, decoded
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, packed
from orchestrator.data.sources.formats.base import Format, Parser
from orchestrator.data.sources.lists.file_rows import Cut
from orchestrator.data.sources.records.content import BadRecordError, Content, Described, Document
from orchestrator.data.sources.records.documents import described
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.errors import BadDocument, DataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow

_BATCH_BYTES = 4 << 20
_BAD = b"!"  # begins what is kept of a bad record; a JSON object begins with a brace


class RecordFormat(Format):
    """A kind of file of which a subclass yields each record as a `dict`.

    A subclass sets `suffixes`, the endings of a folder's files (`with_compressed(".x")` also takes
    compressed ones), and defines `records`. It is made without arguments, once in a process, and must yield
    the same records in every process and at any time. docs/howto/formats.md has an example.
    """

    cut = Cut.STREAM
    counts_records = True
    unit = "record"

    def __init_subclass__(cls, **more: Any) -> None:
        """Raises `TypeError` for attributes that a format of its own cannot have."""
        super().__init_subclass__(**more)
        if cls.cut is not Cut.STREAM:
            raise TypeError(f"{cls.__name__}.cut is {cls.cut!r}: files of a RecordFormat are read as streams")
        if not isinstance(cls.suffixes, tuple) or not all(isinstance(each, str) for each in cls.suffixes):
            raise TypeError(f'{cls.__name__}.suffixes is {cls.suffixes!r}; write a tuple, e.g. (".blocks",)')

    @abstractmethod
    def records(self, file: BinaryIO) -> Iterator[Mapping[str, Any] | BadDocument]:
        """The records of one file in file order, each a dict of JSON values.

        `file` is the decompressed file, from its first byte on; it has neither `seek` nor `tell`. Yield
        `BadDocument("reason")` for a record that is none (`data.on_bad_document` decides about it). Any
        exception, also about a file that is cut off, stops the run with the file's name.
        """

    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """See `Format`. Raises `DataError` if `records` fails."""
        del part, content, whole
        held, num_bytes, before = list[bytes](), 0, 0
        for record in self._records(file, row):
            held.append(_kept(record))
            num_bytes += len(held[-1])
            if num_bytes >= _BATCH_BYTES:
                yield before + 1, packed(held), before
                before, num_bytes = before + len(held), 0
                held = []
        if held:
            yield before + 1, packed(held), before

    def parser(self, content: Content) -> Parser:
        """See `Format`."""

        def document(kept: bytes) -> Document | Described | None:
            if kept[:1] == _BAD:
                raise BadRecordError(bytes(kept[1:]).decode())
            return described(orjson.loads(kept), content)

        return document

    def _records(self, file: InputFile, row: FileRow) -> Iterator[Mapping[str, Any] | BadDocument]:
        pieces, num = _Pieces(decoded(file, row.path, row.bytes)), 0
        try:
            found = self.records(io.BufferedReader(pieces))
            if found is None:
                raise TypeError("records returned None; it must yield the records")
            for record in found:
                num += 1
                yield record
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            if pieces.is_damaged and isinstance(error, DAMAGE):
                raise  # the file itself cannot be read
            how = "yield" if isinstance(error, BadDocument) else "correct the format, or yield"
            raise DataError(
                f"{file.name}: format {self.name} failed after record {num}: {type(error).__name__}: "
                f"{error}; {how} BadDocument for a record that is none",
                code="user_code.format_failed",
            ) from error


class _Pieces(io.RawIOBase):
    """A readable file of pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")
        self.is_damaged = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer)
        while not self._left:
            try:
                piece = next(self._pieces, None)
            except BaseException:
                self.is_damaged = True
                raise
            if piece is None:
                return 0
            self._left = memoryview(piece)
        num = min(len(into), len(self._left))
        into[:num] = self._left[:num]
        self._left = self._left[num:]
        return num


def _kept(record: Mapping[str, Any] | BadDocument) -> bytes:
    """The record as it is held until it is used."""
    if isinstance(record, BadDocument):
        return _BAD + str(record).encode(errors="backslashreplace")
    if not isinstance(record, Mapping):
        return _BAD + f"a {type(record).__name__}, a dict is expected".encode()
    if odd := [name for name in record if not isinstance(name, str)]:
        return _BAD + f"it has the field {odd[0]!r}; names of fields are texts".encode()
    try:
        kept = json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        return _BAD + f"it is no dict of JSON values: {error}".encode(errors="backslashreplace")
    if len(kept) > MAX_RECORD_BYTES:
        return _BAD + f"it has {len(kept):,} bytes as JSON, more than {MAX_RECORD_BYTES:,}".encode()
    return kept
