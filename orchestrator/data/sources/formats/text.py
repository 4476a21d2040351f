"""`text`: one document per file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.data.sources.access.compressed import decoded
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Whole
from orchestrator.data.sources.formats.base import Attempt, Format, Parser
from orchestrator.data.sources.formats.jsonl import beginning
from orchestrator.data.sources.lists.file_parts import Cut
from orchestrator.data.sources.records.content import Content
from orchestrator.data.sources.records.documents import utf8_text
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.data.sources.records.text_encoding import utf8_pieces

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_parts import FilePart
    from orchestrator.data.sources.lists.file_rows import FileRow


class TextFiles(Format):
    """One document per file."""

    name = "text"
    cut = Cut.WHOLE
    contents = ("text",)
    has_fields = False
    drops_bom = True

    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """See `Format`."""
        del part, content, whole
        held, num_bytes = list[bytes](), 0
        for piece in utf8_pieces(file.name, decoded(file, row.path, row.bytes)):
            num_bytes += len(piece)
            if num_bytes <= MAX_RECORD_BYTES:
                held.append(piece)
            else:
                held.clear()
        yield 1, Whole(b"".join(held) if num_bytes <= MAX_RECORD_BYTES else None, num_bytes), 0

    def parser(self, content: Content) -> Parser:
        """See `Format`."""
        del content
        return utf8_text

    def first_records(self, file: InputFile, row: FileRow, content: Content) -> Iterator[Attempt]:
        """The lines of the one record that end in the file's first MiB."""
        del content
        begin, whole = beginning(file, row)
        record = begin if whole else begin[: max(0, begin.rfind(b"\n"))]
        if record.strip():
            yield "line 1", partial(utf8_text, record)


FORMAT: Format = TextFiles()
