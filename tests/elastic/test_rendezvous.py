"""The rendezvous, rule by rule: what comes in, and what must be decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.elastic.formation import (
    Form,
    Ignored,
    LeaveOut,
    PreviousGeneration,
    Refused,
    RendezvousSettings,
    StopRun,
    Waiting,
)
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.errors import FencedError
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView, JoinRequest
from orchestrator.records.steps import StateKey
from tests.elastic.builders import ATTEMPT, form, key, only, rendezvous, request, started
from tests.raising import raises


def ended(machine: Rendezvous, generation: int) -> bool:
    return machine.control_requests(ATTEMPT, generation, 0).ended


# ---- the first generation
def test_the_first_generation_waits_for_all_that_were_started():
    machine = rendezvous()
    only(machine.tick(0.0), Waiting)
    machine.join(request("b"), 0.0)
    machine.join(request("a"), 1.0)
    waiting = only(machine.tick(59.0), Waiting)
    assert isinstance(waiting, Waiting)
    assert waiting.reason == "2 of 3 expected members have come"
    machine.join(request("c"), 59.5)
    first = form(machine, 59.5)
    assert first.members == ("a", "b", "c")
    assert (first.generation, first.parent, first.source, first.point, first.step) == (1, None, None, None, 0)
    assert first.newcomers == ()


def test_after_the_grace_the_first_generation_is_formed_by_those_that_are_there():
    machine = rendezvous()
    machine.join(request("a"), 5.0)
    only(machine.tick(64.9), Waiting)
    assert form(machine, 65.0).members == ("a",)


def test_the_supervisor_can_lower_what_is_waited_for():
    machine = rendezvous()
    machine.join(request("a"), 0.0)
    machine.expect(1)
    assert form(machine).members == ("a",)


def test_more_than_the_maximum_wait_and_take_a_place_that_gets_free():
    machine = rendezvous(high=2, expected=2)
    for member in "abc":
        machine.join(request(member), 0.0)
    assert form(machine).members == ("a", "b")
    machine.tick(9.0)
    assert not machine.control_requests(ATTEMPT, 1, 0).reform
    machine.dead("a", 10.0)
    machine.join(request("b", key(1, 4), leaves=1), 10.0)
    assert form(machine, 10.0).members == ("b", "c")


def test_a_view_tells_a_member_its_rank_and_the_store_of_rank_0():
    machine = started()
    view = machine.view_for("b")
    assert isinstance(view, GenerationView)
    assert (view.rank, view.world_size, view.members) == (1, 3, ("a", "b", "c"))
    assert (view.host, view.port) == ("host-a", 1000 + ord("a"))
    assert (view.attempt, view.generation, view.launch) == (ATTEMPT, 1, "launch")
    assert machine.view_for("z") is None


# ---- which state
def old(generation: int, step: int) -> StateKey:
    return key(generation, step, attempt=2)


POINT = old(1, 6)
NEWEST = {
    "the greatest step of one generation": ({"a": old(1, 4), "b": old(1, 5)}, None, "b", old(1, 5)),
    "a later generation wins over a greater step": ({"a": old(2, 4), "b": old(1, 5)}, None, "a", old(2, 4)),
    "a point newer than every member": ({"a": old(1, 4), "b": old(1, 5)}, POINT, None, POINT),
    "a member as new as the point": ({"a": old(1, 6), "b": old(1, 5)}, POINT, "a", POINT),
    "a member of a later generation than the point": ({"a": old(2, 5), "b": None}, POINT, "a", old(2, 5)),
    "only a point": ({"a": None, "b": None}, POINT, None, POINT),
    "nothing": ({"a": None, "b": None}, None, None, None),
    "a later attempt wins over generation and step": (
        {"a": key(9, 9, attempt=1), "b": None},
        POINT,
        None,
        POINT,
    ),
}


@pytest.mark.parametrize("case", NEWEST)
def test_the_parent_is_the_newest_state_by_attempt_generation_and_step(case: str):
    held, point, source, parent = NEWEST[case]
    machine = rendezvous(expected=2)
    if point is not None:
        machine.set_newest_point(point, Cursor(consumed_samples=600), point.point_name)
    for member, state in held.items():
        machine.join(request(member, state), 0.0)
    made = form(machine)
    assert (made.parent, made.source) == (parent, source)
    assert made.point == (parent.point_name if parent is not None and source is None else None)
    if source is not None:
        assert made.members[0] == source
        assert made.cursor == Cursor(consumed_samples=made.step)
    elif parent is not None:
        assert made.cursor == Cursor(consumed_samples=600)
    view = machine.view_for("b")
    assert view is not None
    assert view.source_rank == (0 if source else None)


def test_the_source_is_rank_0_and_the_others_keep_their_order():
    machine = started()
    machine.join(request("a", key(1, 4), leaves=1, prepared=key(1, 5)), 1.0)
    machine.join(request("b", key(1, 4), leaves=1, prepared=key(1, 5)), 1.0)
    machine.join(request("c", key(1, 5), leaves=1), 1.0)
    made = form(machine, 1.0)
    assert made.members == ("c", "a", "b")
    assert (made.parent, made.step) == (key(1, 5), 5)


def test_a_point_of_an_older_launch_is_continued_under_a_new_label_by_every_generation_that_starts_from_it():
    machine = rendezvous(expected=1, rebase=lambda parent, cursor: parent.step * 2, first_attempt=ATTEMPT)
    old = key(4, 50, attempt=2)
    machine.set_newest_point(old, Cursor(), old.point_name)
    machine.join(request("a"), 0.0)
    made = form(machine)
    assert (made.parent, made.step) == (old, 100)
    machine.dead("a", 1.0)
    machine.join(request("b"), 2.0)
    assert form(machine, 2.0).step == 100
    machine.join(request("b", key(2, 101), leaves=2), 3.0)
    assert form(machine, 3.0).step == 101


def test_a_point_of_an_older_attempt_of_this_launch_keeps_its_label():
    machine = rendezvous(expected=1, rebase=lambda parent, cursor: 1, first_attempt=2)
    old = key(4, 50, attempt=2)
    machine.set_newest_point(old, Cursor(), old.point_name)
    machine.join(request("a"), 0.0)
    assert form(machine).step == 50


# ---- how a generation ends
def test_a_dead_member_ends_the_generation_and_the_survivors_form_the_next_at_once():
    machine = started()
    assert not ended(machine, 1)
    machine.dead("b", 5.0)
    assert ended(machine, 1)
    machine.join(request("c", key(1, 7), leaves=1), 5.0)
    only(machine.tick(5.0), Waiting)
    machine.join(request("a", key(1, 7), leaves=1), 5.1)
    made = form(machine, 5.1)
    assert made.members == ("a", "c")
    assert made.parent == key(1, 7)


def test_the_first_that_leaves_ends_the_generation_for_all():
    machine = started()
    machine.join(request("c", key(1, 7), leaves=1), 5.0)
    assert ended(machine, 1)


def test_calls_of_generations_that_are_over_or_never_were_are_answered_ended():
    machine = started()
    machine.dead("c", 1.0)
    machine.join(request("a", key(1, 1), leaves=1), 1.0)
    machine.join(request("b", key(1, 1), leaves=1), 1.0)
    form(machine, 1.0)
    assert ended(machine, 1)
    assert not ended(machine, 2)
    assert ended(machine, 77)


@pytest.mark.parametrize(("median", "grace"), [(0.1, 10.0), (20.0, 40.0)])
def test_an_unresponsive_member_is_left_out_after_10_s_or_two_steps(median: float, grace: float):
    machine = started()
    machine.median_step(median)
    machine.join(request("a", key(1, 7), leaves=1), 5.0)
    machine.join(request("b", key(1, 7), leaves=1), 6.0)
    waiting = only(machine.tick(5.0 + grace - 0.1), Waiting)
    assert isinstance(waiting, Waiting)
    assert waiting.reason == "the generation ended; c still to come"
    left_out, made = machine.tick(5.0 + grace)
    assert isinstance(left_out, LeaveOut)
    assert left_out.member == "c"
    assert isinstance(made, Form)
    assert made.formation.members == ("a", "b")
    assert machine.is_gone("c")


def test_a_member_that_could_not_run_and_a_judge_that_could_not_hear_have_as_much_longer():
    machine = started("ab")
    machine.judge_was_late(50.0)
    machine.excuse("b", 50.0)
    machine.join(request("a", key(1, 7), leaves=1), 5.0)
    assert machine.missing == ("b",)
    machine.excuse("b", 7.0)
    machine.excuse("a", 50.0)
    machine.judge_was_late(3.0)
    only(machine.tick(24.9), Waiting)
    left_out, made = machine.tick(25.0)
    assert isinstance(left_out, LeaveOut)
    assert isinstance(made, Form)
    assert machine.missing == ()


def test_a_member_in_a_phase_of_its_own_does_not_count_as_unresponsive():
    machine = started("ab")
    machine.extend_deadline("b", 100.0)
    machine.join(request("a", key(1, 7), leaves=1), 5.0)
    only(machine.tick(99.0), Waiting)
    left_out, _ = machine.tick(100.0)
    assert isinstance(left_out, LeaveOut)


def test_a_member_frozen_one_step_ahead_and_thawed_later_joins_as_any_other():
    machine = started()
    # c has the summary of step 8, the others have only entered it; c freezes
    for member in "ab":
        machine.join(request(member, key(1, 7), leaves=1, prepared=key(1, 8)), 5.0)
    left_out, made = machine.tick(15.0)
    assert isinstance(left_out, LeaveOut)
    assert isinstance(made, Form)
    assert made.formation.parent == key(1, 7)
    machine.formed(2, 15.0)
    machine.applied(2, 9, 20.0)
    # thawed, with the greater step of the older generation: it comes in, as a receiver
    assert machine.join(request("c", key(1, 8), leaves=1), 30.0) is None
    assert not ended(machine, 2)
    machine.tick(30.5)
    assert machine.control_requests(ATTEMPT, 2, 0).reform
    for member in "ab":
        machine.join(request(member, key(2, 12), leaves=2), 31.0)
    again = form(machine, 31.0)
    assert (again.members, again.parent, again.source) == (("a", "b", "c"), key(2, 12), "a")
    assert again.newcomers == ("c",)


def test_a_member_thawed_before_anybody_agreed_without_it_brings_its_step():
    machine = started()
    for member in "ab":
        machine.join(request(member, key(1, 7), leaves=1, prepared=key(1, 8)), 5.0)
    machine.tick(15.0)
    machine.formed(2, 15.0)
    machine.join(request("c", key(1, 8), leaves=1), 16.0)
    for member in "ab":  # generation 2 did not reach its first step: still the old keys, step 8 prepared
        machine.join(request(member, key(1, 7), leaves=2, prepared=key(1, 8)), 25.0)
    made = form(machine, 25.0)
    assert (made.parent, made.source) == (key(1, 8), "c")


def test_two_kills_in_a_row_leave_the_last_one_training():
    machine = started()
    machine.dead("a", 1.0)
    machine.dead("b", 1.05)
    machine.join(request("c", key(1, 7), leaves=1), 1.1)
    made = form(machine, 1.1)
    assert (made.members, made.parent) == (("c",), key(1, 7))


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_kill_while_the_generation_is_journalled_never_begins_it(victim: str):
    machine = started()
    machine.dead("c", 1.0)
    for member in "ab":
        machine.join(request(member, key(1, 7), leaves=1), 1.0)
    only(machine.tick(1.0), Form)
    machine.dead(victim, 1.01)
    assert machine.tick(1.02) == []
    machine.formed(2, 1.05)
    survivor = "b" if victim == "a" else "a"
    assert machine.view_for(survivor) is None
    made = form(machine, 1.05)
    assert (made.generation, made.members, made.parent) == (3, (survivor,), key(1, 7))
    assert machine.view_for(survivor) is not None


def test_a_kill_while_the_group_forms_costs_only_the_dead():
    machine = started()
    machine.dead("c", 1.0)
    for member in "ab":
        machine.join(request(member, key(1, 7), leaves=1), 1.0)
    form(machine, 1.0)
    machine.dead("b", 1.2)
    machine.join(request("a", key(1, 7), leaves=2), 1.3)
    made = form(machine, 1.3)
    assert (made.members, made.parent, made.probe_ports) == (("a",), key(1, 7), False)


def test_when_all_died_the_new_ones_start_together_from_the_newest_point():
    machine = started()
    machine.set_newest_point(key(1, 5), Cursor(consumed_samples=5), "p5")
    for member in "abc":
        machine.dead(member, 1.0)
    machine.join(request("d"), 5.0)
    only(machine.tick(5.0), Waiting)
    machine.join(request("e"), 6.0)
    machine.join(request("f"), 7.0)
    made = form(machine, 7.0)
    assert (made.members, made.parent, made.point) == (("d", "e", "f"), key(1, 5), "p5")


# ---- joiners
def test_joiners_that_come_together_interrupt_once():
    machine = started("a")
    machine.join(request("b"), 10.0)
    machine.tick(10.1)
    assert not machine.control_requests(ATTEMPT, 1, 0).reform
    machine.join(request("c"), 10.15)
    machine.tick(10.3)
    assert not machine.control_requests(ATTEMPT, 1, 0).reform
    assert not machine.control_requests(ATTEMPT, 1, 0).resize
    machine.tick(10.36)
    wanted = machine.control_requests(ATTEMPT, 1, 0)
    assert (wanted.reform, wanted.resize, wanted.save) == (True, True, False), "saved, if it costs no time"
    machine.join(request("a", key(1, 9), leaves=1), 10.4)
    made = form(machine, 10.4)
    assert (made.members, made.newcomers, made.parent) == (("a", "b", "c"), ("b", "c"), key(1, 9))


def test_a_joiner_that_reaches_the_coordinator_but_not_rank_0_is_left_aside_with_doubling_delays():
    machine = started("ab")
    step, now = 5, 10.0
    for delay in (10.0, 20.0, 40.0):
        generation = machine.generation
        machine.applied(generation, step, now)
        machine.join(request("c", node_id="bad"), now)
        machine.tick(now + 0.3)
        assert machine.control_requests(ATTEMPT, generation, 0).reform
        for member in "ab":
            machine.join(request(member, key(generation, step), leaves=generation), now + 0.4)
        with_joiner = form(machine, now + 0.4)
        assert with_joiner.newcomers == ("c",)
        # nobody forms: all come back after the time-out, none is dead
        now += 10.5
        machine.join(request("c", leaves=with_joiner.generation, node_id="bad"), now)
        for member in "ab":
            machine.join(request(member, key(generation, step), leaves=with_joiner.generation), now)
        without = form(machine, now)
        assert without.members == ("a", "b")
        assert without.parent == key(generation, step)
        step += 3
        machine.applied(without.generation, step, now + 1)
        machine.tick(now + delay - 0.1)
        assert not machine.control_requests(ATTEMPT, without.generation, 0).reform, "it has to wait"
        machine.tick(now + delay)
        assert machine.control_requests(ATTEMPT, without.generation, 0).reform
        machine.dead("c", now + delay)  # its replacement has another name and the same bad node
        machine.tick(now + delay + 1)
        now += delay + 1


def test_a_joiner_is_trusted_after_its_first_step():
    machine = started("ab")
    for generation, step in ((1, 5), (3, 9)):
        machine.join(request("c", node_id="slow"), 10.0 * generation)
        now = 10.0 * generation + 1
        for member in "ab":
            machine.join(request(member, key(generation, step), leaves=generation), now)
        assert form(machine, now).newcomers == ("c",)
        machine.applied(generation + 1, step + 1, now)  # it works now: what comes later is nobody's fault
        machine.dead("c", now + 1)
        for member in "ab":
            machine.join(request(member, key(generation + 1, step + 1), leaves=generation + 1), now + 1)
        assert form(machine, now + 1).members == ("a", "b")


def test_who_alone_holds_the_newest_state_is_never_left_aside():
    machine = started("ab")
    machine.join(request("a", None, leaves=1), 1.0)  # blank: it was receiving
    machine.dead("b", 1.0)
    machine.join(request("c", key(1, 9), leaves=1), 1.1)
    made = form(machine, 1.1)
    assert (made.members, made.source, made.newcomers) == (("c", "a"), "c", ("c",))
    machine.join(request("a", None, leaves=2), 11.0)
    machine.join(request("c", key(1, 9), leaves=2), 11.0)
    again = form(machine, 11.0)
    assert again.source == "c"


def test_two_generations_without_anybody_to_blame_make_the_members_try_each_others_ports():
    machine = started("ab")
    machine.applied(1, 4, 1.0)
    made = None
    for generation, probe in ((1, False), (2, False), (3, True)):
        for member in "ab":
            machine.join(request(member, key(1, 4), leaves=generation), 10.0 * generation)
        made = form(machine, 10.0 * generation)
        assert made.probe_ports == probe, generation
    assert made is not None
    machine.applied(made.generation, 5, 50.0)
    for member in "ab":
        machine.join(request(member, key(made.generation, 5), leaves=made.generation), 60.0)
    assert not form(machine, 60.0).probe_ports


def tried(machine: Rendezvous, generation: int, unreached: dict[str, tuple[str, ...]], now: float) -> None:
    """All members of the probing generation come back and say whom they could not reach."""
    for member, names in unreached.items():
        machine.join(request(member, key(1, 4), leaves=generation, unreached=names), now)


def probing(members: str, **states: StateKey) -> Rendezvous:
    """A machine whose generation 4 of `members` is to try the ports: two before it reached no step."""
    machine = started(members, high=len(members))
    machine.applied(1, 4, 1.0)
    for generation in (1, 2, 3):
        for member in members:
            machine.join(request(member, states.get(member, key(1, 4)), leaves=generation), 10.0 * generation)
        made = form(machine, 10.0 * generation)
    assert made.probe_ports
    view = machine.view_for(members[0])
    assert view is not None
    assert view.probe == tuple((f"host-{m}", 1000 + ord(m)) for m in made.members)
    return machine


@pytest.mark.parametrize(
    ("unreached", "together"),
    [
        ({"a": (), "b": (), "c": ()}, "abc"),
        ({"a": ("c",), "b": (), "c": ("a",)}, "ab"),  # who comes first stays
        ({"a": ("b", "c"), "b": ("a",), "c": ("a",)}, "bc"),
        ({"a": (), "b": (), "c": ("b",)}, "ab"),  # one direction is enough
        ({"a": ("b", "c"), "b": ("c",), "c": ()}, "a"),
    ],
)
def test_the_largest_set_in_which_all_reach_all_goes_on(unreached: dict[str, tuple[str, ...]], together: str):
    machine = probing("abc")
    tried(machine, 4, unreached, 31.0)
    made = form(machine, 31.0)
    assert "".join(made.members) == together
    assert not made.probe_ports
    machine.applied(5, 6, 32.0)
    machine.tick(40.9)
    assert not machine.control_requests(ATTEMPT, 5, 0).reform, "who was left out has to wait"
    machine.tick(41.1)
    assert machine.control_requests(ATTEMPT, 5, 0).reform == (together != "abc"), "and is tried again"


def test_the_set_that_goes_on_holds_the_newest_state():
    machine = started("abc", high=3)
    for generation in (1, 2, 3):
        for member in "abc":
            state = key(1, 5 if member == "a" else 4)
            machine.join(request(member, state, leaves=generation), 10.0 * generation)
        form(machine, 10.0 * generation)
    for member, names in {"a": ("b", "c"), "b": (), "c": ()}.items():
        state = key(1, 5 if member == "a" else 4)
        machine.join(request(member, state, leaves=4, unreached=names), 31.0)
    assert form(machine, 31.0).members == ("a",)


def test_survivors_on_the_node_of_a_blamed_newcomer_are_not_left_aside():
    machine = started("abc")
    machine.applied(1, 4, 1.0)
    machine.dead("c", 2.0)
    for member in "ab":
        machine.join(request(member, key(1, 4), leaves=1, node_id="n"), 2.0)
    machine.join(request("d", node_id="n"), 2.0)
    assert form(machine, 2.0).newcomers == ("d",)
    for member in "abd":
        state = None if member == "d" else key(1, 4)
        machine.join(request(member, state, leaves=2, node_id="n"), 3.0)
    assert form(machine, 3.0).members == ("a", "b")


def test_generations_that_come_to_nothing_for_ever_stop_the_run():
    machine = started("ab", settings=RendezvousSettings(forming_failures=4))
    machine.applied(1, 4, 1.0)
    probes = []
    for generation in range(1, 20):
        for member in "ab":
            machine.join(request(member, key(1, 4), leaves=generation), 10.0 * generation)
        (action,) = machine.tick(10.0 * generation)
        if isinstance(action, StopRun):
            break
        assert isinstance(action, Form)
        machine.formed(action.formation.generation, 10.0 * generation)
        probes.append(action.formation.probe_ports)
    assert isinstance(action, StopRun)
    assert "4 generations in a row" in action.reason
    assert action.code == "cluster.group_not_formed"
    assert probes == [False, False, True, False, True, False]
    assert machine.tick(1000.0) == []


def test_generations_whose_members_got_no_cpu_time_to_form_never_stop_the_run():
    machine = started("ab", settings=RendezvousSettings(forming_failures=4))
    machine.applied(1, 4, 1.0)
    for generation in range(1, 20):
        for member in "ab":
            starved = request(member, key(1, 4), leaves=generation, starved=member == "b")
            machine.join(starved, 10.0 * generation)
        form(machine, 10.0 * generation)


# ---- the step that kills
def kill_one(machine: Rendezvous, generation: int, step: int, now: float) -> list[object]:
    """A member of `generation` dies after `step`; the survivor comes, and a new one."""
    name = f"z{generation}"
    machine.dead(name, now)
    machine.join(request("a", key(generation, step), leaves=generation), now)
    machine.join(request(f"z{generation + 1}", node_id="n"), now)
    return list(machine.tick(now))


@pytest.mark.parametrize(("steps", "stops"), [((7, 7, 7), True), ((7, 7, 8), False), ((7, 8, 8), False)])
def test_a_step_that_kills_three_times_in_a_row_stops_the_run(steps: tuple[int, ...], *, stops: bool):
    machine = rendezvous(expected=2)
    machine.join(request("a"), 0.0)
    machine.join(request("z1", node_id="n"), 0.0)
    form(machine)
    for generation, step in enumerate(steps, 1):
        machine.applied(generation, step, generation)
        actions = kill_one(machine, generation, step, float(generation))
        if generation < len(steps) or not stops:
            made = only(actions, Form)
            assert isinstance(made, Form)
            machine.formed(made.formation.generation, generation)
        else:
            stop = only(actions, StopRun)
            assert isinstance(stop, StopRun)
            assert "right after step 7" in stop.reason
            assert stop.code == "training.deadly_step"
            assert ended(machine, generation)


# ---- late and foreign calls
def test_a_join_of_another_launch_is_refused():
    answer = rendezvous().join(request("a", launch="other"), 0.0)
    assert isinstance(answer, Refused)
    assert "launch other" in answer.reason


@pytest.mark.parametrize("wrong", [request("a", leaves=9), request("a", key(9, 4), leaves=1)])
def test_a_join_that_names_a_generation_that_never_was_is_refused(wrong: JoinRequest):
    assert isinstance(started().join(wrong, 0.0), Refused)


def test_a_late_copy_of_an_older_join_changes_nothing():
    machine = started("ab")
    machine.dead("b", 1.0)
    machine.join(request("a", key(1, 4), leaves=1), 1.0)
    form(machine, 1.0)
    answer = machine.join(request("a", key(1, 3), leaves=1, port=7), 2.0)
    assert isinstance(answer, Ignored)
    assert not ended(machine, 2)
    machine.join(request("a", key(2, 5), leaves=2), 3.0)
    assert isinstance(machine.join(request("a", key(1, 3), leaves=1, port=7), 3.1), Ignored)
    assert form(machine, 3.2).parent == key(2, 5)


def test_a_member_whose_answer_was_lost_is_given_it_again():
    machine = started()
    answer = machine.join(request("b"), 1.0)
    assert answer == machine.view_for("b")
    assert not ended(machine, 1)


def test_a_repeated_join_replaces_the_address():
    machine = rendezvous(expected=1)
    machine.join(request("a", port=1), 0.0)
    machine.join(request("a", port=2), 0.1)
    form(machine, 0.2)
    view = machine.view_for("a")
    assert view is not None
    assert view.port == 2


def test_a_member_that_joins_anew_while_its_generation_is_journalled_is_not_answered_with_the_old_address():
    machine = rendezvous(expected=1)
    machine.join(request("a", port=1), 0.0)
    only(machine.tick(0.0), Form)
    machine.join(request("a", port=2), 0.1)
    machine.formed(1, 0.2)
    assert machine.view_for("a") is None
    form(machine, 0.2)
    view = machine.view_for("a")
    assert view is not None
    assert (view.generation, view.port) == (2, 2)


def test_reports_of_other_generations_are_ignored():
    machine = started("ab")
    machine.applied(9, 100, 1.0)
    machine.dead("b", 2.0)
    machine.join(request("a", key(1, 4), leaves=1), 2.0)
    assert form(machine, 2.0).parent == key(1, 4)


# ---- a restarted coordinator
PREVIOUS = PreviousGeneration(attempt=2, generation=5, members=("a", "b"))


def older(member: str, step: int, **other: object) -> JoinRequest:
    return replace(request(member, old(5, step), (2, 5)), **other)  # type: ignore[arg-type]


@pytest.mark.parametrize("previous", [PREVIOUS, None])
def test_a_restarted_coordinator_has_the_members_meet_at_a_step_boundary(previous: PreviousGeneration | None):
    machine = rendezvous(expected=2, previous=previous)
    wanted = machine.control_requests(2, 5, 40)
    assert (wanted.ended, wanted.reform, wanted.save, wanted.stop) == (False, True, False, False)
    assert not wanted.resize, "all who train stay"
    assert wanted.acknowledged_step == 40
    machine.join(older("b", 41), 1.0)
    assert machine.control_requests(2, 5, 40).ended
    only(machine.tick(1.0), Waiting)
    machine.join(older("a", 41), 1.1)
    made = form(machine, 1.1)
    assert (made.attempt, made.generation, made.parent) == (ATTEMPT, 1, key(5, 41, attempt=2))
    assert made.members == ("a", "b")
    assert machine.control_requests(2, 5, 40).ended


def test_a_restarted_coordinator_does_not_wait_for_a_member_that_died_meanwhile():
    machine = rendezvous(expected=2, previous=PREVIOUS)
    machine.dead("a", 1.0)
    machine.join(older("b", 41), 1.0)
    assert form(machine, 1.0).members == ("b",)


def test_a_newcomer_does_not_cut_short_the_step_of_the_generation_that_trains_on():
    machine = rendezvous(expected=3, previous=PREVIOUS)
    machine.join(request("z"), 0.0)
    assert machine.tick(30.0) == []
    assert not machine.control_requests(2, 5, 0).ended
    machine.join(older("a", 41), 40.0)
    machine.join(older("b", 41), 41.0)
    made = form(machine, 41.0)
    assert (made.members, made.newcomers) == (("a", "b", "z"), ("z",))


def test_a_generation_of_an_older_attempt_that_nobody_comes_from_is_given_up():
    machine = rendezvous(expected=1, previous=PREVIOUS)
    machine.join(request("z"), 0.0)
    assert not machine.control_requests(2, 5, 0).ended
    (waiting,) = machine.tick(60.0)
    assert isinstance(waiting, Waiting)
    assert machine.control_requests(2, 5, 0).ended, "who trains on hears of it"
    machine.extend_deadline("b", 100.0)
    left_out = [a.member for a in machine.tick(71.0) if isinstance(a, LeaveOut)]
    assert left_out == ["a"], "b is in a long step, and says so"
    *left_out, made = machine.tick(101.0)
    assert [a.member for a in left_out if isinstance(a, LeaveOut)] == ["b"]
    assert isinstance(made, Form)
    assert made.formation.members == ("z",)


def test_survivors_of_an_older_attempt_hear_that_their_generation_is_over_if_somebody_of_it_has_died():
    machine = rendezvous(expected=2, previous=replace(PREVIOUS, members=("a",), ended=True))
    assert machine.control_requests(2, 5, 0).ended


def test_members_that_never_heard_of_the_last_journalled_generation_are_taken_as_they_come():
    machine = rendezvous(expected=2, previous=PREVIOUS)
    for member in "ab":
        assert machine.join(older(member, 41, key=old(4, 41), leaves=(2, 4)), 1.0) is None
    assert form(machine, 1.0).parent == old(4, 41)


def test_a_member_of_a_newer_attempt_fences_the_coordinator():
    machine = started()
    with raises(FencedError, "run.fenced", "attempt 4", "attempt 3"):
        machine.join(request("z", key(1, 1, attempt=4)), 0.0)
    with raises(FencedError, "run.fenced", "attempt 4"):
        machine.control_requests(4, 1, 0)


def test_generations_whose_last_save_is_given_up_have_not_failed_to_start():
    machine = started("ab")
    machine.applied(1, 9, 1.0)
    for generation in range(1, 50):
        # b came first, and only rank 0 knows why
        machine.join(request("b", key(generation, 9), leaves=generation), 2.0 * generation)
        machine.join(request("a", key(generation, 9), leaves=generation, unsaved=True), 2.0 * generation)
        made = form(machine, 2.0 * generation)
        assert (made.members, made.parent, made.probe_ports) == (("a", "b"), key(generation, 9), False)


# ---- the minimum
def test_below_the_minimum_the_survivors_save_before_they_wait():
    machine = started("ab", low=2)
    machine.set_newest_point(key(1, 3), Cursor(), "p3")
    machine.dead("b", 5.0)
    machine.join(request("a", key(1, 7), leaves=1), 5.0)
    made = form(machine, 5.0)
    assert made.save_only
    assert made.members == ("a",)
    wanted = machine.control_requests(ATTEMPT, 2, 0)
    assert wanted.save
    assert wanted.reform
    assert machine.below_minimum_since == 5.0
    machine.join(request("a", key(2, 8), leaves=2), 6.0)
    machine.set_newest_point(key(2, 8), Cursor(), "p8")
    waiting = only(machine.tick(6.0), Waiting)
    assert isinstance(waiting, Waiting)
    assert waiting == Waiting(reason="1 of at least 2 members are there", since=5.0, needed=2, there=1)
    machine.join(request("c"), 9.0)
    again = form(machine, 9.0)
    assert (again.members, again.save_only, again.parent) == (("a", "c"), False, key(2, 8))
    assert machine.below_minimum_since is None


def test_a_save_below_the_minimum_that_was_given_up_is_made_again_when_it_is_asked_for():
    machine = started("ab", low=2)
    machine.dead("b", 5.0)
    machine.join(request("a", key(1, 7), leaves=1), 5.0)
    assert form(machine, 5.0).save_only
    machine.join(request("a", key(2, 8), leaves=2), 6.0)
    only(machine.tick(6.0), Waiting)
    machine.request_save("again")
    made = form(machine, 11.0)
    assert (made.save_only, made.parent) == (True, key(2, 8))
    machine.save_answered("again")
    machine.join(request("a", key(3, 9), leaves=3), 12.0)
    only(machine.tick(12.0), Waiting)
    assert machine.below_minimum_since == 5.0


def test_nothing_is_saved_twice_below_the_minimum():
    machine = started("ab", low=2)
    machine.dead("b", 5.0)
    machine.set_newest_point(key(1, 7), Cursor(), "p7")
    machine.join(request("a", key(1, 7), leaves=1), 5.0)
    only(machine.tick(5.0), Waiting)


def test_below_the_minimum_is_counted_from_the_first_tick_without_members():
    machine = rendezvous(low=2)
    machine.tick(3.0)
    machine.tick(9.0)
    assert machine.below_minimum_since == 3.0
    machine.join(request("a"), 10.0)
    only(machine.tick(70.0), Waiting)
    assert machine.below_minimum_since == 3.0


# ---- control requests
def test_a_stop_is_repeated_to_the_next_generation_and_lets_no_newcomer_in():
    machine = started("ab")
    machine.request_stop()
    assert machine.control_requests(ATTEMPT, 1, 0).stop
    machine.join(request("c"), 1.0)
    machine.tick(5.0)
    assert not machine.control_requests(ATTEMPT, 1, 0).reform
    machine.dead("b", 6.0)
    machine.join(request("a", key(1, 4), leaves=1), 6.0)
    assert form(machine, 6.0).members == ("a",)
    assert machine.control_requests(ATTEMPT, 2, 0).stop


def test_a_stop_with_nobody_left_to_save_ends_the_run():
    machine = started("a")
    machine.request_stop()
    machine.dead("a", 1.0)
    stop = only(machine.tick(1.0), StopRun)
    assert isinstance(stop, StopRun)
    assert (stop.outcome, stop.code) == ("failed", "training.unsaved")


def test_a_stop_before_anybody_has_trained_is_a_stop_and_no_failure():
    machine = rendezvous()
    machine.join(request("a"), 0.0)
    machine.request_stop()
    stop = only(machine.tick(1.0), StopRun)
    assert isinstance(stop, StopRun)
    assert (stop.outcome, stop.code) == ("stopped", None)
    assert "before the first step" in stop.reason


def test_a_save_is_requested_until_it_is_answered_and_only_once():
    machine = started()
    machine.request_save("s1")
    assert machine.control_requests(ATTEMPT, 1, 0).save
    machine.save_answered("s1")
    assert not machine.control_requests(ATTEMPT, 1, 0).save
    machine.request_save("s1")
    assert not machine.control_requests(ATTEMPT, 1, 0).save
    machine.request_save("s2")
    machine.save_answered("s1")
    assert machine.control_requests(ATTEMPT, 1, 0).save


def test_a_save_that_a_reform_does_not_need_comes_after_it():
    machine = started("ab")
    machine.request_save("s1")
    machine.join(request("c"), 5.0)
    machine.tick(5.5)
    wanted = machine.control_requests(ATTEMPT, 1, 0)
    assert (wanted.save, wanted.reform) == (False, True), "c would wait until nobody holds a save"
    for member in "ab":
        machine.join(request(member, key(1, 7), leaves=1), 6.0)
    form(machine, 6.0)
    wanted = machine.control_requests(ATTEMPT, 2, 0)
    assert (wanted.save, wanted.reform) == (True, False)


def test_a_member_that_finishes_ends_the_generation_and_the_others_have_their_time_to_come():
    machine = started("ab")
    machine.left("a", key(1, 10), 5.0)
    assert ended(machine, 1)
    machine.dead("b", 6.0)
    machine.join(request("c"), 7.0)
    machine.expect(1)
    assert form(machine, 7.0).members == ("c",)


def test_a_member_that_goes_away_alone_ends_the_generation():
    machine = started("ab")
    machine.left("a", key(1, 10), 5.0)
    machine.join(request("b", key(1, 10), leaves=1), 5.0)
    assert form(machine, 5.0).members == ("b",)


def test_a_stop_below_the_minimum_saves_what_is_unsaved_and_then_ends_at_once():
    machine = started("ab", low=2)
    machine.applied(1, 10, 1.0)
    machine.dead("b", 5.0)
    machine.join(request("a", key(1, 10), leaves=1), 5.0)
    assert form(machine, 5.0).save_only
    machine.set_newest_point(key(2, 11), Cursor(), "p")
    machine.join(request("a", key(2, 11), leaves=2), 8.0)
    assert isinstance(machine.tick(8.0)[-1], Waiting)
    machine.request_stop()
    (stop,) = machine.tick(9.0)
    assert isinstance(stop, StopRun)
    assert (stop.outcome, stop.reason) == ("stopped", "stopped at step 11")


def test_a_stop_below_the_minimum_whose_save_was_given_up_saves_again():
    machine = started("ab", low=2)
    machine.applied(1, 10, 1.0)
    machine.dead("b", 5.0)
    machine.join(request("a", key(1, 10), leaves=1), 5.0)
    assert form(machine, 5.0).save_only
    machine.request_stop()
    machine.join(request("a", key(2, 11), leaves=2), 8.0)
    assert form(machine, 8.0).save_only
    assert machine.control_requests(ATTEMPT, 3, 0).stop


# ---- copies
def test_a_copy_is_independent_and_equal_until_something_happens_to_one():
    machine = started()
    twin = machine.copy()
    assert twin.snapshot() == machine.snapshot()
    twin.dead("a", 1.0)
    assert twin.snapshot() != machine.snapshot()
    assert not ended(machine, 1)
