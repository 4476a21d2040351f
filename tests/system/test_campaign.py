"""The long campaign (`make chaos`): a kill at every scripted place, on every rank, at several steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.harness import Job, assert_same_training, assert_survivors_stayed

pytestmark = [pytest.mark.system, pytest.mark.chaos]

PLACES = ("step_begin", "gradient_done", "summary_received", "applied")


@pytest.mark.parametrize("step", [1, 4, 15])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_anywhere_changes_nothing(
    job: Job,
    cluster: Any,
    unbroken: tuple[str, list[float]],
    place: str,
    rank: int,
    step: int,
) -> None:
    plan = job.faults().kill(place, step=step, rank=rank)
    result = job.train(plan)
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
