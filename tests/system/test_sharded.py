"""A state that lies in parts on several workers, on a real Ray and under torchrun's environment: saved,
continued in another layout, and through the death of a worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.inspect.lost_steps import assert_views_count_each_lost_step_once
from tests.system.harness import Job, assert_exactly_once, assert_survivors_stayed
from tests.torchrun.ranks import ranks

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
HSDP = {"shard": 2, "replicate": 1}


@pytest.mark.chaos
def test_two_workers_of_a_node_that_die_at_one_moment_take_no_other_along(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]]
) -> None:
    _, losses = unbroken
    plan = job.faults().kill("gradient_done", step=6, rank=2).kill("gradient_done", step=6, rank=3)
    result = job.train(
        plan,
        train__numerics="fast",
        train__parallel={"shard": 2, "replicate": 2},
        cluster__num_workers=[4, 4],
    )
    assert (result.outcome, result.step) == ("done", 16), result.reason
    assert plan.struck() == [0, 1]
    assert_survivors_stayed(job)
    assert assert_views_count_each_lost_step_once(job.run) == 0, "a whole replica is left"
    assert_exactly_once(job)
    assert job.losses() == pytest.approx(losses, rel=1e-5)


@pytest.mark.chaos
def test_a_killed_worker_takes_its_rows_along_and_the_run_goes_on_in_other_layouts(
    job: Job, cluster: Any, tmp_path: Path, unbroken: tuple[str, list[float]]
) -> None:
    _, losses = unbroken
    fast = {"train__numerics": "fast"}
    shard = {**fast, "train__parallel": "shard", "cluster__num_workers": 3}
    plan = job.faults().kill("gradient_done", step=6, rank=1)
    first = job.train(plan, **shard, train__max_steps=9)
    assert (first.outcome, first.step) == ("done", 9), first.reason
    assert plan.struck() == [0]
    lost = assert_views_count_each_lost_step_once(job.run)
    assert 1 <= lost <= 5, "two of three workers are left, with a memory point or a point"
    with ranks(tmp_path, 2, job.config(**fast, train__parallel=HSDP, train__max_steps=12)) as group:
        assert group.end(300.0) == [0, 0], group.said()
    last = job.train(**fast, train__parallel="replicate")
    assert (last.outcome, last.step) == ("done", 16), last.reason
    assert_exactly_once(job)
    assert job.losses() == pytest.approx(losses, rel=1e-5)
