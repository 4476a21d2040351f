"""Every point that was committed in a run with kills is whole, and any layout reads the same from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.trainer.member import Plan, members, tiny_job
from tests.trainer.read_back import read_back

pytestmark = pytest.mark.xdist_group("forked")

REPLICATE, SHARD, HSDP = "replicate", "shard", {"shard": 2, "replicate": 2}
# at the first save: a later one may wait until that is decided, and come at another step
SAVES = ("staging_begun", "staged", "save_part_written")
STEPS = ("step_begin", "gradient_done", "summary_received", "applied")


def job_of(parallel: Any) -> TrainJob:
    return tiny_job(
        train__numerics="fast",
        train__parallel=parallel,
        train__max_steps=8,
        resume__every_steps=2,
        resume__keep_latest=100,
    )


def campaign(root: Path, parallel: Any, place: str, step: int) -> int:
    names = ["m0", "m1", "m2", "m3"]
    with members(root, names, {"m2": Plan(kill=(place, step))}, job=job_of(parallel)) as group:
        group.finish()
        assert len(group.launch.views) > 1, "a member was lost"
    job = job_of(REPLICATE)
    return read_back(group.launch.storage, job.model, job.train)


@pytest.mark.chaos
def test_every_point_of_a_run_with_a_kill_is_read_back_in_other_layouts(tmp_path: Path) -> None:
    assert campaign(tmp_path, SHARD, "staged", 2) >= 1


@pytest.mark.chaos
@pytest.mark.parametrize("parallel", [REPLICATE, SHARD, HSDP], ids=["replicate", "shard", "hsdp"])
@pytest.mark.parametrize(
    ("place", "step"), [*((place, 2) for place in SAVES), *((place, 5) for place in STEPS)]
)
def test_every_point_of_a_campaign_is_read_back_in_other_layouts(
    tmp_path: Path, parallel: Any, place: str, step: int
) -> None:
    assert campaign(tmp_path, parallel, place, step) >= 1
