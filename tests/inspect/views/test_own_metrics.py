"""The metrics of an objective: from the journal to records, columns, tables and curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from orchestrator.checkpoint.points.run_file import RUN_FILE
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.inspect import frames
from orchestrator.inspect.views.facts.columns import read_columns
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.json_form import seal
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, start
from tests.inspect.views.written import RUN
from tests.raising import raises
from tests.storage.crashfs import ModelDisk

# the objective changes twice: at first there is none, and the third has one name in common with the second
METRICS: tuple[Mapping[str, float | None] | None, ...] = (
    None,
    {"z_loss": 0.25, "gap": None},
    {"z_loss": 0.5, "gap": 2.0},
    {"z_loss": 1e-300, "other": -1.0},
)


def records() -> list[StepRecord]:
    steps = enumerate(METRICS, start=1)
    return [replace(record(key(step, 1, 1)), metrics=metrics) for step, metrics in steps]


@pytest.fixture
def store() -> RunStore:
    store = RunStore(Storage("/run", ModelDisk(), no_sleep))
    store.storage.create(RUN_FILE, seal(RUN))
    store.claim(1, "launch", START, "host")
    store.write_parent(ClaimParent(attempt=1, parent=None, inherited=()))
    journal = JournalWriter(store.storage, 1, "run")
    journal.generation(start(1, None, 1))
    for each in records():
        journal.step(each)
        journal.step(each)  # a copy that a member brings
    journal.close()
    return store


def test_the_journal_gives_the_records_back(store: RunStore) -> None:
    assert list(read_journal(store.storage).records) == records()
    lines = store.storage.read("journal/a0001/000001.jsonl")
    assert lines.count(b'"metrics"') == 3, "a step without metrics does not mention them"


def test_columns_have_a_column_for_each_metric(store: RunStore) -> None:
    columns = read_columns(store.storage)
    assert not columns.damages
    known = [{n: v for n, v in (metrics or {}).items() if v is not None} or None for metrics in METRICS]
    assert [columns.record(row).metrics for row in range(4)] == known


def test_tables_and_curves_show_them_and_refuse_other_names(store: RunStore) -> None:
    views = RunViews(store, lambda: 0.0, lambda: 0.0)
    views.refresh()
    facts = views._facts
    table = frames.steps_frame(facts.columns, facts.path)
    assert list(table.columns) == [*frames.STEPS, "z_loss", "gap", "other"]
    assert table["gap"].isna().tolist() == [True, True, False, True]
    assert table["z_loss"].tolist()[1:] == [0.25, 0.5, 1e-300]
    curves = views.series("tokens", ("loss", "own"), px=40)
    assert curves["own"] == ["z_loss", "gap", "other"]
    assert list(curves["history"]) == ["loss", *curves["own"]]
    assert [v for v in curves["history"]["gap"]["mean"] if v is not None] == [2.0]
    with raises(RefusedError, "metrics.unknown", "nothing", "z_loss"):
        views.series("tokens", ("nothing",))
