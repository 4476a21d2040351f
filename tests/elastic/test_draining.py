"""Nodes that are about to be taken away: what the group does, and that nothing is lost by leaving them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.elastic.drain import (
    HOLD_LIMIT_S,
    DrainCourse,
    Draining,
    GroupPlacement,
    SaveTimes,
    choose,
    fits,
    time_to_leave_s,
)
from orchestrator.elastic.formation import Waiting
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, JoinRequest, Source
from orchestrator.records.steps import StateKey
from tests.elastic.builders import ATTEMPT, form, key, only, rendezvous, request

# ---- what to do
COURSES = {
    "the others hold everything": (30.0, 5.0, False, True, DrainCourse.LEAVE),
    "a part of the state is theirs, and a save fits": (30.0, 5.0, True, True, DrainCourse.SAVE_AND_LEAVE),
    "no save was measured yet": (30.0, None, True, True, DrainCourse.SAVE_AND_LEAVE),
    "a save does not fit": (30.0, 50.0, True, True, DrainCourse.SAVE),
    "a save does not fit, and none is needed": (30.0, 50.0, False, True, DrainCourse.LEAVE),
    "nobody says when": (math.inf, 50.0, True, True, DrainCourse.SAVE_AND_LEAVE),
    "the run needs them, and there is time": (3600.0, 5.0, True, False, DrainCourse.STAY),
    "the run needs them, and time is up": (20.0, 5.0, True, False, DrainCourse.SAVE_AND_LEAVE),
    "the run needs them, and nobody knows what a save takes": (
        3600.0,
        None,
        True,
        False,
        DrainCourse.SAVE_AND_LEAVE,
    ),
    "the run needs them, and nobody says when": (math.inf, None, True, False, DrainCourse.STAY),
}


@pytest.mark.parametrize("case", COURSES)
def test_what_a_group_does_about_a_node_that_goes(case: str):
    grace_s, save_s, needs_save, enough, course = COURSES[case]
    found = choose(grace_s=grace_s, save_s=save_s, step_s=0.5, needs_save=needs_save, enough_elsewhere=enough)
    assert found is course


@given(st.floats(0, 1e4), st.none() | st.floats(0, 1e3), st.floats(0, 100), st.booleans(), st.booleans())
def test_a_save_is_waited_for_only_where_it_fits_and_nobody_leaves_without_one_that_is_needed(
    grace_s: float, save_s: float | None, step_s: float, needs_save: bool, enough: bool
):
    course = choose(
        grace_s=grace_s, save_s=save_s, step_s=step_s, needs_save=needs_save, enough_elsewhere=enough
    )
    if course is DrainCourse.SAVE_AND_LEAVE:
        assert save_s is None or time_to_leave_s(save_s, step_s) <= grace_s
    assert needs_save or course in (DrainCourse.LEAVE, DrainCourse.STAY)
    assert not (needs_save and course is DrainCourse.LEAVE)
    if course is DrainCourse.STAY:
        assert fits(grace_s, save_s, step_s), "who waits must still be able to save"


def test_a_save_is_taken_to_last_half_as_long_again_as_the_slowest_of_the_last_three():
    times = SaveTimes()
    assert times.estimate_s is None
    for seconds in (40.0, 2.0, 4.0, 3.0):
        times.took(seconds)
    assert times.estimate_s == 6.0


LEAVES = GroupPlacement(leaving=("n-c", "n-c"), num_elsewhere=2)


def test_a_course_is_taken_once_and_training_never_waits_beyond_the_deadline():
    draining = Draining(sharded=True, min_workers=1)
    draining.noticed("n-c", 1030.0)
    decided = draining.decide(LEAVES, 5.0, 0.1, 1000.0)
    assert decided is not None
    assert (decided.course, decided.nodes, decided.grace_s) == (DrainCourse.SAVE_AND_LEAVE, ("n-c",), 30.0)
    assert draining.decide(LEAVES, 5.0, 0.1, 1010.0) is None
    assert [draining.is_late(now) for now in (1029.0, 1030.0)] == [False, True]


def test_a_save_that_nobody_needs_is_in_time_or_is_not_asked_for() -> None:
    draining = Draining(sharded=False, min_workers=1)
    draining.noticed("n-c", 1030.0)
    draining.noticed("n-d", 1010.0)
    decided = draining.decide(GroupPlacement(leaving=("n-c", "n-c"), num_elsewhere=2), 5.0, 0.1, 1000.0)
    assert decided is not None
    assert decided.course is DrainCourse.LEAVE
    assert [draining.in_time(save_s, 0.1, 1000.0) for save_s in (None, 27.0, 28.0)] == [True, True, False]
    machine = three()
    for in_time in (False, True):
        machine.leave(False, in_time)
        machine.tick(1.0)
        wanted = machine.control_requests(ATTEMPT, 1, 0)
        assert (wanted.reform, wanted.save, wanted.resize) == (True, False, in_time)
    machine.stay()
    assert not machine.control_requests(ATTEMPT, 1, 0).save


def test_without_a_deadline_a_storage_that_stands_still_holds_training_up_for_two_minutes():
    draining = Draining(sharded=True, min_workers=1)
    draining.noticed("n-c", math.inf)
    draining.decide(LEAVES, None, 0.1, 1000.0)
    assert [draining.is_late(1000.0 + s) for s in (HOLD_LIMIT_S, HOLD_LIMIT_S + 0.2)] == [False, True]


def test_a_save_that_fails_is_tried_again_ever_later_and_at_once_for_the_next_node():
    draining = Draining(sharded=True, min_workers=1)
    draining.noticed("n-c", math.inf)
    tried = []
    for now in range(100):
        if draining.decide(LEAVES, 1.0, 0.1, float(now)) is not None:
            tried.append(now)
            assert draining.failed(float(now))
    assert tried == [0, 5, 15, 35, 75]
    assert draining.decide(GroupPlacement(leaving=(), num_elsewhere=2), 1.0, 0.1, 100.0) is None
    assert draining.decide(LEAVES, 1.0, 0.1, 101.0) is not None


def test_who_stays_for_want_of_others_leaves_when_they_come():
    draining = Draining(sharded=False, min_workers=2)
    draining.noticed("n-c", 5000.0)
    few = GroupPlacement(leaving=("n-c",), num_elsewhere=1)
    found = [draining.decide(few, 1.0, 0.1, now) for now in (0.0, 1.0)]
    assert [each and each.course for each in found] == [DrainCourse.STAY, None]
    enough = draining.decide(GroupPlacement(leaving=("n-c",), num_elsewhere=2), 1.0, 0.1, 2.0)
    assert enough is not None
    assert enough.course is DrainCourse.LEAVE


# ---- who forms the next generation
def shard(number: int, at: StateKey, of: int = 3, source: Source = Source.LIVE) -> HeldShard:
    return HeldShard(key=at, shard=number, num_shards=of, source=source, cursor=Cursor())


def comes(member: str, at: StateKey, leaves: int, sharded: bool = True, **other: object) -> JoinRequest:
    held = (shard("abc".index(member), at),) if sharded else ()
    return request(member, at, leaves=leaves, holdings=held, **other)


def three(low: int = 1) -> Rendezvous:
    """a, b and c train; the node of c drains."""
    machine = rendezvous(low=low)
    for member in "abc":
        machine.join(request(member), 0.0)
    form(machine)
    machine.drain(["n-c"])
    return machine


def asked(machine: Rendezvous, generation: int) -> tuple[bool, bool]:
    machine.tick(1.0)
    wanted = machine.control_requests(ATTEMPT, generation, 0)
    return wanted.save, wanted.reform


def test_a_node_that_goes_is_left_at_once_where_the_others_hold_the_whole_state():
    machine = three()
    assert asked(machine, 1) == (False, False), "until somebody says so"
    machine.leave(save=False)
    assert asked(machine, 1) == (False, True)
    for member in "abc":
        machine.join(comes(member, key(1, 7), 1, sharded=False), 1.0)
    made = form(machine, 1.0)
    assert (made.members, made.parent, made.source) == (("a", "b"), key(1, 7), "a")
    assert machine.may_go == ("c",)


def test_a_node_with_a_part_of_the_state_is_left_when_the_point_of_that_step_is_committed():
    machine = three()
    machine.leave(save=True)
    assert asked(machine, 1) == (True, True)
    for member in "abc":
        machine.join(comes(member, key(1, 7), 1, saving=key(1, 7)), 1.0)
    for now in (1.0, 100.0):
        waiting = only(machine.tick(now), Waiting)
        assert isinstance(waiting, Waiting)
        assert "is waited for" in waiting.reason
    assert machine.may_go == ()
    machine.save_decided(key(1, 7))
    machine.set_newest_point(key(1, 7), Cursor(), "p7")
    made = form(machine, 101.0)
    assert (made.members, made.parent, made.point, made.step) == (("a", "b"), key(1, 7), "p7", 7)
    assert machine.may_go == ("c",)


def test_where_the_save_was_given_up_all_go_on_together_from_the_same_step():
    machine = three()
    machine.leave(save=True)
    for member in "abc":
        machine.join(comes(member, key(1, 7), 1, saving=key(1, 7)), 1.0)
    only(machine.tick(1.0), Waiting)
    machine.save_decided(key(1, 7))
    machine.stay()
    made = form(machine, 2.0)
    assert (made.members, made.parent, made.step) == (("a", "b", "c"), key(1, 7), 7)
    assert machine.may_go == ()
    assert asked(machine, 2) == (False, False)


@pytest.mark.parametrize("known", [True, False])
def test_where_no_save_of_the_step_was_begun_all_go_on_and_save_the_next(known: bool):
    machine = three()
    machine.leave(save=known)
    for member in "abc":
        machine.join(comes(member, key(1, 7), 1), 1.0)
    assert form(machine, 1.0).members == ("a", "b", "c")
    machine.leave(save=known)  # as with each tick
    assert asked(machine, 2) == (True, True)


def test_a_copy_of_the_leaving_shard_on_another_node_is_as_good_as_a_point():
    machine = three()
    machine.leave(save=True)
    at = key(1, 7)
    machine.join(comes("a", at, 1, saving=at), 1.0)
    b = comes("b", at, 1, saving=at)
    machine.join(replace(b, holdings=(*b.holdings, shard(2, at, source=Source.NEIGHBOUR))), 1.0)
    machine.join(comes("c", at, 1, saving=at), 1.0)
    made = form(machine, 1.0)
    assert (made.members, made.parent, made.source) == (("a", "b"), at, "a")
    assert machine.may_go == (), "its vote is not answered"
    machine.save_decided(at)
    assert machine.may_go == ("c",)


def test_where_all_nodes_go_the_state_is_saved_and_then_nobody_is_kept():
    machine = three()
    machine.drain(["n-a", "n-b", "n-c"])
    machine.leave(save=True)
    assert asked(machine, 1) == (True, True)
    for member in "abc":
        machine.join(comes(member, key(1, 7), 1, sharded=False, saving=key(1, 7)), 1.0)
    only(machine.tick(1.0), Waiting)
    machine.save_decided(key(1, 7))
    machine.set_newest_point(key(1, 7), Cursor(), "p7")
    only(machine.tick(2.0), Waiting)
    assert machine.may_go == ("a", "b", "c")
    for member in "abc":
        machine.left(member, None, 2.0)
    machine.join(request("d"), 3.0)
    machine.expect(1)
    made = form(machine, 3.0)
    assert (made.members, made.point, made.step) == (("d",), "p7", 7)


def test_nobody_is_taken_in_from_a_node_that_goes():
    machine = rendezvous(expected=2)
    machine.drain(["n-c"])
    machine.join(request("c"), 0.0)
    assert machine.may_go == ("c",)
    machine.left("c", None, 0.0)
    for member in "ab":
        machine.join(request(member), 0.0)
    assert form(machine).members == ("a", "b")
    machine.join(request("c"), 1.0)
    machine.tick(20.0)
    assert not machine.control_requests(ATTEMPT, 1, 0).reform
    assert machine.may_go == ("c",)


@given(st.data())
def test_leaving_never_takes_the_group_back(data: st.DataObject):
    """Whoever holds whatever, and whichever point there is: with leaving the next generation continues what
    it would have continued without.
    """
    at = [key(1, step) for step in (5, 6, 7)]
    joins = []
    for member in "abc":
        own = data.draw(st.sampled_from(at), f"{member} trains")
        copies = data.draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(at)), max_size=3))
        held = (shard("abc".index(member), own), *(shard(n, k, source=Source.STAGED) for n, k in copies))
        saving = data.draw(st.none() | st.just(own), "saving")
        joins.append(request(member, own, leaves=1, holdings=held, saving=saving))
    point = data.draw(st.none() | st.sampled_from(at), "point")
    calm, leaving = three(), three()
    leaving.drain(data.draw(st.sets(st.sampled_from(["n-a", "n-b", "n-c"])), "drain"))
    leaving.leave(save=data.draw(st.booleans()))
    for machine in (calm, leaving):
        machine.set_newest_point(point, Cursor(), "p")
        for join in joins:
            machine.join(join, 1.0)
    expected = form(calm, 1.0)
    decided = leaving.tick(1.0)
    if not isinstance(decided[-1], Waiting):
        assert decided[-1].formation.parent == expected.parent
    elif "is waited for" in decided[-1].reason:
        leaving.save_decided(at[-1])
        leaving.stay()
        assert form(leaving, 2.0).parent == expected.parent
    else:
        assert expected.parent == point, "nobody is left, so the point has it all"
