"""What a format is: how a kind of file is found, cut and read, and how a record of it becomes a document.

Nothing else in the package asks which format a source has: it asks the format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from orchestrator.data.sources.compressed import COMPRESSED
from orchestrator.data.sources.content import Content, Described, Document
from orchestrator.data.sources.file_parts import Cut, FilePart
from orchestrator.data.sources.line_records import Batch
from orchestrator.errors import ConfigError, DataError

if TYPE_CHECKING:
    from orchestrator.data.sources.file_rows import FileRow
    from orchestrator.data.sources.input_file import InputFile
    from orchestrator.data.sources.readers import Part
    from orchestrator.data.sources.records_in_memory import Records

# (rows, about decoded bytes) of each of a file's units, in file order.
Units = tuple[tuple[int, ...], tuple[int, ...]]
Parser = Callable[[Any], Document | Described | None]
# (where a record is, what makes its document, as a parser does).
Attempt = tuple[str, Callable[[], Document | Described | None]]


class Format(ABC):
    """A kind of file. A format has no state; what it reads is the same for every process and at any time."""

    name: str
    cut: Cut = Cut.STREAM
    # A folder's files of the format end so.
    suffixes: tuple[str, ...] = ("",)
    # What `data.sources[].content` may be.
    contents: tuple[str, ...] = ("text", "chat", "prompt")
    # Its records have fields; and whether each file says which these are: then all of its records have them.
    has_fields: bool = True
    says_fields: bool = False
    # Its records lie in files; else `data.sources[].path` names what gives them.
    has_files: bool = True
    # A record's place in its file counts the records before it, not the bytes; and what that is called.
    counts_records: bool = False
    unit: str = "byte"
    # A folder has a file that says which files are the source's, and what they hold: `check_index`.
    has_index: bool = False
    # A byte order mark at the file's first byte is not part of the first record.
    drops_bom: bool = False

    def choose(self, folder: str, names: Sequence[str]) -> list[str]:
        """Those of the files below a folder that are the source's. Raises `ConfigError` if that cannot be
        said.
        """
        del folder
        return [name for name in names if name.endswith(self.suffixes)]

    def passed_over(self, names: Sequence[str]) -> list[str]:
        """Those of the files below a folder that are not read because of how they are called."""
        return [name for name in names if not name.endswith(self.suffixes)]

    def check_index(self, folder: str, rows: Mapping[str, FileRow]) -> None:
        """Compares the index of a folder with the chosen files, whose `rows` are by their names in it. Reads
        no record. Raises `ConfigError` with the code `data.contradicting_index` where they contradict.
        """
        del folder, rows

    def index_notes(self, source: str, base: str, num_rows: int) -> tuple[str, ...]:
        """What of the index in `base` differs from the files and is not refused, in sentences."""
        del source, base, num_rows
        return ()

    @property
    def called(self) -> str:
        """What a folder's files of the format are called, for people."""
        return " ".join(self.suffixes).strip() or "every file"

    def units(self, file: InputFile, content: Content) -> Units:
        """The units of a file that is cut so. Reads no record.

        Raises `ConfigError` if it is no file of the format or has not the fields, `DataError` if it is
        damaged.
        """
        del file, content
        return (), ()

    @abstractmethod
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """The records of a part of a file in file order, in batches of a few MiB or of one record. Nothing
        that lies behind the file's first `row.bytes` is read: it was appended.

        `whole`: the part is the file, and is read from its first byte to its last, however it is cut else.
        Raises one of `compressed.DAMAGE` where the file is damaged.
        """

    @abstractmethod
    def parser(self, content: Content) -> Parser:
        """What makes a document of a record that is not null; None of one that is none (a blank line). The
        parser raises `BadRecordError`.
        """

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """Some of the file's first records, at the cost of a MiB or one record; what is null is left out."""
        part, parse = FilePart(file=0, start=0, stop=row.bytes), self.parser(content)

        def attempt(records: Records, index: int) -> Document | Described | None:
            record = records[index]
            return None if record is None else parse(record)

        for _, records, _ in islice(self.read(file, row, part, content, whole=True), 1):
            for index in range(len(records)):
                yield f"record {index + 1}", partial(attempt, records, index)

    def place(self, path: str, part: Part, index: int, line: Callable[[], int | None]) -> str:
        """Where a record lies, for people. `line` counts the lines before the part's first record, plus
        one.
        """
        at = f"{path}: {self.unit} {part.place_of(index)}"
        if self.counts_records:
            return at
        first = part.line if part.line is not None else line()
        return f"{at}, line {'not counted' if first is None else first + index}"

    def in_place(self, path: str) -> str:
        """How one of its documents is changed so that the run may go on with it, for people: it ends the
        sentence "fix the document …".
        """
        if self.cut is Cut.UNITS:
            return "and keep the rows and row groups of its file"
        # what a file has beyond the bytes that it had is not the run's
        return "in a file of no more bytes" if path.endswith(COMPRESSED) else "at the same length"

    def lost(self, then: FileRow, now: FileRow) -> str | None:
        """What a run that began with the file `then` reads and is not there any more, for people."""
        groups, left = len(then.group_rows), len(now.group_rows)
        return f"it had {groups} row groups and has {left}" if left < groups else None

    def require_content(self, source: str, content: Content) -> None:
        """Raises `ConfigError` if no file of the format can hold such content."""
        if content.kind not in self.contents:
            raise ConfigError(
                f"data.sources {source}: content is {content.kind}, but a record of format {self.name} holds "
                f"no more than {' or '.join(self.contents)}; use another format, such as jsonl or parquet"
            )
        if content.transform_fields and not self.has_fields:
            raise ConfigError(
                f"data.sources {source}: transform_fields is {', '.join(content.transform_fields)}, but a "
                f"record of format {self.name} is a text without fields; leave transform_fields out, or use "
                "another format, such as jsonl or parquet"
            )


class HeadedFormat(Format):
    """A format of which every file says at its head which fields its records have."""

    says_fields = True

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """See `Format`. Raises `ConfigError` if the head has not the fields."""
        try:
            yield from super().first_records(file, row, content)
        except DataError as error:
            raise ConfigError(str(error), code=error.code) from error
