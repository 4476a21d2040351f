"""`lines`: one document per line. Drops one trailing carriage return. Blank lines are no documents."""

from __future__ import annotations

from orchestrator.data.sources.formats.base import Format, Parser
from orchestrator.data.sources.formats.jsonl import LineFormat
from orchestrator.data.sources.records.content import Content, Document
from orchestrator.data.sources.records.documents import utf8_text


class PlainLines(LineFormat):
    """One document per line."""

    name = "lines"
    contents = ("text",)
    has_fields = False

    def parser(self, content: Content) -> Parser:
        """See `Format`."""
        del content
        return _document


def _document(line: bytes) -> Document | None:
    return utf8_text(line.removesuffix(b"\r")) if line.strip() else None


FORMAT: Format = PlainLines()
