"""The interface of a format: how its files are found, cut and read, and how a record becomes a document.

All knowledge about a format is in its class. The rest of the package calls this interface. `RecordFormat` is
the base class for formats outside of this package: a subclass yields a file's records, one after another. A
file is read from its first byte to its last, in bounded memory, as those of `webdataset` are.
"""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson
from typing_extensions import override

from orchestrator.data.sources.access.compressed import COMPRESSED, DAMAGE, decoded
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, packed
from orchestrator.data.sources.lists.file_rows import Cut, FilePart
from orchestrator.data.sources.records.content import BadRecordError, Content, Described, Document
from orchestrator.data.sources.records.documents import described
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.errors import BadDocument, ConfigError, DataError
from orchestrator.records.steps import PREFERENCE

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.access.records_in_memory import Records
    from orchestrator.data.sources.lists.file_rows import FileRow
    from orchestrator.data.sources.readers import Part

# (rows, approximate decoded bytes) of each of a file's units, in file order.
Units = tuple[tuple[int, ...], tuple[int, ...]]
Parser = Callable[[Any], Document | Described | None]
# (place of a record, function that makes its document, as a parser does).
Attempt = tuple[str, Callable[[], Document | Described | None]]


class Format(ABC):
    """A kind of file. A format has no state and reads the same in every process and at any time."""

    name: str
    cut: Cut = Cut.STREAM
    # The endings of a folder's files of this format.
    suffixes: tuple[str, ...] = ("",)
    # The allowed values of `data.sources[].content`.
    contents: tuple[str, ...] = ("text", "chat", "prompt", PREFERENCE)
    # Whether its records have fields; and whether each file declares them, so that all of its records have
    # them.
    has_fields: bool = True
    says_fields: bool = False
    # Whether its records lie in files. Otherwise `data.sources[].path` names their source.
    has_files: bool = True
    # Whether a record's place in its file counts the records before it, not the bytes; and the unit's name.
    counts_records: bool = False
    unit: str = "byte"
    # Whether a folder has an index file that lists the source's files and their content: `check_index`.
    has_index: bool = False
    # Whether a byte order mark at the file's first byte is dropped from the first record.
    drops_bom: bool = False

    def choose(self, folder: str, names: Sequence[str]) -> list[str]:
        """The source's files among those below a folder. Raises `ConfigError` if that cannot be
        determined.
        """
        del folder
        return [name for name in names if name.endswith(self.suffixes)]

    def passed_over(self, names: Sequence[str]) -> list[str]:
        """The files below a folder that are not read because of their names."""
        return [name for name in names if not name.endswith(self.suffixes)]

    def check_index(self, folder: str, rows: Mapping[str, FileRow]) -> None:
        """Compares the index of a folder with the chosen files, whose `rows` are keyed by their names in it.

        Reads no record. Raises `ConfigError` with the code `data.contradicting_index` if they contradict.
        """
        del folder, rows

    def index_notes(self, source: str, base: str, num_rows: int) -> tuple[str, ...]:
        """Notes on accepted differences between the index in `base` and the files."""
        del source, base, num_rows
        return ()

    @property
    def called(self) -> str:
        """The name pattern of a folder's files of this format, for messages."""
        return " ".join(self.suffixes).strip() or "every file"

    def units(self, file: InputFile, content: Content) -> Units:
        """The units of a file that is cut into units. Reads no record.

        Raises `ConfigError` if it has another format or lacks the fields, `DataError` if it is damaged.
        """
        del file, content
        return (), ()

    @abstractmethod
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """The records of a part of a file in file order, in batches of a few MiB or of one record.

        Nothing beyond the file's first `row.bytes` is read: it was appended. `whole`: the part is the file,
        and is read from its first byte to its last, however it is cut otherwise. Raises one of
        `compressed.DAMAGE` if the file is damaged.
        """

    @abstractmethod
    def parser(self, content: Content) -> Parser:
        """Returns the function that makes a document of a record that is not null.

        It returns None for a record that is no document (a blank line). It raises `BadRecordError`.
        """

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """Some of the file's first records, at the cost of a MiB or one record. Nulls are left out."""
        part, parse = FilePart(file=0, start=0, stop=row.bytes), self.parser(content)

        def attempt(records: Records, index: int) -> Document | Described | None:
            record = records[index]
            return None if record is None else parse(record)

        for _, records, _ in islice(self.read(file, row, part, content, whole=True), 1):
            for index in range(len(records)):
                yield f"record {index + 1}", partial(attempt, records, index)

    def place(self, path: str, part: Part, index: int, line: Callable[[], int | None]) -> str:
        """The place of a record, for messages.

        `line` returns the number of lines before the part's first record, plus one.
        """
        at = f"{path}: {self.unit} {part.place_of(index)}"
        if self.counts_records:
            return at
        first = part.line if part.line is not None else line()
        return f"{at}, line {'not counted' if first is None else first + index}"

    def in_place(self, path: str) -> str:
        """How to change one of its documents so that the run may continue with it, for messages.

        It ends the sentence "fix the document …".
        """
        if self.cut is Cut.UNITS:
            return "and keep the rows and row groups of its file"
        # bytes appended to a file after the start are not part of the run
        return "in a file of no more bytes" if path.endswith(COMPRESSED) else "at the same length"

    def lost(self, then: FileRow, now: FileRow) -> str | None:
        """What a run that began with the file `then` reads and that no longer exists, for messages."""
        groups, left = len(then.group_rows), len(now.group_rows)
        return f"it had {groups} row groups and has {left}" if left < groups else None

    def require_content(self, source: str, content: Content) -> None:
        """Raises `ConfigError` if no file of the format can hold such content."""
        if content.kind not in self.contents:
            raise ConfigError(
                f"data.sources {source}: content is {content.kind}, but a record of format {self.name} holds "
                f"only {' or '.join(self.contents)}; use another format, such as jsonl or parquet",
                code="config.unsupported_content",
            )
        if content.transform_fields and not self.has_fields:
            raise ConfigError(
                f"data.sources {source}: transform_fields is {', '.join(content.transform_fields)}, but a "
                f"record of format {self.name} is a text without fields; leave transform_fields out, or use "
                "another format, such as jsonl or parquet",
                code="config.unsupported_transform_fields",
            )


