"""A host loses power: its process stands still for ever and closes no connection. The others go on in their
processes as soon as it is said to be dead, and the end is that of the unbroken run.
"""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from orchestrator.coordinator.machine import launch_history
from orchestrator.records.run_status import MemberInfo
from tests.trainer.kills import assert_same_training, killed, let_in
from tests.trainer.launch import WAIT_S, Launch
from tests.trainer.member import Members, Plan, members, run_to_end, tiny_job

pytestmark = pytest.mark.xdist_group("forked")

# no collective's own time-out ends within a test: who goes on was called off
PATIENT = dataclasses.replace(tiny_job(), collective_limit_s=10 * WAIT_S)
# a step that is like those before it is given up soon
SHORT = dataclasses.replace(tiny_job(), collective_limit_s=0.5)


@pytest.fixture(autouse=True)
def dead_are_asked_for_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lives is asked after half a second in which nobody was heard of."""
    monkeypatch.setattr(launch_history, "SILENCE_S", 0.5)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("unbroken"), 1)


def freeze(group: Members, name: str) -> None:
    """The process of a member that is held stops, and no connection of it closes."""
    group.launch.wait_for(lambda: group.launch.held(name) is not None)
    pid = group.processes[name].pid
    assert pid is not None, f"{name} was started"
    os.kill(pid, signal.SIGSTOP)


def lose_power(group: Members, name: str) -> None:
    """Its host is gone, and after a while Ray says so."""
    freeze(group, name)
    group.launch.declare_dead(name)


def finish_without(group: Members, *lost: str) -> None:
    """The others come to their end, and none of them was given up."""
    others = group.processes.keys() - set(lost)
    group.launch.wait_for(lambda: others <= group.launch.outcomes.keys())
    for name in lost:
        group.processes[name].kill()
    group.finish()
    assert killed(group) == set(lost)


def given_up(launch: Launch) -> set[object]:
    return {event.fields["member"] for event in launch.journal().events if event.kind == "left out"}


@pytest.mark.parametrize("victim", ["a", "c"])
@pytest.mark.parametrize("place", ["step_begin", "gradient_done", "save_part_written"])
@pytest.mark.quick("step_begin-a")
def test_a_host_that_loses_power_costs_no_step_and_nobody_else(tmp_path, unbroken, victim, place):
    # after a save the others wait longest for each other: a quarter of an hour
    job = dataclasses.replace(PATIENT, resume=tiny_job(resume__every_steps=4).resume)
    with members(tmp_path, ["a", "b", "c"], {victim: Plan(hold=(place, 4))}, job=job) as group:
        lose_power(group, victim)
        finish_without(group, victim)
        launch = group.launch
    assert given_up(launch) == set()
    assert [view.world_size for view in launch.views] == [3, 2]
    assert launch.views[1].source_rank == 0, "the survivors' own state went on"
    assert_same_training(launch, unbroken)


def test_the_sums_of_fast_numerics_are_called_off_too(tmp_path, unbroken):
    job = dataclasses.replace(PATIENT, train=tiny_job(train__numerics="fast").train)
    with members(tmp_path, ["a", "b", "c"], {"b": Plan(hold=("step_begin", 4))}, job=job) as group:
        lose_power(group, "b")
        finish_without(group, "b")
        launch = group.launch
    assert given_up(launch) == set()
    assert [view.step for view in launch.views] == [0, 3], "no finished step was lost"
    losses = [r.loss for r in sorted(launch.records.values(), key=lambda r: r.step)]
    assert losses == pytest.approx([r.loss for r in unbroken.records.values()], rel=1e-3)


@pytest.mark.quick("receiver")
@pytest.mark.parametrize(
    ("victim", "place"), [("a", "state_half_sent"), ("c", "state_half_received")], ids=["source", "receiver"]
)
def test_half_a_state_is_not_used_when_power_is_lost_while_it_is_copied(tmp_path, unbroken, victim, place):
    plans = {"b": Plan(hold=("step_begin", 4)), victim: Plan(hold=(place, 4))}
    with members(tmp_path, ["a", "b"], plans, job=PATIENT) as group:
        let_in(group, "c", plans.get("c"))
        lose_power(group, victim)
        finish_without(group, victim)
        launch = group.launch
    assert given_up(launch) == set()
    blank = [join.key for name, join in launch.joins if name == "c"]
    assert blank == [None] * len(blank), "what came of the half was never called a state"
    assert_same_training(launch, unbroken)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("step", "job"),
    [
        # a first step: nobody knows how long it takes, and no median says so
        (1, PATIENT),
        # one in which a peer may compile (there is nothing to compile here), though steps are short
        (5, dataclasses.replace(SHORT, train=tiny_job().train.model_copy(update={"compile": "blocks"}))),
    ],
    ids=["first", "compiling"],
)
def test_who_still_computes_when_the_generation_ends_is_waited_for_and_who_is_frozen_is_not(
    tmp_path, unbroken, step, job
):
    plans = {name: Plan(hold=("step_begin", step)) for name in "bcd"}
    with members(tmp_path, ["a", "b", "c", "d"], plans, job=job) as group:
        launch = group.launch
        launch.wait_for(lambda: launch.held("b") is not None)
        freeze(group, "d")
        lose_power(group, "c")
        left_out = wait_for_left_out(launch)
        launch.release("b")
        finish_without(group, "c", "d")
    assert [info.member for info in left_out] == ["d"]
    assert given_up(launch) == {"d"}
    assert_same_training(launch, unbroken)


def wait_for_left_out(launch: Launch) -> tuple[MemberInfo, ...]:
    """The first that are given up, all at once."""
    status = launch.status()
    while not status.left_out:
        status = launch.run(launch.coordinator.status((status.attempt, status.version), 1.0))
    return status.left_out
