"""What the journal says of a document that was skipped, in parts."""

from __future__ import annotations

import pytest

from orchestrator.data.feed.feed_reports import BadDocument


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("/c/a.jsonl: byte 40, line 17: no 'text'", ("/c/a.jsonl", "byte 40, line 17", "no 'text'")),
        ("a: b.jsonl: byte 40, line not counted: x: y", ("a: b.jsonl", "byte 40, line not counted", "x: y")),
        ("a.parquet: row 2: not UTF-8:\nat 2", ("a.parquet", "row 2", "not UTF-8:\nat 2")),
        ("a.jsonl: byte 1, line 2: says b: row 3: z", ("a.jsonl", "byte 1, line 2", "says b: row 3: z")),
        ("something else", ("", "", "something else")),
    ],
)
def test_a_skipped_document_is_named_by_file_place_and_reason(text: str, parts: tuple[str, str, str]) -> None:
    assert BadDocument(source="made", text=text).parts == parts