class HeadedFormat(Format):
    """A format whose files declare the fields of their records in a header."""

    says_fields = True

    @override
    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """Raises `ConfigError` if the header lacks the fields."""
        try:
            yield from super().first_records(file, row, content)
        except DataError as error:
            raise ConfigError(str(error), code=error.code) from error


# ---------------------------------------------------------------------------------- formats of other packages
_BATCH_BYTES = 4 << 20
# The byte that begins what is kept of a bad record, by the code of its reason. A JSON object begins with a
# brace.
_BAD = {
    "record.user_refused": b"!",
    "record.not_object": b"o",
    "record.field_name": b"n",
    "record.value_type": b"v",
    "record.too_long": b"l",
}
_CODES = {mark: code for code, mark in _BAD.items()}


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

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """Raises `DataError` if `records` fails."""
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

    @override
    def parser(self, content: Content) -> Parser:
        def document(kept: bytes) -> Document | Described | None:
            if (code := _CODES.get(bytes(kept[:1]))) is not None:
                raise BadRecordError(bytes(kept[1:]).decode(), code=code)
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
    try:
        return _as_json(record)
    except BadRecordError as error:
        return _BAD[error.code] + str(error).encode(errors="backslashreplace")


def _as_json(record: Mapping[str, Any] | BadDocument) -> bytes:
    """The record as JSON. Raises `BadRecordError` with a code of `_BAD`."""
    if isinstance(record, BadDocument):
        raise BadRecordError(str(record), code="record.user_refused")
    if not isinstance(record, Mapping):
        raise BadRecordError(f"a {type(record).__name__}, a dict is expected", code="record.not_object")
    if odd := [name for name in record if not isinstance(name, str)]:
        raise BadRecordError(
            f"it has the field {odd[0]!r}; names of fields are texts", code="record.field_name"
        )
    try:
        made = json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BadRecordError(f"it is no dict of JSON values: {error}", code="record.value_type") from error
    if len(made) > MAX_RECORD_BYTES:
        raise BadRecordError(
            f"it has {len(made):,} bytes as JSON, more than {MAX_RECORD_BYTES:,}", code="record.too_long"
        )
    return made
