"""The journal as columns: the same steps on the history as `history.claims.lineage` finds, each line once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import StorageError
from orchestrator.history.journal.journal_lines import JournalLines
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.inspect.views.facts import effective_steps
from orchestrator.inspect.views.facts.columns import Columns, read_columns
from orchestrator.inspect.views.facts.effective_steps import HISTORY, LOST, REWOUND
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, start
from tests.history.histories import MOVES, play
from tests.inspect.views.written import write
from tests.raising import raises
from tests.storage.crashfs import ModelDisk

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "format2" / "example"
MOVE = st.tuples(st.sampled_from(sorted(MOVES)), st.integers(0, 3))


def storage() -> Storage:
    return Storage("/run", ModelDisk(), no_sleep)


def history(store: RunStore, columns: Columns) -> effective_steps.EffectiveSteps:
    return effective_steps.build(columns, store.claims(), store.parents()[0])


def records(columns: Columns, rows: Any) -> list[StepRecord]:
    return [columns.record(int(row)) for row in rows]


@settings(max_examples=100)
@given(st.lists(MOVE, max_size=60), st.integers(0, 99))
def test_the_history_has_the_steps_that_lineage_finds(moves: list[tuple[str, int]], seed: int) -> None:
    world = play([("train", 0), *moves])
    store = write(world, seed)
    columns, seen = read_columns(store.storage), survey(store)
    found = history(store, columns)
    assert records(columns, found.rows.array) == list(seen.lineage.records)
    assert len(columns) - len(found.rows) == seen.lineage.orphans
    assert found.gaps == len(seen.lineage.gaps)
    for name in world.points:
        at = parse_point_name(name)
        assert at is not None
        assert found.why_orphan(at) == seen.lineage.why_orphan(at)
    assert sorted(row for piece in found.pieces for row in piece.rows.tolist()) == [*range(len(columns))]
    assert sum(len(piece.rows) for piece in found.pieces if piece.fate == HISTORY) == len(found.rows)


@settings(max_examples=40)
@given(st.lists(MOVE, max_size=40), st.integers(0, 99), st.data())
def test_a_journal_read_in_any_pieces_is_the_same_as_read_at_once(
    moves: list[tuple[str, int]], seed: int, data: st.DataObject
) -> None:
    whole = write(play([("train", 0), *moves]), seed).storage
    paths = [
        f"journal/{attempt}/{name}"
        for attempt in whole.list("journal")
        for name in whole.list(f"journal/{attempt}")
    ]
    growing, columns = storage(), Columns()
    lines = JournalLines(growing, None)
    for each in paths:
        handle, content = growing.append(each), whole.read(each)
        for cut in sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=3))):
            handle.write(content[handle.num_bytes : cut])
            columns.refresh(lines)
        handle.write(content[handle.num_bytes :])
        handle.close()
    columns.refresh(lines)
    expected = read_columns(whole)
    for name in expected.steps:
        np.testing.assert_array_equal(columns[name], expected[name], name)
    assert columns.events == expected.events
    assert (columns.last_id, lines.torn) == (expected.last_id, ())


def test_the_steps_of_a_run_that_an_earlier_version_wrote_are_read() -> None:
    store = RunStore(Storage(str(EXAMPLE)))
    columns = read_columns(store.storage)
    found = history(store, columns)
    assert records(columns, found.rows.array) == list(survey(store).lineage.records)
    fates = {(columns.generations[p.generation].id[0], p.fate, p.by) for p in found.pieces}
    assert {fate for _, fate, _ in fates} == {HISTORY, LOST, REWOUND}
    assert (2, REWOUND, 3) in fates


def test_steps_that_go_on_from_the_head_are_taken_up_without_building_the_history_anew() -> None:
    files, columns = storage(), Columns()
    journal, lines = JournalWriter(files, 1), JournalLines(files, None)
    journal.generation(start(1, None))
    journal.step(record(key(1)))
    journal.flush()
    columns.refresh(lines)
    claims, parents = [_claim(1)], [_parent(1)]
    found = effective_steps.build(columns, claims, parents)
    for step in (2, 3):
        journal.step(record(key(step)))
    journal.flush()
    assert columns.refresh(lines)
    assert effective_steps.extend(columns, found)
    assert found.rows.array.tolist() == found.pieces[0].rows.tolist() == [0, 1, 2]
    journal.step(record(key(5)))  # a gap is counted where the history is built
    journal.flush()
    columns.refresh(lines)
    assert not effective_steps.extend(columns, found)
    assert effective_steps.build(columns, claims, parents).gaps == 1


def _claim(number: int) -> Any:
    from tests.history.histories import claim

    return claim(number)


def _parent(number: int) -> Any:
    from orchestrator.history.claims.claims import ClaimParent

    return ClaimParent(attempt=number, parent=None)


# ------------------------------------------------------------ lines
def lines_of(files: Storage, *texts: str, segment: int = 1) -> None:
    handle = files.append(f"journal/a0001/{segment:06d}.jsonl")
    handle.write("".join(texts).encode())
    handle.close()


def line(seq: int, kind: str = "damaged point", **fields: Any) -> str:
    own = {"seq": seq, "time": "2026-11-22T00:00:00.000+00:00", "run": "run", "attempt": 1, "kind": kind}
    return json.dumps(own | fields, separators=(",", ":")) + "\n"


def step_line(seq: int, step: int, **changes: Any) -> str:
    from orchestrator.json_form import encode

    return line(seq, "step", **(encode(record(key(step))) | changes))


def test_lines_that_stand_again_in_the_next_segment_are_taken_once() -> None:
    files = storage()
    lines_of(files, line(1), line(2), line(3), line(4)[:20])
    lines_of(files, line(2), line(3), line(4), segment=2)
    lines_of(files, line(3), line(4), line(5), segment=3)
    lines = JournalLines(files, None)
    assert [number["seq"] for chunk in lines.new() for _, number in chunk.lines] == [1, 2, 3, 4, 5]
    assert lines.torn == ()
    assert list(lines.new()) == []


SEGMENT = "journal/a0001/000001.jsonl"


@pytest.mark.parametrize(
    ("texts", "where", "values"),
    [
        ([[line(1), line(3)]], f"{SEGMENT} line 2", ("number 2", "found 3")),
        ([[line(1), "{\n"]], f"{SEGMENT} line 2", ("unexpected end",)),
        ([[line(1), line(2)], [line(2, point="other")]], "journal/a0001/000002.jsonl line 1", ("another",)),
        ([[step_line(1, 1), step_line(2, 2, loss="many")]], f"{SEGMENT} line 2", ("loss is 'many'",)),
        ([[step_line(1, 1, consumed_tokens=1.5)]], f"{SEGMENT} line 1", ("consumed_tokens is 1.5",)),
        ([[step_line(1, 1, digest="X")]], f"{SEGMENT} line 1", ("digest is 'X'",)),
        ([[step_line(1, 1, time="noon"), step_line(2, 2)]], f"{SEGMENT} line 1", ("time is 'noon'",)),
        ([[step_line(1, 1), step_line(2, 1, loss=9.0)]], f"{SEGMENT} line 2", ("differ in loss", "step 1")),
    ],
)
def test_what_is_no_line_of_the_journal_is_named_by_file_and_line(
    texts: list[list[str]], where: str, values: tuple[str, ...]
) -> None:
    files = storage()
    for number, segment in enumerate(texts, start=1):
        lines_of(files, *segment, segment=number)
    (damage,) = read_columns(files).damages
    assert damage.where == where
    for value in values:
        assert value in damage.reason


def test_a_segment_of_another_run_is_refused() -> None:
    files = storage()
    lines_of(files, line(1, run_id="b"))
    with raises(StorageError, "run.mixed_files", SEGMENT, "run b"):
        read_columns(files, "")


def test_a_missing_segment_is_named() -> None:
    files = storage()
    lines_of(files, line(2), segment=2)
    (damage,) = read_columns(files).damages
    assert (damage.path, damage.first, damage.last) == (SEGMENT, 1, 1)


def test_losses_that_are_no_numbers_and_copies_with_other_timings_are_read() -> None:
    files = storage()
    lines_of(files, step_line(1, 1, loss="nan"), step_line(2, 2), step_line(3, 2, step_s=9.0))
    columns = read_columns(files)
    assert np.isnan(columns["loss"][0])
    assert columns["step"].tolist() == [1, 2]
    assert columns["step_s"].tolist() == [0.5, 0.5]


def test_fields_of_later_versions_are_read_where_they_are_known_and_passed_over_where_not() -> None:
    files = storage()
    lines_of(
        files,
        step_line(1, 1, ended=1000.5, mood="good"),
        step_line(2, 2),
    )
    columns = read_columns(files)
    assert columns["t"].tolist() == [1795305600.0] * 2
    assert columns["ended"][0] == 1000.5
    assert np.isnan(columns["ended"][1])


def test_an_old_attempt_that_goes_on_is_seen_however_many_followed(tmp_path: Path) -> None:
    files = Storage(str(tmp_path))
    writers = {number: JournalWriter(files, number) for number in range(1, 40)}
    for number, writer in writers.items():
        writer.generation(start(1, None, number))
        writer.flush()
    columns, lines = Columns(), JournalLines(files, None)
    columns.refresh(lines)
    writers[7].step(record(key(1, attempt=7)))
    writers[7].flush()
    assert any(columns.refresh(lines) for _ in range(5))
    assert len(columns) == 1
