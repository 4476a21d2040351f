"""Members of sharded groups die anywhere: the others go on in their processes, from what is whole among them,
and the end is that of a run that was re-formed at the same steps and never disturbed, to the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records.membership import Source
from orchestrator.records.steps import StateKey
from tests.trainer.kills import killed
from tests.trainer.launch import Launch
from tests.trainer.member import Plan, members, run_to_end
from tests.trainer.sharded_kills import (
    HSDP,
    REPLICATE,
    SHARD,
    assert_as_if_nothing_happened,
    job_of,
    losses,
)

pytestmark = pytest.mark.xdist_group("forked")

BF16 = {"train__precision": "bf16"}


def run_with(
    folder: Path, names: str, plans: dict[str, Plan], parallel: Any = SHARD, **changes: Any
) -> tuple[Launch, set[str]]:
    """To the end, and who was killed on the way."""
    with members(folder, list(names), plans, job_of(parallel, **changes)) as group:
        group.finish()
        return group.launch, killed(group)


# ---- one rank
@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("gradient_done", 5),
        ("summary_received", 5),
        ("applied", 5),
        ("memory_staged", 2),
        ("neighbour_half_sent", 2),
        ("sealed", 2),
    ],
)
@pytest.mark.quick("sealed-2")
def test_fsdp2_without_a_rank_goes_on_from_a_memory_point(tmp_path, calm, alone, place, step):
    launch, dead = run_with(tmp_path, "abc", {"b": Plan(kill=(place, step))})
    assert dead == {"b"}
    first, second = launch.views
    assert (first.world_size, second.world_size) == (3, 2)
    assert second.point is None, "no file was needed"
    assert second.parent is not None
    # a memory point that was sealed, or is whole among those who are left
    assert second.parent.step in (0, 2, 4)
    if place == "sealed":
        assert second.parent == StateKey(attempt=1, generation=1, step=2)
    assert len(second.sources) == 3
    copies = {Source.STAGED, Source.NEIGHBOUR}
    assert any({s.source for s in of_one} <= copies for of_one in second.sources), "nobody trains that shard"
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


@pytest.mark.parametrize("place", ["memory_staged", "neighbour_half_sent", "sealed"])
@pytest.mark.quick("neighbour_half_sent")
def test_fsdp2_on_one_machine_goes_on_from_what_a_killed_rank_had_lent(tmp_path, calm, alone, place):
    """Nobody has a copy of its memory points but itself, and its neighbour has them open."""
    plans = {name: Plan(node="the machine") for name in "abc"}
    plans["b"] = replace(plans["b"], kill=(place, 4))
    launch, dead = run_with(tmp_path, "abc", plans)
    assert dead == {"b"}
    second = launch.views[1]
    assert (second.world_size, second.point) == (2, None), "no file was needed"
    assert second.parent is not None
    assert second.parent.step >= (4 if place == "sealed" else 2)
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


def test_hsdp_with_a_whole_replica_left_loses_no_step(tmp_path, calm, alone):
    # after a step that no memory point was made of: only who trains has that state
    launch, dead = run_with(tmp_path, "abcd", {"b": Plan(kill=("gradient_done", 6))}, HSDP)
    assert dead == {"b"}
    second = launch.views[1]
    assert (second.parent, second.world_size) == (StateKey(attempt=1, generation=1, step=5), 3)
    assert_as_if_nothing_happened(launch, HSDP, calm, alone)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("names", "parallel", "kills", "worlds"),
    [
        ("ab", SHARD, {"b": ("gradient_done", 5)}, [2, 1]),
        ("abcd", HSDP, {"b": ("gradient_done", 4), "c": ("applied", 6)}, [4, 3, 2]),
    ],
    ids=["shard, to the last one", "hsdp, twice"],
)
def test_odd_weights_go_through_losses_as_others_do(tmp_path, calm, names, parallel, kills, worlds):
    """Tied, frozen, unused weights, buffers, blocks of several names, gradients that are always clipped, and
    micro-batches that do not divide a step.
    """
    odd = {
        "model__factory": "tests.trainer.sharded:Odd",
        "train__max_grad_norm": 0.1,
        "train__micro_batch_size": 5,
    }
    job = job_of(REPLICATE, **{**odd, "train__numerics": "invariant"})
    alone = losses(run_to_end(tmp_path / "alone", 1, job=job))
    plans = {name: Plan(kill=moment) for name, moment in kills.items()}
    launch, dead = run_with(tmp_path / "killed", names, plans, parallel, **odd)
    assert dead == set(kills)
    assert [view.world_size for view in launch.views] == worlds
    assert all(view.point is None and view.parent is not None for view in launch.views[1:])
    assert_as_if_nothing_happened(launch, parallel, calm, alone, **odd)


@pytest.mark.chaos
def test_hsdp_without_a_whole_replica_goes_on_from_a_memory_point(tmp_path, calm, alone):
    """Both holders of one shard are lost, who are not neighbours of each other (`neighbours` gives c's copy
    to d and a's to b).
    """
    plans = {name: Plan(kill=("sealed", 2)) for name in "ac"}
    launch, dead = run_with(tmp_path, "abcd", plans, HSDP)
    assert dead == {"a", "c"}
    assert launch.views[-1].world_size == 2
    assert all(view.point is None and view.parent is not None for view in launch.views[1:])
    assert launch.views[-1].step >= 2
    assert_as_if_nothing_happened(launch, HSDP, calm, alone)


def test_replicate_with_memory_points_goes_on_from_what_the_others_train(tmp_path, alone):
    """They are never older than what any survivor has live; but they are there, and do no harm."""
    launch, dead = run_with(tmp_path, "abc", {"b": Plan(kill=("gradient_done", 5))}, "replicate")
    assert dead == {"b"}
    second = launch.views[1]
    assert second.parent == StateKey(attempt=1, generation=1, step=4)
    assert {source.source for source in second.sources[0]} >= {Source.LIVE}
    joined = next(request for name, request in launch.joins if name == "a" and request.leaves == (1, 1))
    assert {h.source for h in joined.holdings} >= {Source.LIVE, Source.STAGED}
    assert losses(launch) == pytest.approx(alone, rel=1e-5)


# ---- bfloat16
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("parallel", "place"),
    [
        (REPLICATE, "gradient_done"),
        (SHARD, "gradient_done"),
        (SHARD, "neighbour_half_sent"),
        (HSDP, "summary_received"),
    ],
    ids=["replicate", "shard", "shard, in a memory point", "hsdp"],
)
def test_bf16_through_a_kill_has_the_bits_of_the_same_worlds_without_one(
    tmp_path, calm, alone, parallel, place
):
    """And the loss curve of float32 in one process, as near as the rounding of bfloat16 lets it."""
    step = 4 if place == "neighbour_half_sent" else 5
    launch, dead = run_with(tmp_path, "abcd", {"b": Plan(kill=(place, step))}, parallel, **BF16)
    assert dead == {"b"}
    assert [view.world_size for view in launch.views] == [4, 3]
    assert launch.views[1].point is None, "no file was needed"
    assert launch.views[1].step >= (0 if parallel == SHARD else 4), "whole replicas lose no step"
    assert_as_if_nothing_happened(launch, parallel, calm, alone, 5e-3, **BF16)


@pytest.mark.chaos
def test_bf16_under_invariant_numerics_has_the_bits_of_one_process_whoever_is_killed(tmp_path):
    job = job_of(REPLICATE, train__numerics="invariant", **BF16)
    unbroken = run_to_end(tmp_path / "unbroken", 1, job=job)
    plans = {"a": Plan(kill=("applied", 3)), "b": Plan(kill=("summary_received", 6))}
    with members(tmp_path / "killed", list("abc"), plans, job) as group:
        group.finish()
        assert killed(group) == {"a", "b"}
        launch = group.launch
    assert losses(launch) == losses(unbroken)
    assert launch.last_point().state_digest == unbroken.last_point().state_digest


# ---- several
@pytest.mark.chaos
def test_two_ranks_that_are_not_neighbours_are_lost_at_once(tmp_path, calm, alone):
    plans = {name: Plan(kill=("sealed", 2)) for name in "ac"}
    launch, dead = run_with(tmp_path, "abcd", plans)
    assert dead == {"a", "c"}
    assert launch.views[-1].point is None
    assert launch.views[-1].step >= 2
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


@pytest.mark.chaos
def test_a_rank_and_its_neighbour_take_a_shard_with_them_and_the_point_is_loaded(tmp_path, calm, alone):
    """The save of step 3 is committed before anyone trains on, for its votes are answered while b is held."""
    plans = {
        "b": Plan(hold=("step_begin", 4), kill=("gradient_done", 4)),
        "c": Plan(kill=("gradient_done", 4)),
    }
    job = job_of(SHARD, resume__every_steps=3)
    with members(tmp_path, list("abcd"), plans, job) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("b") is not None and bool(launch.points))
        launch.release("b")
        group.finish()
        assert killed(group) == {"b", "c"}
    last = launch.views[-1]
    assert (last.world_size, last.source_rank, last.step) == (2, None, 3)
    assert last.point == StateKey(attempt=1, generation=1, step=3).point_name
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


@pytest.mark.chaos
def test_all_ranks_die_and_new_ones_go_on_from_the_point(tmp_path, calm, alone):
    fate = Plan(kill=("gradient_done", 4))
    plans = {"a": replace(fate, hold=("step_begin", 4)), "b": fate, "c": fate}
    with members(tmp_path, list("abc"), plans, job_of(SHARD, resume__every_steps=3)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None and bool(launch.points))
        launch.release("a")
        for name in "abc":
            group.processes[name].join()
        for name in "def":
            group.start(name)
        group.finish()
        assert killed(group) == set("abc")
    last = launch.views[-1]
    assert last.point == StateKey(attempt=1, generation=1, step=3).point_name
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


# ---- those who come
def test_a_newcomer_receives_its_shard_and_nobody_goes_back(tmp_path, calm, alone):
    with members(tmp_path, ["a", "b"], {"b": Plan(hold=("step_begin", 4))}, job_of(SHARD)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("b") is not None)
        group.start("c")
        launch.wait_for(lambda: launch.waits("c"))
        launch.release("b")
        group.finish()
        assert killed(group) == set()
    assert [view.world_size for view in launch.views] == [2, 3]
    second = launch.views[1]
    assert second.parent == StateKey(attempt=1, generation=1, step=second.step)
    assert second.step >= 4, "the step that was held is done"
    assert len(second.sources) == 2
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


@pytest.mark.chaos
@pytest.mark.parametrize("place", ["resharding", "state_half_sent", "state_half_received"])
def test_who_dies_while_the_state_is_moved_takes_nothing_from_the_others(tmp_path, calm, alone, place):
    """The group grows, the save before that fails, and a member dies in the middle of it: the shards from
    before are there still, and what the lost one had lies in its memory point.
    """
    victim = "d" if place == "state_half_received" else "a"
    plans = {
        "b": Plan(hold=("step_begin", 5)),
        "a": Plan(kill=(place, 5) if victim == "a" else None),
        "c": Plan(full_disk_at=5),
    }
    with members(tmp_path, list("abc"), plans, job_of(SHARD)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("b") is not None)
        group.start("d", Plan(kill=(place, 5) if victim == "d" else None))
        launch.wait_for(lambda: launch.waits("d"))
        launch.release("b")
        group.finish()
        assert killed(group) == {victim}
    assert [view.world_size for view in launch.views] == [3, 4, 3]
    assert launch.views[1].parent == StateKey(attempt=1, generation=1, step=5)
    last = launch.views[2]
    assert last.point is None
    # without d all have their shards of step 5; a's shard is as old as its memory point
    assert last.parent is not None
    assert last.parent.step == 5 if victim == "d" else last.parent.step in (2, 4)
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


@pytest.mark.chaos
def test_the_point_before_a_planned_reform_keeps_its_step_if_that_goes_wrong(tmp_path, calm, alone):
    moment = ("resharding", 5)
    plans = {"b": Plan(hold=("step_begin", 5)), "a": Plan(hold=moment, kill=moment)}
    with members(tmp_path, list("abc"), plans, job_of(SHARD)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("b") is not None)
        group.start("d")
        launch.wait_for(lambda: launch.waits("d"))
        launch.release("b")
        launch.wait_for(lambda: launch.held("a") is not None)
        saved = StateKey(attempt=1, generation=1, step=5)
        launch.wait_for(lambda: saved.point_name in launch.points)
        launch.release("a")
        group.finish()
        assert killed(group) == {"a"}
    assert [view.parent for view in launch.views[1:]] == [saved, saved]
    assert [view.point for view in launch.views] == [None, None, saved.point_name]
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


@pytest.mark.chaos
def test_who_has_not_heard_that_all_have_their_shards_still_has_its_own(tmp_path, calm, alone):
    """Three shards become two with a replica each, a and c drop what they had, and b does not hear that it
    may. When d dies, b alone has the second shard of what a and c train.
    """
    plans = {"a": Plan(hold=("step_begin", 5)), "b": Plan(lose_agreement=5)}
    with members(tmp_path, list("abc"), plans, job_of(HSDP)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None)
        group.start("d", Plan(kill=("state_agreed", 5)))
        launch.wait_for(lambda: launch.waits("d"))
        launch.release("a")
        group.finish()
        assert killed(group) == {"d"}
    assert [view.world_size for view in launch.views] == [3, 4, 3]
    assert launch.views[1].step == 5
    assert launch.views[2].parent == StateKey(attempt=1, generation=2, step=5), "no step is lost"
    assert_as_if_nothing_happened(launch, HSDP, calm, alone)


@pytest.mark.chaos
def test_what_all_have_received_is_continued_though_nobody_heard_that_they_have(tmp_path, calm, alone):
    """As above, and nobody but a, which dies with one of the three shards, hears that all have theirs. The
    save before it fails.
    """
    plans = {
        "a": Plan(hold=("step_begin", 5), kill=("state_agreed", 5)),
        "b": Plan(lose_agreement=5),
        "c": Plan(lose_agreement=5, full_disk_at=5),
    }
    with members(tmp_path, list("abc"), plans, job_of(HSDP)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None)
        group.start("d", Plan(lose_agreement=5))
        launch.wait_for(lambda: launch.waits("d"))
        launch.release("a")
        group.finish()
        assert killed(group) == {"a"}
    assert [view.world_size for view in launch.views] == [3, 4, 3]
    last = launch.views[2]
    assert last.parent == StateKey(attempt=1, generation=2, step=5), "no step is lost"
    assert {source.source for of_one in last.sources for source in of_one} == {Source.RECEIVED}
    assert_as_if_nothing_happened(launch, HSDP, calm, alone)


@pytest.mark.chaos
# ---- while it is saved
@pytest.mark.parametrize("place", ["staging_begun", "staged", "save_part_written"])
def test_a_rank_that_dies_in_a_save_takes_the_save_with_it_and_no_step_before_the_memory_point(
    tmp_path, calm, alone, place
):
    plans = {"b": Plan(kill=(place, 4))}
    launch, dead = run_with(tmp_path, "abc", plans, resume__every_steps=4)
    assert dead == {"b"}
    assert launch.views[-1].world_size == 2
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


# ---- the coordinator
@pytest.mark.chaos
def test_the_coordinator_dies_and_a_rank_while_it_is_away(tmp_path, calm, alone):
    plans = {"a": Plan(hold=("applied", 3)), "b": Plan(kill=("step_begin", 4))}
    with members(tmp_path, list("abc"), plans, job_of(SHARD)) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None)
        launch.restart_coordinator()
        launch.release("a")
        group.finish()
        assert killed(group) == {"b"}
    assert {view.attempt for view in launch.views} == {1, 2}
    assert launch.views[-1].world_size == 2
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)
