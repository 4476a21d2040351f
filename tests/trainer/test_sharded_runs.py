"""Runs whose state is sharded: saved, continued in any layout, and through the loss of a member."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.steps import StateKey
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.trainer.launch import Launch
from tests.trainer.member import Plan, members, run_to_end, tiny_job

pytestmark = pytest.mark.xdist_group("forked")

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


@pytest.mark.chaos
def test_a_state_that_was_saved_in_shards_is_continued_in_any_layout(tmp_path, alone):
    half = run_to_end(tmp_path, 3, job=job_of(SHARD, train__max_steps=4))
    (point,) = half.points
    for attempt, (world_size, parallel) in enumerate([(4, HSDP), (2, "replicate"), (2, SHARD)], 2):
        later = run_to_end(tmp_path, world_size, attempt=attempt, point=point, job=job_of(parallel))
        assert later.last_point().key == StateKey(attempt=attempt, generation=1, step=8)
        assert losses(half, later) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.chaos
def test_the_digest_of_a_sharded_state_is_that_of_its_point(tmp_path):
    job = job_of(HSDP, resume__every_steps=4)
    launch = run_to_end(tmp_path, 4, job=replace(job, digest_every_steps=2))
    events = [event for event in launch.journal().events if event.kind == EventKind.STATE_DIGEST]
    found = {event.fields["step"]: event.fields["weights_digest"] for event in events}
    store = RunStore(launch.storage)
    of_points = {p.key.step: p.commit.weights_digest for p in map(store.read_point, store.point_names())}
    assert of_points == {step: found[step] for step in (4, 8)}
    assert len(set(found.values())) == len(found) == 4


def test_after_the_loss_of_a_shard_all_load_the_newest_point_and_train_the_same(tmp_path, alone):
    plans = {"m2": Plan(kill=("gradient_done", 6))}
    with members(tmp_path, ["m0", "m1", "m2"], plans, job=job_of(SHARD, resume__every_steps=4)) as group:
        group.finish()
        launch = group.launch
    assert [view.step for view in launch.views] == [0, 4], (
        "step 5 lay on three members, of which two are left"
    )
    assert launch.views[-1].source_rank is None
    assert launch.views[-1].point is not None
    assert launch.last_point().key == StateKey(attempt=1, generation=2, step=8)
    assert losses(launch) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.chaos
def test_without_a_point_all_begin_anew_after_the_loss_of_a_shard(tmp_path, alone):
    plans = {"m1": Plan(kill=("applied", 3))}
    with members(tmp_path, ["m0", "m1"], plans, job=job_of(SHARD)) as group:
        group.finish()
        launch = group.launch
    assert [(view.step, view.point) for view in launch.views] == [(0, None), (0, None)]
    assert losses(launch) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.chaos
@pytest.mark.parametrize("moment", [("gradient_done", 6), ("summary_received", 6), ("applied", 6)])
def test_where_each_shard_is_held_twice_no_step_is_lost_with_a_member(tmp_path, alone, moment):
    names = ["m0", "m1", "m2", "m3"]
    with members(tmp_path, names, {"m3": Plan(kill=moment)}, job=job_of(HSDP)) as group:
        group.finish()
        launch = group.launch
    assert not [view for view in launch.views if view.point is not None], "nobody reads storage"
    assert launch.views[-1].step >= 5
    assert losses(launch) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.chaos  # test_sharded_kills.py has a newcomer in `make test`
def test_a_member_that_joins_a_sharded_group_gets_its_rows_from_the_others(tmp_path, alone):
    plans = {"m0": Plan(hold=("applied", 2))}
    with members(tmp_path, ["m0", "m1"], plans, job=job_of(SHARD)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("m0") is not None)
        group.start("late")
        launch.wait_for(lambda: launch.waits("late"))
        launch.release("m0")
        group.finish()
    assert [view.world_size for view in launch.views] == [2, 3]
    assert launch.views[-1].step >= 2
    assert launch.views[-1].point is None
    assert losses(launch) == pytest.approx(losses(alone), rel=1e-5)
