"""What keep_best goes by: the mean loss of the steps since the point before, as the journal recorded them;
and that the machine keeps the points it spares.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    ClaimChecked,
    CommitWritten,
    Deleted,
    DeletePoints,
    GenerationFormed,
    JournalDurable,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.storage.files import Storage
from tests.checkpoint.commit_machines import cast
from tests.checkpoint.samples import key, record, start


def test_the_mean_is_that_of_the_steps_on_the_path_since_the_point_before(tmp_path: Path) -> None:
    journal = JournalWriter(Storage(str(tmp_path)), 2)
    parent = key(10)
    journal.generation(start(1, parent, attempt=2))
    for step in (11, 12, 13):
        journal.step(replace(record(key(step, attempt=2)), loss=float(step)))
    branch = key(12, attempt=2)
    journal.generation(start(2, branch, attempt=2))
    for step in (13, 14):
        journal.step(replace(record(key(step, 2, 2)), loss=100.0 + step))
    journal.flush()
    assert journal.mean_loss(key(13, attempt=2), parent) == 12.0
    assert journal.mean_loss(key(14, 2, 2), None) == (11 + 12 + 113 + 114) / 4, "not the step set aside"
    assert journal.mean_loss(key(14, 2, 2), key(11, attempt=2)) == (12 + 113 + 114) / 3
    assert journal.mean_loss(key(14, 2, 2), key(13, 2, 2)) == 114.0
    assert journal.mean_loss(key(12, 2, 2), branch) is None, "no step between them"
    journal.step(replace(record(key(15, 2, 2)), loss=float("nan")))
    assert journal.mean_loss(key(15, 2, 2), key(14, 2, 2)) is None
    journal.close()


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, [50, 60]),
        ({"keep_every": 30}, [30, 50, 60]),
        ({"keep_best": 2}, [20, 40, 50, 60]),
        ({"keep_best": 1, "keep_every": 60}, [40, 50, 60]),
    ],
)
def test_the_machine_keeps_every_nth_point_and_the_best_ones(keep: dict[str, int], left: list[int]) -> None:
    kept = KeptPoints(keep_latest=2, **keep)  # type: ignore[arg-type]
    machine = CommitMachine(attempt=1, kept=kept, vote_limit_s=60.0)
    machine, _ = machine.on(GenerationFormed(generation=1, parent=None))
    there = list[str]()
    for step, loss in zip((10, 20, 30, 40, 50, 60), (9.0, 2.0, 8.0, 1.0, 7.0, 6.0), strict=True):
        at = key(step)
        there.append(at.point_name)
        for event in (
            cast(at, 0, world_size=1),
            JournalDurable(key=at),
            ClaimChecked(key=at, newer=False),
            CommitWritten(key=at, mean_loss=loss),
            ClaimChecked(key=at, newer=False),
        ):
            machine, actions = machine.on(event)
            for action in actions:
                if isinstance(action, DeletePoints):
                    there = [name for name in there if name not in action.names]
                    machine, _ = machine.on(Deleted(names=action.names, failed=()))
    assert there == [key(step).point_name for step in left]
    assert {*machine.kept.losses} == {*there}, "it remembers no point that is gone"
