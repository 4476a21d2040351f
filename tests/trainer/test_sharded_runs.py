"""Runs whose state is sharded: saved, continued in any layout, and through the loss of a member."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.history.event_kinds import EventKind
from orchestrator.records import StateKey
from orchestrator.resume.store import RunStore
from orchestrator.trainer.job import TrainJob
from tests.trainer.launch import Launch
from tests.trainer.member import Plan, members, run_to_end, tiny_job

SHARD, HSDP = "shard", {"shard": 2, "replicate": 2}


def job_of(parallel: Any, **changes: Any) -> TrainJob:
    return tiny_job(train__numerics="fast", train__parallel=parallel, **changes)


def losses(*launches: Launch) -> list[float]:
    """Of the history, by step: later generations have made some again."""
    found = {r.step: r.loss for launch in launches for _, r in sorted(launch.records.items())}
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("alone"), 1, job=job_of("replicate"))


def test_a_state_that_was_saved_in_shards_is_continued_in_any_layout(tmp_path, alone):
    half = run_to_end(tmp_path, 3, job=job_of(SHARD, train__max_steps=4))
    (point,) = half.points
    for attempt, (world_size, parallel) in enumerate([(4, HSDP), (2, "replicate"), (2, SHARD)], 2):
        later = run_to_end(tmp_path, world_size, attempt=attempt, point=point, job=job_of(parallel))
        assert later.last_point().key == StateKey(attempt=attempt, generation=1, step=8)
        assert losses(half, later) == pytest.approx(losses(alone), rel=1e-5)
