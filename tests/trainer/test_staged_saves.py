"""Saves that are copied, written and voted for beside training: what the others do meanwhile, and what
becomes of them when somebody dies or leaves at any place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.store import RunStore
from tests.trainer.kills import END, assert_same_training, killed, part_writers
from tests.trainer.launch import Launch
from tests.trainer.member import Plan, members, run_to_end, tiny_job

pytestmark = pytest.mark.xdist_group("forked")

PLACES = ("staging_begun", "staged", "save_part_written")
EVERY_2, EVERY_4 = tiny_job(resume__every_steps=2), tiny_job(resume__every_steps=4)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("unbroken"), 1)


def saved(launch: Launch) -> list[tuple[int, int]]:
    """Generation and step of each point, oldest first."""
    return [(point.key.generation, point.key.step) for point in launch.points.values()]


def trained(launch: Launch, step: int) -> bool:
    return any(record.step >= step for record in launch.records.values())


@pytest.mark.quick("save_part_written")
@pytest.mark.parametrize("place", ["staged", "save_part_written"])
def test_training_goes_on_while_parts_are_written_and_no_other_save_begins(tmp_path, unbroken, place):
    plans = {name: Plan(hold=(place, 2)) for name in "ab"}
    with members(tmp_path, ["a", "b"], plans, job=EVERY_2) as group:
        launch = group.launch
        launch.wait_for(lambda: all(launch.held(name) is not None for name in "ab"))
        launch.wait_for(lambda: trained(launch, END))
        assert launch.points == {}
        for name in "ab":
            launch.release(name)
        group.finish()
    # the saves of 4 and 6 were due while that of 2 was undecided
    assert saved(launch) == [(1, 2), (1, END)]
    assert_same_training(launch, unbroken)


def test_a_step_waits_for_the_copy_of_the_state_that_it_changes(tmp_path, unbroken):
    calm = run_to_end(tmp_path / "calm", 1, job=EVERY_2)
    plans = {"a": Plan(hold=("staging_begun", 2)), "b": Plan(hold=("applied", 3))}
    with members(tmp_path / "run", ["a", "b"], plans, job=EVERY_2) as group:
        launch = group.launch
        # b has its copy, and has applied step 3; a has that step's summary, and waits for its own copy
        launch.wait_for(lambda: all(launch.held(name) is not None for name in "ab"))
        launch.wait_for(lambda: "00000002-a0001-g0001" in launch._votes)
        assert {vote.rank for vote in launch._votes["00000002-a0001-g0001"].values()} == {1}
        launch.release("a")
        launch.release("b")
        group.finish()
    assert saved(launch)[0] == (1, 2)
    first = "00000002-a0001-g0001"
    assert launch.points[first].state_digest == calm.points[first].state_digest, "nothing of a later step"
    assert_same_training(launch, unbroken)


@pytest.mark.quick("save_part_written-c")
@pytest.mark.parametrize("victim", ["a", "c"])
@pytest.mark.parametrize("place", PLACES)
def test_who_dies_in_a_save_costs_that_save_alone(tmp_path, unbroken, place, victim):
    with members(tmp_path, ["a", "b", "c"], {victim: Plan(kill=(place, 4))}, job=EVERY_4) as group:
        group.finish()
        assert killed(group) == {victim}
        launch = group.launch
    assert (1, 4) not in saved(launch)
    assert saved(launch)[-1] == (2, END)
    # each rank voted, reported or died: nothing is left of it
    assert not launch.storage.list("points/00000004-a0001-g0001")
    assert_same_training(launch, unbroken)


def test_a_part_that_is_written_on_into_the_next_generation_makes_a_point_there(tmp_path, unbroken):
    plans = {
        "a": Plan(hold=("staged", 2)),
        "b": Plan(hold=("step_begin", 4)),
        "c": Plan(hold=("step_begin", 4), kill=("gradient_done", 4)),
    }
    name = "00000002-a0001-g0001"
    with members(tmp_path, ["a", "b", "c"], plans, job=EVERY_2) as group:
        launch = group.launch
        launch.wait_for(lambda: all(launch.held(member) is not None for member in "abc"))
        launch.wait_for(lambda: set(launch._votes.get(name, {})) == {1, 2})
        launch.release("b")
        launch.release("c")
        launch.wait_for(lambda: len(launch.views) == 2)
        join = next(join for member, join in launch.joins if member == "a" and join.leaves == (1, 1))
        assert join.saving is not None
        assert join.saving.point_name == name
        assert launch.points == {}
        launch.release("a")
        group.finish()
    assert saved(launch)[0] == (1, 2)
    assert_same_training(launch, unbroken)


def test_files_stay_while_a_rank_that_joined_anew_writes_into_a_save_that_was_given_up(tmp_path, unbroken):
    plans = {"a": Plan(hold=("save_part_written", 2)), "c": Plan(kill=("staged", 2))}
    folder = "points/00000002-a0001-g0001"
    with members(tmp_path, ["a", "b", "c"], plans, job=EVERY_2) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None)
        launch.wait_for(lambda: len(launch.views) == 2)
        launch.wait_for(lambda: trained(launch, END))
        assert launch.storage.list(folder), "a has not said that it writes no more"
        launch.release("a")
        group.finish()
    assert not launch.storage.list(folder)
    assert saved(launch) == [(2, END)]
    assert_same_training(launch, unbroken)


def test_a_rank_that_still_writes_what_nobody_wants_keeps_nobody_from_joining(tmp_path, unbroken):
    plans = {
        "a": Plan(hold=("step_begin", 5)),
        "b": Plan(hold=("save_part_written", 2)),
        "c": Plan(full_disk_at=2),
    }
    with members(tmp_path, ["a", "b", "c"], plans, job=EVERY_2) as group:
        launch = group.launch
        launch.wait_for(lambda: all(launch.held(name) is not None for name in "ab"))
        launch.wait_for(lambda: any("was given up" in text for text in launch.status().warnings))
        group.start("d")
        launch.wait_for(lambda: launch.waits("d"))
        launch.release("a")  # a save is due at every step from here on, and b has no room for one
        launch.wait_for(lambda: len(launch.views) == 2)
        launch.release("b")
        group.finish()
    assert launch.views[1].world_size == 4
    assert_same_training(launch, unbroken)


def test_a_coordinator_that_dies_while_parts_are_written_costs_that_save_alone(tmp_path, unbroken):
    plans = {name: Plan(hold=("staged", 2)) for name in "ab"}
    with members(tmp_path, ["a", "b"], plans, job=EVERY_2) as group:
        launch = group.launch
        launch.wait_for(lambda: all(launch.held(name) is not None for name in "ab"))
        launch.restart_coordinator()
        for name in "ab":
            launch.release(name)
        group.finish()
        assert launch.wait_for_end().ended == "done"
    assert launch.views[1].attempt == 2
    assert all(point.key.attempt == 2 for point in launch.points.values())
    assert_same_training(launch, unbroken)


def test_all_die_in_a_save_and_the_next_members_begin_where_no_point_was_made(tmp_path, unbroken):
    plans = {name: Plan(kill=("staged", 4)) for name in "ab"}
    with members(tmp_path, ["a", "b"], plans, job=EVERY_4) as group:
        group.join_all()
        for name in "cd":
            group.start(name)
        group.finish()
        launch = group.launch
    assert launch.views[1].point is None
    assert saved(launch)[-1] == (2, END)
    assert_same_training(launch, unbroken)


@pytest.mark.chaos
def test_a_large_part_is_written_by_a_process_that_ends_with_the_member(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 1024}
    job = tiny_job(resume__every_steps=2, train__max_steps=3)
    job = dataclasses.replace(job, model=job.model.model_copy(update={"config": job.model.config | shape}))
    with members(tmp_path, ["a"], {"a": Plan(hold=("save_part_written", 2))}, job=job) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None)
        (writer,) = part_writers(group.processes["a"].pid)
        launch.release("a")
        group.finish()
    assert saved(launch) == [(1, 2), (1, 3)]
    assert not Path(f"/proc/{writer}").exists()
    store = RunStore(launch.storage)
    assert [store.verify_point(name) for name in launch.points] == [[], []]
