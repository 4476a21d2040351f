"""A group of ranks without torchrun's agent: saves that fail, and what signals and commands request."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.storage.files import Storage
from tests.system.harness import Job, assert_exactly_once, when_saved, when_step
from tests.torchrun.ranks import ranks

pytestmark = [pytest.mark.xdist_group("forked"), pytest.mark.timeout(900)]

LIMIT_S = 300.0


@pytest.fixture
def job(tiny_config: Any, tmp_path: Path) -> Job:
    """10 steps, a point every 4."""
    return Job(tiny_config({"resume.every_steps": 4, "data.num_epochs": 1}), tmp_path)


def last_end(job: Job) -> tuple[str, str]:
    """(outcome, by) of the newest attempt's end."""
    store = RunStore(Storage(job.run.uri))
    ended = store.read_end(store.claim_numbers()[-1])
    assert ended is not None
    return ended.outcome, ended.by


@pytest.mark.quick("1")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_that_cannot_be_written_gives_that_save_up_and_the_group_trains_on(
    job: Job, tmp_path: Path, failing: int
) -> None:
    with ranks(tmp_path, 2, job.config(), full={failing: "00000004-"}) as group:
        assert group.end(LIMIT_S) == [0, 0], group.said()
        said = group.said()
    # it is tried again after 5 s, perhaps before the next one is due
    steps = [row["step"] for row in job.run.list_points(verify=True)]
    assert steps[-1] == 10
    assert 4 not in steps
    assert "the save of 00000004-a0001-g0001 was given up: rank" in said
    assert f"rank {failing} could not save its part: " in said
    assert "No space left on device" in said
    assert_exactly_once(job)


@pytest.mark.chaos
@pytest.mark.parametrize("changes", [{}, {"train__parallel": "shard", "train__numerics": "fast"}])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_last_save_that_is_given_up_is_tried_again_under_a_new_name(
    job: Job, tmp_path: Path, failing: int, changes: dict[str, Any]
) -> None:
    with ranks(tmp_path, 2, job.config(**changes), full={failing: "00000010-a0001-g0001"}) as group:
        assert group.end(LIMIT_S) == [0, 0], group.said()
    journal = read_journal(Storage(job.run.uri))
    first, second = journal.generations
    assert (first.parent, second.parent) == (None, journal.records[-1].key)
    assert [record.step for record in journal.records] == [*range(1, 11)], "none is made again"
    assert job.run.list_points(verify=True)[-1]["name"] == "00000010-a0001-g0002"
    assert last_end(job) == ("done", "the budget")


def test_signals_to_rank_0_save_and_stop_and_all_ranks_end_with_0(job: Job, tmp_path: Path) -> None:
    with ranks(tmp_path, 2, job.config(train__max_steps=100_000, resume__every_steps=None)) as group:
        pid = group.processes[0].pid
        assert pid is not None
        when_step(job, 3, lambda: os.kill(pid, signal.SIGUSR1)).join()
        when_saved(job, lambda: os.kill(pid, signal.SIGTERM)).join()
        assert group.end(LIMIT_S) == [0, 0], group.said()
        said = group.said()
    assert "SIGUSR1: saving after this step" in said
    assert "SIGTERM: saving and stopping" in said
    outcome, by = last_end(job)
    assert outcome == "stopped"
    assert by.startswith("SIGTERM to ")
    events = read_journal(Storage(job.run.uri)).events
    wishes = [e.fields["what"] for e in events if e.kind == EventKind.CONTROL_REQUEST]
    assert wishes == ["save", "stop"]
    points = job.run.list_points(verify=True)
    assert len(points) == 2
    assert points[-1]["step"] == job.run.records()[-1].step
    assert all(point["healthy"] for point in points)


def test_a_stop_at_once_by_command_ends_all_ranks_with_0_and_saves_nothing(job: Job, tmp_path: Path) -> None:
    with ranks(tmp_path, 2, job.config(train__max_steps=100_000, resume__every_steps=None)) as group:
        when_step(job, 3, lambda: job.run.stop(now=True)).join()
        assert group.end(LIMIT_S) == [0, 0], group.said()
    assert last_end(job)[0] == "stopped"
    assert job.run.list_points() == []
