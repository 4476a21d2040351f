"""The long campaign (`make chaos`): a kill at every scripted place, on every rank, at several steps. And a
run on a Ray whose private parts cannot be reached.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray._private.state import actors

from orchestrator.cluster import ray_inventory
from tests.system.conftest import OPEN, Make, with_evaluation
from tests.system.harness import Job, assert_same_training, assert_survivors_stayed, log_text, spawn

pytestmark = [pytest.mark.system, pytest.mark.chaos, pytest.mark.xdist_group("ray")]

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


@pytest.fixture(scope="module")
def unbroken_open(cluster: Any, tiny_config: Make, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A user's own training on one worker, which nothing befell."""
    job = Job(with_evaluation(tiny_config(OPEN), 3), tmp_path_factory.mktemp("open"))
    assert job.train(cluster__num_workers=1).outcome == "done"
    return job


@pytest.mark.parametrize("step", [4, 15])
@pytest.mark.parametrize("place", [*PLACES, "evaluating"])
def test_a_kill_anywhere_changes_nothing_of_a_users_own_training(
    tiny_config: Make, tmp_path: Path, cluster: Any, unbroken_open: Job, place: str, step: int
) -> None:
    job = Job(with_evaluation(tiny_config(OPEN), 3), tmp_path)
    plan = job.faults().kill(place, step=step - step % 3 if place == "evaluating" else step, rank=0)
    result = job.train(plan)
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0]
    assert_same_training(job, (unbroken_open.final_digest(), unbroken_open.losses()))
    assert [r.metrics for r in job.run.records()] == [r.metrics for r in unbroken_open.run.records()]
    columns = ["part", "step", "loss", "samples", "drawn", "distance"]
    assert job.run.evals()[columns].equals(unbroken_open.run.evals()[columns])
    saved = {int(row["name"].partition("-")[0]) for row in job.run.list_points()}
    step = max(step for step in range(1, 16) if step not in saved)  # a save may be late
    replayed = job.run.replay(step=step)
    before = max((each for each in saved if each < step), default=0)
    assert (replayed.steps_compared, replayed.first_difference) == (step - before, None)


def hide_private_parts() -> None:
    """In every process of a launch: as if Ray had other names for them."""
    for part in (*ray_inventory.OF_CORE, *ray_inventory.OF_LIBRARIES):
        if part is not ray_inventory.NODE_GROUPS:
            names = {f"{name}_renamed": user for name, user in part.names.items()}
            part.names.clear()
            part.names.update(names)


def test_a_run_goes_rays_plain_ways_where_private_parts_have_other_names(
    job: Job,
    cluster: Any,
    unbroken: tuple[str, list[float]],
) -> None:
    plan = job.faults().kill("applied", step=10, rank=0)
    hidden = "tests.system.test_campaign.hide_private_parts"
    driver = spawn(job, cluster, plan, before=hidden)
    job.drivers.append(driver)
    said, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    assert said.splitlines()[-1].startswith("done "), said
    assert plan.struck() == [0]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
    for part in ray_inventory.OF_CORE:
        assert log_text(job).count(part.lost) == 1
    helpers = {"TrainController", "SynchronizationActor", "DatasetManager", "PlacementGroupCleaner"}
    helpers |= {"_AutoscalingCoordinatorActor", "_StatsActor", "ActorLocationTracker"}
    assert helpers <= {row["ActorClassName"] for row in actors().values()}, "agents and feeder went them, too"
