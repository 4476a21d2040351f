"""Members die, lose the summary, and come: the others train on in their processes, and the end is that of the
unbroken run, bit by bit."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.records.steps import StateKey, StepRecord
from tests.elastic.in_process import Driver
from tests.trainer.kills import END, assert_same_training, killed, let_in
from tests.trainer.launch import SETTINGS, Launch
from tests.trainer.member import Plan, members, run_to_end, tiny_job

pytestmark = pytest.mark.xdist_group("forked")

PLACES = ("step_begin", "gradient_done", "summary_received", "applied")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("unbroken"), 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("victim", ["a", "c"])
@pytest.mark.quick("a-summary_received")
def test_survivors_of_a_kill_go_on_and_a_newcomer_joins_them(tmp_path, unbroken, place, victim):
    plans = {victim: Plan(kill=(place, 4)), "b": Plan(hold=("step_begin", 6))}
    with members(tmp_path, ["a", "b", "c"], plans) as group:
        let_in(group, "d")
        group.finish()
        assert killed(group) == {victim}
        launch = group.launch
    assert [view.world_size for view in launch.views] == [3, 2, 3]
    assert all(view.source_rank == 0 and view.point is None for view in launch.views[1:])
    assert_same_training(launch, unbroken)


def test_two_of_three_die_in_one_step_and_the_last_one_ends_the_run(tmp_path, unbroken):
    plans = {"a": Plan(kill=("gradient_done", 3)), "c": Plan(kill=("summary_received", 3))}
    with members(tmp_path, ["a", "b", "c"], plans) as group:
        group.finish()
        assert killed(group) <= {"a", "c"}
        launch = group.launch
    assert_same_training(launch, unbroken)


def test_a_member_that_lost_the_summary_applies_the_step_itself_without_a_copy(tmp_path, unbroken):
    # were it to receive a state, it would be killed
    plans = {"b": Plan(lose_summary=4, kill=("state_half_received", 4))}
    with members(tmp_path, ["a", "b", "c"], plans) as group:
        group.finish()
        assert killed(group) == set()
        launch = group.launch
    late = next(join for name, join in launch.joins if name == "b" and join.leaves == (1, 1))
    assert (late.key, late.prepared) == (
        StateKey(attempt=1, generation=1, step=3),
        StateKey(attempt=1, generation=1, step=4),
    )
    assert launch.views[1].parent == StateKey(attempt=1, generation=1, step=4)
    assert_same_training(launch, unbroken)


def test_a_step_whose_summary_nobody_has_is_dropped_by_all_and_trained_again(tmp_path, unbroken):
    plans = {name: Plan(lose_summary=4, kill=("state_half_received", 3)) for name in "abc"}
    with members(tmp_path, ["a", "b", "c"], plans) as group:
        group.finish()
        assert killed(group) == set()
        launch = group.launch
    assert launch.views[1].parent == StateKey(attempt=1, generation=1, step=3)
    assert_same_training(launch, unbroken)


def test_a_member_frozen_one_step_ahead_and_thawed_later_follows_the_history_that_went_on(tmp_path, unbroken):
    # c alone has the summary of step 4; the others go on without it and train that step again
    losing = Plan(lose_summary=4)
    plans = {
        "a": losing,
        "b": dataclasses.replace(losing, hold=("step_begin", 6)),
        "c": Plan(hold=("applied", 4)),
    }
    settings = dataclasses.replace(SETTINGS, missing_grace_s=1.0)
    with members(tmp_path, ["a", "b", "c"], plans, settings=settings) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("c") is not None)
        launch.wait_for(lambda: launch.held("b") is not None)
        launch.release("c")
        launch.wait_for(lambda: launch.waits("c"))
        launch.release("b")
        group.finish()
        assert killed(group) == set()
    thawed = next(join for name, join in launch.joins if name == "c" and join.leaves == (1, 1))
    assert thawed.key == StateKey(attempt=1, generation=1, step=4)
    assert [view.world_size for view in launch.views] == [3, 2, 3]
    assert launch.views[1].parent == StateKey(attempt=1, generation=1, step=3)
    assert launch.views[2].parent == StateKey(attempt=1, generation=2, step=6)
    assert_same_training(launch, unbroken)


def test_a_newcomer_that_dies_with_half_of_the_state_received_disturbs_nobody(tmp_path, unbroken):
    plans = {"b": Plan(hold=("step_begin", 4))}
    with members(tmp_path, ["a", "b"], plans) as group:
        let_in(group, "c", Plan(kill=("state_half_received", 4)))
        group.finish()
        assert killed(group) == {"c"}
        launch = group.launch
    assert [view.world_size for view in launch.views] == [2, 3, 2]
    assert_same_training(launch, unbroken)


def test_a_newcomer_that_has_received_the_state_goes_on_alone_without_having_heard_that_it_may(
    tmp_path, unbroken
):
    with members(tmp_path, ["a"], {"a": Plan(hold=("step_begin", 4), kill=("state_agreed", 4))}) as group:
        let_in(group, "b", Plan(lose_agreement=4), held="a")
        group.finish()
        assert killed(group) == {"a"}
        launch = group.launch
    assert [view.world_size for view in launch.views] == [1, 2, 1]
    assert launch.views[2].parent == StateKey(attempt=1, generation=2, step=4), "no step is lost"
    assert_same_training(launch, unbroken)


def test_half_a_state_is_not_used_when_its_source_dies_and_another_member_sends_the_whole(tmp_path, unbroken):
    plans = {"a": Plan(kill=("state_half_sent", 4)), "b": Plan(hold=("step_begin", 4))}
    with members(tmp_path, ["a", "b"], plans) as group:
        let_in(group, "c")
        group.finish()
        assert killed(group) == {"a"}
        launch = group.launch
    blank = [join for name, join in launch.joins if name == "c"]
    assert [join.key for join in blank] == [None, None]
    assert [view.members for view in launch.views[1:]] == [("a", "b", "c"), ("b", "c")]
    assert_same_training(launch, unbroken)


def test_when_nobody_is_left_the_next_members_go_on_from_the_newest_point(tmp_path, unbroken):
    job = tiny_job(resume__every_steps=3)
    plans = {name: Plan(kill=("gradient_done", 5)) for name in "ab"}
    plans["b"] = dataclasses.replace(plans["b"], hold=("step_begin", 5))
    with members(tmp_path, ["a", "b"], plans, job=job) as group:
        group.launch.wait_for(lambda: group.launch.held("b") is not None and bool(group.launch.points))
        group.launch.release("b")
        group.join_all()
        for name in "cde":
            group.start(name)
        group.finish()
        launch = group.launch
    assert launch.views[1].point == "00000003-a0001-g0001"
    assert_same_training(launch, unbroken)


def test_the_coordinators_death_costs_no_step(tmp_path, unbroken):
    plans = {"b": Plan(hold=("step_begin", 4))}
    with members(tmp_path, ["a", "b"], plans) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("b") is not None)
        launch.restart_coordinator()
        launch.release("b")
        group.finish()
        assert launch.wait_for_end().ended == "done"
    assert [view.attempt for view in launch.views] == [1, 2]
    assert_same_training(launch, unbroken)


def test_a_stop_that_died_with_the_coordinator_is_asked_for_again_and_saves_every_step(
    tmp_path, unbroken, monkeypatch
):
    plans = {"b": Plan(hold=("step_begin", 4))}
    with members(tmp_path, ["a", "b"], plans) as group:
        launch = group.launch
        driver = Driver(launch, monkeypatch)
        launch.wait_for(lambda: launch.held("b") is not None)
        driver.supervisor.ask_stop()
        driver.until(lambda status: status.attempt == 1 and status.stopping)
        launch.restart_coordinator()
        driver.until(lambda status: status.attempt == 2 and status.stopping)
        launch.release("b")
        group.finish()
        assert driver.ended().ended == "stopped"
    last = launch.last_point()
    assert last.key.step < END, "it was stopped before its end"
    assert {outcome.reason for outcome in launch.outcomes.values()} == {"stopped"}
    expected = [(r.step, r.loss, r.digest) for r in steps_of(unbroken) if r.step <= last.key.step]
    assert [(r.step, r.loss, r.digest) for r in steps_of(launch)] == expected


def steps_of(launch: Launch) -> list[StepRecord]:
    return sorted(launch.records.values(), key=lambda record: record.key)


def test_the_run_ends_although_a_newcomer_waits_while_the_others_finish(tmp_path, unbroken):
    plans = {"a": Plan(hold=("save_part_written", END)), "b": Plan(hold=("save_part_written", END))}
    with members(tmp_path, ["a", "b"], plans) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("a") is not None and launch.held("b") is not None)
        group.start("late")
        launch.wait_for(lambda: "late" in launch.coordinator._launch.waiting)
        launch.release("a")
        launch.release("b")
        group.finish()
        assert launch.wait_for_end().ended == "done"
    assert launch.outcomes["late"].reason == "left"
    assert_same_training(launch, unbroken)


def test_a_member_that_dies_in_the_last_save_makes_the_others_save_again(tmp_path, unbroken):
    with members(tmp_path, ["a", "b", "c"], {"c": Plan(kill=("save_part_written", END))}) as group:
        group.finish()
        launch = group.launch
    assert set(launch.points) == {"00000008-a0001-g0002"}
    assert launch.finished.keys() == {"a", "b"}
    assert_same_training(launch, unbroken)


@pytest.mark.chaos
def test_a_member_that_waits_for_one_that_died_while_forming_is_not_left_out(tmp_path, unbroken):
    # gloo looks for the dead one for 10 s, which is longer than the others' time to come
    plans = {"c": Plan(kill=("step_begin", 4)), "b": Plan(kill_forming=2)}
    settings = dataclasses.replace(SETTINGS, missing_grace_s=3.0)
    with members(tmp_path, ["a", "b", "c"], plans, settings=settings) as group:
        group.finish()
        assert killed(group) == {"b", "c"}
        launch = group.launch
    assert [view.members for view in launch.views[1:]] == [("a", "b"), ("a",)]
    assert "left out" not in {event.kind for event in launch.journal().events}
    assert_same_training(launch, unbroken)


def test_two_generations_fail_before_their_first_step_and_then_a_member_dies_on_its_way_to_the_group(
    tmp_path, unbroken
):
    plans = {"b": Plan(unreachable=2, kill=("connecting", 0))}
    with members(tmp_path, ["a", "b"], plans) as group:
        group.finish()
        assert killed(group) == {"b"}
        launch = group.launch
    # the third was formed to try ports only; nobody waited out a time-out for the dead one
    assert [start.world_size for start in launch.journal().generations] == [2, 2, 2, 2, 1]
    assert_same_training(launch, unbroken)


@pytest.mark.chaos
def test_a_newcomer_that_reaches_the_coordinator_but_not_rank_0_stops_nobody(tmp_path):
    plans = {"a": Plan(hold=("step_begin", 4), hold_again=("step_begin", 8))}
    with members(tmp_path, ["a"], plans, job=tiny_job(train__max_steps=100_000)) as group:
        let_in(group, "b", Plan(unreachable=1), held="a")
        launch = group.launch
        launch.wait_for(lambda: [view.world_size for view in launch.views] == [1, 2, 1])
        launch.wait_for(lambda: launch.held("a") is not None and launch.waits("b"))
        launch.release("a")
        launch.wait_for(lambda: [view.world_size for view in launch.views] == [1, 2, 1, 2])
        launch.request_stop()
        group.finish()
        assert killed(group) == set()
    alone, tried, without, together = launch.views
    assert alone.generation < tried.generation < without.generation < together.generation
    assert without.parent == tried.parent, "the one that was there lost no step"
    assert together.parent.generation == without.generation, "the newcomer had to wait, and is in"


def test_a_save_that_one_rank_cannot_write_is_given_up_and_training_goes_on(tmp_path, unbroken):
    job = tiny_job(resume__every_steps=4)
    with members(tmp_path, ["a", "b", "c"], {"b": Plan(full_disk_at=4)}, job=job) as group:
        group.finish()
        launch = group.launch
        assert any("no space left" in text for text in launch.status().warnings)
    saved = [point.key.step for point in launch.points.values()]
    assert 4 not in saved
    assert saved[-1] == END
    assert len(launch.views) == 1
    assert_same_training(launch, unbroken)


def test_the_last_save_is_tried_again_under_a_new_name(tmp_path, unbroken):
    plans = {"b": Plan(full_disk_at=END)}
    settings = dataclasses.replace(SETTINGS, forming_failures=2)
    with members(tmp_path, ["a", "b"], plans, settings=settings) as group:
        # however often: storage is to blame, and not the network for want of a first step
        group.launch.wait_for(lambda: len(group.launch.views) > 4)
        assert group.launch.status().ended is None
        assert not any(view.probe for view in group.launch.views)
        assert any("given up; it is tried for 300 s more" in asked.reason for _, asked in group.launch.joins)
        group.processes["b"].kill()  # its disk stays full
        group.finish()
        launch = group.launch
    assert_same_training(launch, unbroken)


@pytest.mark.chaos
def test_members_keep_their_records_until_these_are_acknowledged(tmp_path):
    kept = {}
    for acknowledge in (True, False):
        plans = {"a": Plan(kill=("step_begin", 6)), "b": Plan(hold=("step_begin", 4))}
        with members(tmp_path / str(acknowledge), ["a", "b"], plans) as group:
            launch = group.launch
            launch.acknowledge = acknowledge
            launch.wait_for(lambda launch=launch: launch.held("b") is not None)
            launch.wait_for(lambda launch=launch: not launch.acknowledge or launch.acknowledged() == 3)
            launch.release("b")
            group.finish()
        kept[acknowledge] = [
            r.step for r in next(j for n, j in group.launch.joins if n == "b" and j.leaves).records
        ]
    assert kept[False] == [1, 2, 3, 4, 5]
    assert kept[True] == [4, 5]


@pytest.mark.quick("other0-another configuration")
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"config_digest": "another"}, "another configuration"),
        # `auto` looks at machines, so that two may come to different layouts of one configuration
        ({"num_shards": None}, "another number of shards (3) than rank"),
    ],
)
def test_a_member_with_another_configuration_or_layout_is_told_so_and_harms_nobody(
    tmp_path, unbroken, other, told
):
    with members(tmp_path, ["a", "b"], {"b": Plan(hold=("step_begin", 4))}) as group:
        group.launch.wait_for(lambda: group.launch.held("b") is not None)
        group.start("stranger", job=dataclasses.replace(group.job, **other))
        group.launch.wait_for(lambda: group.launch.waits("stranger"))
        group.launch.release("b")
        group.launch.wait_for(lambda: any(told in join.reason for _, join in group.launch.joins))
        group.processes["stranger"].kill()
        group.finish()
        launch = group.launch
    assert_same_training(launch, unbroken)


@pytest.mark.chaos
def test_fast_numerics_survive_a_kill_too(tmp_path, unbroken):
    job = tiny_job(train__numerics="fast")
    plans = {"a": Plan(kill=("step_begin", 4)), "b": Plan(hold=("step_begin", 6))}
    with members(tmp_path, ["a", "b", "c"], plans, job=job) as group:
        let_in(group, "d")
        group.finish()
        launch = group.launch
    losses = [r.loss for r in sorted(launch.records.values(), key=lambda r: r.step)]
    assert losses == pytest.approx([r.loss for r in unbroken.records.values()], rel=1e-3)
