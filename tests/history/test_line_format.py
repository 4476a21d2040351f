"""Every line of a journal says its format: lines of earlier formats are read, those of a later format are
refused by every reader, with both numbers, and never taken for torn or damaged ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.segments import piece_path, read_first, segment_path
from orchestrator.history.journal.journal_lines import JournalLines
from orchestrator.history.journal.journal_reader import (
    beginning_of,
    journal_process,
    newest_choice,
    read_journal,
    read_outline,
)
from orchestrator.history.journal.journal_writer import JournalWriter, check_copy
from orchestrator.history.journal.line_format import (
    FIRST,
    FORMAT,
    EventKind,
    LaterLineError,
    line_bytes,
    parse_line,
)
from orchestrator.inspect.status.tail import read_tail
from orchestrator.inspect.views.facts.columns import read_columns
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, record, start
from tests.raising import raises
from tests.storage.model_store import ModelBucket, ModelStore

ATTEMPT_FIELDS: dict[str, Any] = dict.fromkeys(EventKind.ATTEMPT.fields) | {
    "pid": 7, "machine": "m", "pid_start": "1",
}  # fmt: skip
NUM_LINES = 6


def followed(storage: Storage) -> list[dict[str, Any]]:
    """What comes to somebody who watched before the first line."""
    grown = Storage.on(ModelStore(ModelBucket()))
    follower = JournalLines(grown, first=1)
    assert list(follower.new()) == []
    grown.create(piece_path(1, 1, 1), storage.read(segment_path(1, 1)))
    return [line for chunk in follower.new() for _, line in chunk.lines]


def beginning(storage: Storage) -> object:
    return beginning_of(storage, 1)


READERS: dict[str, Callable[[Storage], object]] = {
    "whole": lambda storage: read_journal(storage, "r1"),
    "whole without an id": read_journal,
    "outline": lambda storage: read_outline(storage, "r1"),
    "columns": lambda storage: read_columns(storage, "r1"),
    "columns without an id": read_columns,
    "tail": read_tail,
    "follower": followed,
}


def written() -> list[dict[str, Any]]:
    """The fields of the lines of a small journal, as this version writes them, without the checksums."""
    return [parse_line(line).fields for line in _written()]


@cache
def _written() -> list[bytes]:
    storage = Storage.on(ModelStore(ModelBucket()))
    journal = JournalWriter(storage, 1, "run", now=lambda: datetime(2026, 1, 2, tzinfo=UTC), run_id="r1")
    journal.event(EventKind.ATTEMPT, **ATTEMPT_FIELDS)
    journal.generation(start(1, None))
    for step in (1, 2):
        journal.step(record(key(step)))
    journal.event(EventKind.LEFT_OUT, member="a", reason="it did not answer")
    journal.event(EventKind.END, outcome="done", reason="", by="")
    journal.close()
    return storage.read(segment_path(1, 1)).splitlines()


def journal_of(lines: list[dict[str, Any]], pieces: int = 0) -> Storage:
    """In one segment, or in pieces of so many lines."""
    storage = Storage.on(ModelStore(ModelBucket()))
    texts, last = list[bytes](), FIRST
    for line in lines:
        if line.get("format") == FORMAT:
            text, last = line_bytes(line, last)
        else:
            text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
            last = f"{xxhash.xxh3_64_intdigest(text[:-1]):016x}"
        texts.append(text)
    if not pieces:
        storage.create(segment_path(1, 1), b"".join(texts))
    for number, at in enumerate(range(0, len(texts), pieces) if pieces else (), start=1):
        storage.create(piece_path(1, 1, number), b"".join(texts[at : at + pieces]))
    return storage


def without(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "format"}


def test_every_line_of_every_kind_begins_with_its_number_and_ends_with_its_checksum() -> None:
    lines = [json.loads(text) for text in _written()]
    assert len(lines) == NUM_LINES
    assert [(next(iter(line)), line["format"]) for line in lines] == [("format", FORMAT)] * NUM_LINES
    assert [[*line][-2:] for line in lines] == [["prev", "sum"]] * NUM_LINES
    assert [line["prev"] for line in lines] == [FIRST, *(line["sum"] for line in lines[:-1])]
    texts = [text.rpartition(b',"sum":')[0] for text in _written()]
    assert [line["sum"] for line in lines] == [xxhash.xxh3_64_hexdigest(text) for text in texts]


@pytest.mark.parametrize("name", ["whole", "outline", "tail"])
def test_lines_without_a_number_are_read_as_ever_and_the_number_is_no_field_of_an_event(name: str) -> None:
    lines = written()
    old, new = (READERS[name](journal_of(found)) for found in ([without(line) for line in lines], lines))
    if name == "tail":
        assert old.steps == [without(line) for line in new.steps]  # type: ignore[attr-defined]
        return
    assert old == new
    for event in new.events:  # type: ignore[attr-defined]
        assert "format" not in event.fields


def test_lines_without_a_number_are_the_same_columns() -> None:
    lines = written()
    old, new = (read_columns(journal_of(found)) for found in ([without(line) for line in lines], lines))
    assert len(old) == len(new) == 2
    for name in new.steps:
        assert np.array_equal(old[name], new[name], equal_nan=old[name].dtype.kind == "f")
    assert [event.kind for event in old.events] == [event.kind for event in new.events]


def test_a_copy_of_a_step_in_a_line_without_a_number_is_equal_to_one_with_it() -> None:
    lines = written()
    step = next(line for line in lines if line["kind"] == "step")
    copy = without({**step, "seq": NUM_LINES + 1})
    for name in ("whole", "columns"):
        READERS[name](journal_of([*lines, copy]))
    assert len(read_journal(journal_of([*lines, copy])).records) == 2
    other = {**copy, "loss": step["loss"] + 1}
    with raises(StorageError, "history.inconsistent", "differ in loss"):
        read_journal(journal_of([*lines, other]))
    (damage,) = read_columns(journal_of([*lines, other])).damages
    assert "differ in loss" in damage.reason
    check_copy(record(key(1)), record(key(1)))


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=40)
@given(at=st.integers(0, NUM_LINES - 1), later=st.integers(FORMAT + 1, 2**40), whole=st.booleans())
def test_a_line_of_a_later_version_is_refused_with_both_numbers_wherever_it_stands(
    name: str, at: int, later: int, whole: bool
) -> None:
    lines = written()
    # all that may be known of a later form is that a line is an object and has its number
    lines[at] = {**lines[at], "format": later} if whole else {"format": later, "what": lines[at]["kind"]}
    if name == "tail" and at and not whole:
        return  # it passes over what has no kind; the first line speaks for the whole segment
    line = f"line {at + 1} " if name != "tail" else ""
    with raises(LaterLineError, "storage.later_format", later, FORMAT, "journal/a0001/000001.jsonl", line):
        READERS[name](journal_of(lines))


@pytest.mark.parametrize("name", [name for name in READERS if name != "follower"])
def test_a_piece_in_a_bucket_speaks_for_itself(name: str) -> None:
    lines = written()
    READERS[name](journal_of(lines, pieces=2))
    lines[2] = {**lines[2], "format": FORMAT + 1}  # the second piece begins with it
    with raises(LaterLineError, "storage.later_format", FORMAT + 1, FORMAT):
        READERS[name](journal_of(lines, pieces=2))


def test_a_later_version_is_named_before_anything_else_that_seems_wrong() -> None:
    later = [{"format": FORMAT + 1, "run_id": "another", "numbers": [1]}]
    for name, read in READERS.items():
        with raises(LaterLineError, "storage.later_format", FORMAT + 1) as caught:
            read(journal_of(later))
        assert "another" not in str(caught.value), name


def test_how_an_attempt_of_a_later_version_began_is_refused_and_its_process_is_not_known() -> None:
    lines = written()
    assert beginning(journal_of(lines)) == lines[0]
    known = journal_process(journal_of(lines), 1)
    assert known is not None
    assert known.pid == 7
    assert journal_process(journal_of([without(line) for line in lines]), 1) == known
    later = journal_of([{**lines[0], "format": FORMAT + 1}, *lines[1:]])
    for read in (beginning, lambda storage: newest_choice(storage, [1])):
        with raises(LaterLineError, "storage.later_format", "journal/a0001", f"format {FORMAT + 1},"):
            read(later)
    assert journal_process(later, 1) is None  # nobody takes it for dead, or for alive, by these fields


@pytest.mark.parametrize("number", ["3", 0, -1, 2.5, None, True, [3]])
def test_what_is_no_number_of_a_format_is_a_line_that_is_not_as_it_was_written(number: object) -> None:
    lines = written()
    lines[1]["format"] = number
    for name in ("whole", "outline", "columns"):
        found: Any = READERS[name](journal_of(lines))
        (damage,) = found.damages
        assert damage.line == 2
        assert repr(number) in damage.reason


def test_a_number_that_one_bit_has_changed_makes_no_line_of_another_format() -> None:
    text = _written()[0]
    for other in (b"1", b"2", b"7"):
        changed = text.replace(b'"format":3', b'"format":' + other)
        with raises(OrchestratorError, "journal.damaged", "checksum"):
            parse_line(changed)
    with raises(OrchestratorError, "journal.damaged", "does not end with its checksum"):
        parse_line(text.replace(b',"sum":"', b',"sun":"'))


def test_a_torn_line_of_this_format_is_a_torn_line() -> None:
    storage = journal_of(written())
    data = read_first(storage, 1)
    cut = Storage.on(ModelStore(ModelBucket()))
    cut.create(segment_path(1, 1), data[:-5])
    assert read_journal(cut).torn == (segment_path(1, 1),)
    assert len(read_journal(cut).events) == 2
