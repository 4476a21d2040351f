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
    Evaluated,
    GenerationFormed,
    JournalDurable,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints, spared
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
    losses = dict(zip((10, 20, 30, 40, 50, 60), (9.0, 2.0, 8.0, 1.0, 7.0, 6.0), strict=True))
    there, _ = points_left(KeptPoints(keep_latest=2, **keep), losses, {})  # type: ignore[arg-type]
    assert there == [key(step).point_name for step in left]


@pytest.mark.parametrize("is_early", [True, False])
def test_the_best_by_an_evaluation_are_kept_whether_it_comes_before_the_commit_or_after(
    is_early: bool,
) -> None:
    """Step 20 has the lowest mean loss, step 30 the lowest of the part, and step 10 was not evaluated."""
    losses = dict.fromkeys((10, 20, 30, 40, 50, 60), 5.0) | {20: 1.0}
    evaluated = {20: 4.0, 30: 2.0, 40: 3.0, 50: None, 60: 8.0}
    kept = KeptPoints(keep_latest=2, keep_best=2, best_by="eval.held.loss")
    there, machine = points_left(kept, losses, evaluated, is_early)
    assert there == [key(step).point_name for step in (30, 40, 50, 60)]
    because = spared(machine.kept.names, None, 2, machine.kept.losses, "eval.held.loss")
    assert because[key(30).point_name] == "resume.keep_best=2: eval.held.loss 2.0000"


def points_left(
    kept: KeptPoints, losses: dict[int, float], evaluated: dict[int, float | None], is_early: bool = True
) -> tuple[list[str], CommitMachine]:
    """The points that are left after saves of steps with these mean losses and evaluations."""
    machine = CommitMachine(attempt=1, kept=kept, vote_limit_s=60.0)
    machine, _ = machine.on(GenerationFormed(generation=1, parent=None))
    there = list[str]()
    for step, loss in losses.items():
        at = key(step)
        there.append(at.point_name)
        evaluation = [Evaluated(key=at, loss=evaluated[step])] if step in evaluated else []
        for event in (
            *(evaluation if is_early else ()),
            cast(at, 0, world_size=1),
            JournalDurable(key=at),
            ClaimChecked(key=at, newer=False),
            CommitWritten(key=at, mean_loss=loss),
            ClaimChecked(key=at, newer=False),
            *(() if is_early else evaluation),
        ):
            machine, actions = machine.on(event)
            for action in actions:
                if isinstance(action, DeletePoints):
                    there = [name for name in there if name not in action.names]
                    machine, _ = machine.on(Deleted(names=action.names, failed=()))
    assert {*machine.kept.losses} <= {*there}, "it remembers no point that is gone"
    return there, machine
