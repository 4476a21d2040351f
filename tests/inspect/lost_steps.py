"""What every view of a run says of the steps that were made again, beside what its journal says by itself."""

from __future__ import annotations

import math

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.inspect.run import Run
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage


def lost_steps(storage: Storage) -> set[StateKey]:
    """The steps that somebody made and the history does not have: followed back here from the newest
    generation, parent by parent.
    """
    journal = read_journal(storage)
    starts = {start.id: start for start in journal.generations}
    history, at, last = set[StateKey](), max(starts), math.inf
    while True:
        history |= {r.key for r in journal.records if (r.attempt, r.generation) == at and r.step <= last}
        parent = starts[at].parent
        if parent is None:
            return {record.key for record in journal.records} - history
        at, last = (parent.attempt, parent.generation), parent.step


def assert_views_count_each_lost_step_once(run: Run) -> int:
    """How many there are."""
    storage = Storage(run.uri)
    lost = lost_steps(storage)
    records = {record.key: record for record in read_journal(storage).records}
    views = RunViews(RunStore(storage))
    views.refresh()
    shown = views.timeline()
    told = [
        dict(zip(shown["happenings"]["columns"], row, strict=True)) for row in shown["happenings"]["rows"]
    ]
    assert sum(entry["lost_steps"] for entry in told) == len(lost)
    for entry in told:
        number = entry["lost_steps"]
        steps = f"{number} step{'s' if number > 1 else ''} lost"
        assert (steps in entry["text"]) == bool(number), entry
    pieces = [dict(zip(shown["segments"]["columns"], row, strict=True)) for row in shown["segments"]["rows"]]
    aside = {
        StateKey(attempt=piece["attempt"], generation=piece["generation"], step=step)
        for piece in pieces
        if piece["fate"]
        for step in range(piece["s0"] + 1, piece["s1"] + 1)
    }
    assert aside == lost, "the page draws them beside the history"
    seconds = sum(records[key].step_s for key in lost)
    assert run.goodput()["parts"]["lost"] == pytest.approx(seconds, abs=0.1 + 0.01 * seconds), "to a tenth"
    history = run.records()
    assert len(history) == len(records) - len(lost)
    report = run.audit()
    assert (report["exactly_once"], report["steps"]) == (True, len(history)), report
    assert run.status(0).step == history[-1].step
    return len(lost)
