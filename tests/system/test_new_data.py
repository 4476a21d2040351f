"""A restart of a source and a list for each epoch, through real SIGKILLs of all who may die meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Job, feeder_pid, log_text, sigkill, when_step
from tests.system.new_data import assert_lists_were_followed, first_settings, second_settings

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]


@pytest.mark.chaos
def test_a_restart_and_a_refresh_are_carried_out_once_through_kills_of_all_kinds(
    job: Job, cluster: Any, tmp_path: Path
) -> None:
    first = first_settings(tmp_path / "data")
    begun = job.train(**first)
    assert begun.outcome == "done", begun.reason
    second = second_settings(tmp_path / "data", first)
    # the coordinator with its first point after the restart, then a worker; the feeder in the last epochs
    plan = job.faults().kill("votes_complete", step=4).kill("applied", step=10, rank=1)
    watch = when_step(job, 24, lambda: sigkill(feeder_pid()))
    ended = job.train(plan, **second)
    watch.join()
    assert ended.outcome == "done", ended.reason
    assert plan.struck() == [0, 1]
    assert "the coordinator was restarted" in log_text(job)
    assert_lists_were_followed(job)
