"""The long campaign (`make chaos`): a kill at every scripted place, on every rank, at several steps. And a
run on a Ray whose private parts cannot be reached.
"""

from __future__ import annotations

from typing import Any

import pytest
from ray._private.state import actors

from orchestrator.cluster import ray_inventory
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
