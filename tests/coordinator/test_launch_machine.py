"""What the launch machine says of one member; whole histories are searched in `test_launch_search`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from orchestrator.checkpoint.commit.commit_events import VoterGone
from orchestrator.checkpoint.points.points import ReplicasDiffer
from orchestrator.coordinator.coordinator_start import plug_ins
from orchestrator.coordinator.machine.launch_actions import Action, Answer, End, Kill, Leave, Note, Say, Warn
from orchestrator.coordinator.machine.launch_machine import LaunchMachine, LaunchTerms
from orchestrator.elastic.failure import FailureBudget, StorageOutage
from orchestrator.elastic.formation import Form, GroupSize
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW, Request
from orchestrator.planning.schedule import Budgets, Length
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, RunOver, Source
from orchestrator.records.steps import StateKey
from tests.checkpoint.samples import key, record
from tests.coordinator.builders import JOIN, LAUNCH


def test_a_member_that_is_left_out_will_not_vote_and_may_still_be_writing() -> None:
    rendezvous = Rendezvous(
        attempt=1, launch=LAUNCH, size=GroupSize(min_workers=1, max_workers=2, expected=2)
    )
    machine = LaunchMachine(rendezvous, FailureBudget(3), StorageOutage())
    for member in "ab":
        machine.join(replace(JOIN, member=member), 0.0)
    (form,) = machine.tick(0.0)
    assert isinstance(form, Form)
    machine.formed(form.formation, 0.0)
    state = StateKey(attempt=1, generation=1, step=1)
    machine.join(replace(JOIN, member="a", key=state, leaves=(1, 1), cursor=Cursor()), 1.0)
    actions = machine.tick(1000.0)
    assert [action.member.member for action in actions if isinstance(action, Kill)] == ["b"]
    rank = form.formation.members.index("b")
    assert VoterGone(generation=1, rank=rank, saving=None, writing=True) in actions


def test_a_death_is_reported_for_the_older_generation_too_from_which_a_vote_is_owed() -> None:
    machine = one_of_two()
    saved = key(1)
    came = replace(JOIN, key=saved, leaves=(1, 1), cursor=Cursor())
    joined = [
        machine.join(replace(came, member="a"), 2.0),
        machine.join(replace(came, member="b", saving=saved), 2.0),
    ]
    assert [departures(actions) for actions in joined] == [
        [VoterGone(generation=1, rank=0)],
        [VoterGone(generation=1, rank=1, saving=saved)],
    ]
    form_next(machine, 2.0)
    assert departures(machine.dead("b", "killed", 3.0)) == [
        VoterGone(generation=1, rank=1),
        VoterGone(generation=2, rank=1),
    ]


def departures(actions: list[Action]) -> list[VoterGone]:
    return [action for action in actions if isinstance(action, VoterGone)]


def one_of_two(
    budgets: Budgets | None = None, trained: bool = True, plug_ins: tuple[str, ...] = ()
) -> LaunchMachine:
    """Two members train with at least two, and have done a step (if `trained`)."""
    rendezvous = Rendezvous(attempt=1, launch=LAUNCH, size=GroupSize.fixed(2))
    terms = LaunchTerms(budgets=budgets or Budgets(), plug_ins=plug_ins)
    machine = LaunchMachine(rendezvous, FailureBudget(3), StorageOutage(), terms)
    for member in "ab":
        machine.join(replace(JOIN, member=member), 0.0)
    form_next(machine, 0.0)
    if trained:
        machine.recorded(record(key(1)), 1.0)
    return machine


def form_next(machine: LaunchMachine, now: float) -> None:
    (form,) = [action for action in machine.tick(now) if isinstance(action, Form)]
    machine.formed(form.formation, now)


def notes(actions: list[Action], kind: EventKind) -> list[dict[str, object]]:
    return [action.fields for action in actions if isinstance(action, Note) and action.kind == kind]


def fixed(*members: str) -> LaunchMachine:
    """A group of two that can replace nobody, of which these have joined."""
    rendezvous = Rendezvous(attempt=1, launch=LAUNCH, size=GroupSize.fixed(2))
    machine = LaunchMachine(rendezvous, FailureBudget(3), StorageOutage(), LaunchTerms(fixed=True))
    for member in members:
        machine.join(replace(JOIN, member=member), 0.0)
    if len(members) == 2:
        form_next(machine, 0.0)
        machine.recorded(record(key(1)), 1.0)
    return machine


@pytest.mark.parametrize("there", ["ab", "a"])
def test_a_fixed_group_ends_with_the_first_member_that_dies(there: str) -> None:
    machine = fixed(*there)
    actions = machine.dead("b", "its process ended", 2.0)
    assert ends(actions) == [("failed", "a failure")]
    assert machine.code == "training.group_ended"
    assert machine.ended is not None
    assert "the group of 2 ranks ended" in machine.ended[1]
    assert "its process ended" in machine.ended[1]
    over = [action.answer for action in actions if isinstance(action, Answer)]
    waits = there == "a"  # the other one trains, and hears it when it joins
    assert over == ([RunOver(reason=machine.ended[1])] if waits else [])
    assert machine.tick(3.0) == [], "it forms no other group"


def test_a_fixed_group_ends_with_the_error_of_one_member_once_the_others_have_come_back() -> None:
    machine = fixed(*"ab")
    text = "the disk is gone"
    machine.failed("b", "StorageError", text, True, now=2.0, code="storage.outage")
    machine.join(replace(JOIN, member="a", key=key(1), leaves=(1, 1), cursor=Cursor()), 2.0)
    assert ends(machine.tick(2.0)) == [("failed", "a failure")], "and forms no group of one"
    assert machine.ended is not None
    assert text in machine.ended[1]
    assert machine.code == "storage.outage"


def test_a_fixed_group_ends_with_a_member_that_does_not_come_back() -> None:
    machine = fixed(*"ab")
    machine.join(replace(JOIN, member="a", key=key(1), leaves=(1, 1), cursor=Cursor()), 2.0)
    assert ends(machine.tick(1000.0)) == [("failed", "a failure")]
    assert machine.code == "training.group_ended"


def test_a_fixed_group_of_which_one_has_finished_is_done_whoever_dies() -> None:
    machine = fixed(*"ab")
    machine.committed(key(1))
    machine.finished("a", key(1), "done", 2.0)
    assert ends(machine.dead("b", "its process ended", 3.0)) == [("done", "the end of the data")]


def test_a_fixed_group_whose_members_all_live_forms_again() -> None:
    machine = fixed(*"ab")
    for member in "ab":
        machine.join(replace(JOIN, member=member, key=key(1), leaves=(1, 1), cursor=Cursor()), 2.0)
    form_next(machine, 2.0)
    assert machine.ended is None
    assert machine.rendezvous.generation == 2


def test_a_wait_below_the_minimum_is_noted_when_it_begins_and_when_another_number_is_there() -> None:
    machine = one_of_two()
    waits = list[dict[str, object]]()
    machine.dead("b", "killed", 2.0)
    saved = StateKey(attempt=1, generation=1, step=1)
    machine.committed(saved)
    machine.rendezvous.set_newest_point(saved, Cursor(), saved.point_name)
    came = replace(JOIN, member="a", key=saved, leaves=(1, 1), cursor=Cursor())
    machine.join(came, 2.0)
    for now in (2.0, 2.1, 3.0):
        waits += notes(machine.tick(now), EventKind.WAITING)
    assert waits == [{"needed": 2, "there": 1, "reason": "1 of at least 2 members are there"}]
    machine.dead("a", "killed", 4.0)
    (none_is_there,) = notes(machine.tick(4.0), EventKind.WAITING)
    assert (none_is_there["needed"], none_is_there["there"]) == (2, 0)
    for member in "cd":
        machine.join(replace(JOIN, member=member), 5.0)
    form_next(machine, 5.0)
    machine.dead("c", "killed", 6.0)
    machine.dead("d", "killed", 6.0)
    assert len(notes(machine.tick(6.0), EventKind.WAITING)) == 1, "another wait"


def test_a_launch_whose_first_workers_are_still_starting_does_not_wait_below_its_minimum() -> None:
    rendezvous = Rendezvous(attempt=1, launch=LAUNCH, size=GroupSize.fixed(2))
    machine = LaunchMachine(rendezvous, FailureBudget(3), StorageOutage())
    assert notes(machine.tick(0.0), EventKind.WAITING) == []
    machine.join(replace(JOIN, member="a"), 1.0)
    assert notes(machine.tick(1.0), EventKind.WAITING) == []


def length(given: int, unit: str) -> Length:
    return Length(given=given, unit=unit, global_batch_size=8, seq_len=32, tokens=32 * given)


def ends(actions: list[Action]) -> list[tuple[str, str]]:
    return [(action.outcome, action.by) for action in actions if isinstance(action, End)]


def asked(what: str, by: str) -> Request:
    return Request(number=1, launch=LAUNCH, what=what, by=by, created="")


@pytest.mark.parametrize(
    ("limit", "by"),
    [
        ({}, "the end of the data"),
        ({"max_samples": length(8, "samples")}, "the budget"),
        ({"max_samples": length(800, "samples")}, "the end of the data"),
    ],
)
def test_a_run_that_is_done_says_whether_its_budget_or_its_data_ended_it(
    limit: dict[str, Length], by: str
) -> None:
    machine = one_of_two(Budgets(**limit))
    actions = machine.finished("a", key(1), "done", 2.0) + machine.finished("b", key(1), "done", 2.0)
    assert ends(actions) == [("done", by)]


def test_an_end_says_whether_the_launch_trained_a_step() -> None:
    for trained, text in (
        (False, "done at step 1, and this start trained no step"),
        (True, "done at step 1"),
    ):
        machine = one_of_two(trained=trained)
        actions = machine.finished("a", key(1), "done", 2.0) + machine.finished("b", key(1), "done", 2.0)
        assert [action.reason for action in actions if isinstance(action, End)] == [text]


def test_a_stop_is_said_to_be_by_whoever_asked_for_it_first() -> None:
    machine = one_of_two()
    machine.asked(asked(STOP, "ann@desk"))
    machine.request_stop("SIGTERM to bob@head")
    actions = machine.finished("a", key(1), "stopped", 2.0) + machine.finished("b", key(1), "stopped", 2.0)
    assert ends(actions) == [("stopped", "ann@desk")]


def test_the_user_of_a_launch_hears_who_asks_for_what_and_what_is_not_done() -> None:
    machine = one_of_two()
    said = [action.text for action in machine.asked(asked(SAVE, "ann@desk")) if isinstance(action, Say)]
    assert said == ["ann@desk asks for: save · a resume point is saved after this step"]
    dance = replace(asked("dance", "bob@head"), number=2)
    said = [action.text for action in machine.asked(dance) if isinstance(action, Say)]
    (line,) = said
    assert line.startswith("bob@head asks for: dance · refused: 'dance' is not known to this launch")


def test_of_a_request_that_is_answered_at_once_the_user_hears_only_what_became_of_it() -> None:
    machine = one_of_two(trained=False)
    said = [action.text for action in machine.asked(asked(SAVE, "ann@desk")) if isinstance(action, Say)]
    refused = "refused: no step is trained yet, so there is nothing to save"
    assert said == [f"ann@desk asks for: save · {refused}"]
    machine.committed(key(1))
    again = replace(asked(SAVE, "ann@desk"), number=2)
    said = [action.text for action in machine.asked(again) if isinstance(action, Say)]
    done = f"done: nothing was trained since resume point {key(1).point_name}"
    assert said == [f"ann@desk asks for: save · {done}"]


def test_a_stop_at_once_and_a_failure_say_who_caused_them() -> None:
    assert ends(one_of_two().asked(asked(STOP_NOW, "ann@desk"))) == [("stopped", "ann@desk")]
    machine = one_of_two()
    machine.asked(asked(STOP, "ann@desk"))
    for member, ended in (("a", []), ("b", [("failed", "a failure")])):
        assert ends(machine.failed(member, "ConfigError", "wrong", True)) == ended


@pytest.mark.parametrize("expected", [1, 2, 8])
def test_workers_that_fail_whenever_they_start_end_the_run_with_their_reason(expected: int) -> None:
    rendezvous = Rendezvous(
        attempt=1, launch=LAUNCH, size=GroupSize(min_workers=1, max_workers=8, expected=expected)
    )
    machine = LaunchMachine(rendezvous, FailureBudget(3), StorageOutage())
    rounds = [
        [machine.failed(f"{start}-{n}", "RuntimeError", "no weights today", False) for n in range(expected)]
        for start in range(4)
    ]
    over = [[ends(actions) for actions in each if ends(actions)] for each in rounds]
    assert over == [[], [], [], [[("failed", "a failure")]]]
    (end,) = [action for action in rounds[-1][0] if isinstance(action, End)]
    assert machine.code == "launch.too_many_failures"
    assert "4 failures after step 0" in end.reason
    assert end.reason.count("RuntimeError: no weights today") == 1


def test_a_run_whose_last_state_could_not_be_saved_ends_with_the_reason_of_the_newest_save() -> None:
    for kind, reason in [
        ("UnsavedError", "tried for 300 s. Why: p2: no space"),
        ("TrainingError", "tried for 300 s"),
    ]:
        machine = one_of_two()
        machine.save_given_up(key(1), "p1: read-only", 2.0)
        machine.save_given_up(key(1), "p2: no space", 3.0)
        assert not ends(machine.failed("a", kind, "tried for 300 s", True))
        (end,) = [a for a in machine.failed("b", kind, "tried for 300 s", True) if isinstance(a, End)]
        assert (end.outcome, end.reason) == ("failed", reason)


@pytest.mark.parametrize("trained_on", [0, 1, 3])
def test_replicas_that_keep_differing_end_the_run_however_far_it_trains_before_each_is_noticed(
    trained_on: int,
) -> None:
    machine = one_of_two()
    point(machine, key(1))
    differ = ReplicasDiffer(ranks=(0,), others=(1,))
    over = []
    for generation in range(1, 5):
        for step in range(2, 3 + trained_on * generation):
            machine.recorded(record(key(step, generation)), 2.0)
        over.append(ends(machine.replicas_differ(key(2, generation), differ, 2.0)))
        if generation < 4:
            all_come_back(machine, generation)
    assert over == [[], [], [], [("failed", "a failure")]]


def test_replicas_that_differ_may_be_the_work_of_plug_ins_which_are_named() -> None:
    flat = {
        "model.factory": None,
        "train.objective": "mine:loss",
        "train.optimizer": "muon",
        "train.param_groups": [{"match": "x", "optimizer": "mine:Steps"}, {"match": "y"}],
    }
    assert plug_ins(flat) == ("train.objective=mine:loss", "train.param_groups=mine:Steps")
    assert plug_ins({"train.objective": "causal_lm", "train.optimizer": "adamw"}) == ()
    differ = ReplicasDiffer(ranks=(0,), others=(1,))
    for named in ((), plug_ins(flat)):
        machine = one_of_two(plug_ins=named)
        point(machine, key(1))
        machine.recorded(record(key(2, 1)), 2.0)
        actions = machine.replicas_differ(key(2, 1), differ, 2.0)
        (warning,) = [action.text for action in actions if isinstance(action, Warn)]
        assert ("train.objective=mine:loss" in warning) == bool(named)


def test_replicas_that_differ_again_after_a_new_resume_point_begin_a_new_count() -> None:
    machine = one_of_two()
    differ = ReplicasDiffer(ranks=(0,), others=(1,))
    for generation in range(1, 7):
        machine.recorded(record(key(generation, generation)), 2.0)
        point(machine, key(generation, generation))
        assert not ends(machine.replicas_differ(key(generation + 1, generation), differ, 2.0))
        all_come_back(machine, generation)


def point(machine: LaunchMachine, state: StateKey) -> None:
    machine.committed(state)
    machine.rendezvous.set_newest_point(state, Cursor(), state.point_name)


def all_come_back(machine: LaunchMachine, generation: int) -> None:
    for member in "ab":
        machine.join(replace(JOIN, member=member, leaves=(1, generation)), 2.0)
    form_next(machine, 2.0)


# ---- nodes that are about to be taken away
def on_two_nodes(sharded: bool, low: int = 1) -> LaunchMachine:
    """Two members on nodes of their own train, and have done a step."""
    rendezvous = Rendezvous(
        attempt=1, launch=LAUNCH, size=GroupSize(min_workers=low, max_workers=2, expected=2)
    )
    machine = LaunchMachine(rendezvous, FailureBudget(3), StorageOutage(), LaunchTerms(sharded=sharded))
    for member in "ab":
        machine.join(replace(JOIN, member=member, node_id=f"n-{member}"), 0.0)
    form_next(machine, 0.0)
    machine.recorded(record(key(1)), 1.0)
    return machine


def comes_again(machine: LaunchMachine, member: str, sharded: bool, saving: StateKey | None) -> None:
    held = HeldShard(key=key(1), shard="ab".index(member), num_shards=2, source=Source.LIVE, cursor=Cursor())
    came = replace(JOIN, member=member, node_id=f"n-{member}", key=key(1), leaves=(1, 1), cursor=Cursor())
    machine.join(replace(came, holdings=(held,) if sharded else (), saving=saving), 3.0)


def wanted(machine: LaunchMachine) -> tuple[bool, bool]:
    asked = machine.control_requests(1, 1, 0)
    return asked.save, asked.reform


def courses(actions: list[Action]) -> list[object]:
    return [fields["course"] for fields in notes(actions, EventKind.DRAIN_COURSE)]


def test_a_drained_node_is_left_after_a_point_of_that_step_and_its_worker_is_no_loss() -> None:
    machine = on_two_nodes(sharded=True)
    machine.committed(key(0), took_s=4.0)
    (notice,) = machine.draining("n-b", "host-b", 30.0, 2.0)
    assert isinstance(notice, Note)
    assert machine.draining("n-b", "host-b", 29.0, 3.0) == [], "a repeated notice"
    told = machine.tick(3.0)
    assert courses(told) == ["save and leave"]
    (said,) = [action.text for action in told if isinstance(action, Say)]
    assert said == (
        "node host-b is taken away in 29 s · a save takes up to 6.0 s · saving after this step, then "
        "without its 1 worker"
    )
    assert wanted(machine) == (True, True)
    for member in "ab":
        comes_again(machine, member, sharded=True, saving=key(1))
    assert machine.tick(4.0) == []
    machine.committed(key(1), took_s=4.0)
    machine.rendezvous.set_newest_point(key(1), Cursor(), key(1).point_name)
    (form,) = [action for action in machine.tick(5.0) if isinstance(action, Form)]
    assert machine.leavers(form.formation) == ["b"]
    assert form.formation.members == ("a",)
    machine.formed(form.formation, 5.0)
    left = machine.tick(5.1)
    assert [action.member for action in left if isinstance(action, Leave)] == ["b"]
    assert notes(left, EventKind.MEMBER_LEFT) == [{"member": "b", "reason": sentences.DRAINED}]
    assert machine.failures == ()
    assert list(machine.infos) == ["a"], "nobody asks whether it lives"
    assert machine.tick(6.0) == []
    assert machine.ended is None


@pytest.mark.parametrize("how", ["given up", "too late"])
def test_a_save_that_fails_or_takes_too_long_lets_all_go_on_together_and_is_tried_again(how: str) -> None:
    machine = on_two_nodes(sharded=True)
    machine.draining("n-b", "host-b", 30.0, 2.0)
    machine.tick(2.0)
    for member in "ab":
        comes_again(machine, member, sharded=True, saving=key(1))
    assert machine.tick(31.9) == []
    if how == "given up":
        actions = [*machine.save_given_up(key(1), "no space", 32.0), *machine.tick(32.0)]
    else:
        actions = machine.tick(32.0)
    assert [type(action) for action in actions] == [Warn, Form]
    form = actions[-1]
    assert isinstance(form, Form)
    assert (form.formation.members, form.formation.parent) == (("a", "b"), key(1))
    machine.formed(form.formation, 32.0)
    assert courses(machine.tick(36.9)) == []
    assert len(courses(machine.tick(37.0))) == 1


def test_a_save_that_does_not_fit_is_begun_and_not_waited_for() -> None:
    machine = on_two_nodes(sharded=True)
    machine.committed(key(0), took_s=100.0)
    machine.draining("n-b", "host-b", 30.0, 2.0)
    told = machine.tick(2.0)
    assert courses(told) == ["save"]
    (warning,) = [action.text for action in told if isinstance(action, Warn)]
    assert "a save takes up to 150.0 s, which may be too long" in warning
    assert wanted(machine) == (True, False)
    assert courses(machine.tick(3.0)) == []


def test_where_every_worker_holds_the_whole_state_a_node_is_left_without_a_save() -> None:
    machine = on_two_nodes(sharded=False)
    machine.draining("n-b", "host-b", 30.0, 2.0)
    assert courses(machine.tick(2.0)) == ["leave"]
    assert wanted(machine) == (False, True)
    for member in "ab":
        comes_again(machine, member, sharded=False, saving=None)
    form_next(machine, 3.0)
    assert [action.member for action in machine.tick(3.1) if isinstance(action, Leave)] == ["b"]


def test_a_run_that_needs_the_workers_of_a_node_that_goes_keeps_them_while_there_is_time() -> None:
    machine = on_two_nodes(sharded=False, low=2)
    machine.committed(key(0), took_s=4.0)
    machine.draining("n-b", "host-b", 600.0, 2.0)
    assert courses(machine.tick(2.0)) == ["stay"]
    assert wanted(machine) == (False, False)
    machine.join(replace(JOIN, member="c", node_id="n-c"), 10.0)
    assert courses(machine.tick(10.0)) == ["leave"], "there are two elsewhere"


@pytest.mark.parametrize(("took_s", "kind"), [(None, Say), (4.0, Say), (50.0, Warn)])
def test_a_stop_by_who_kills_soon_says_whether_a_save_fits(took_s: float | None, kind: type) -> None:
    machine = on_two_nodes(sharded=False)
    if took_s is not None:
        machine.committed(key(0), took_s=took_s)
    (said,) = machine.stop_within("SIGTERM to bob@head", 60.0)
    assert isinstance(said, kind)
    assert machine.stop_within("SIGTERM to bob@head", math.inf) == []


def test_a_save_that_a_signal_asks_for_is_asked_of_the_group_where_something_was_trained() -> None:
    machine = one_of_two(trained=False)

    def wanted() -> bool:
        return machine.control_requests(1, 1, 0).save

    assert notes(machine.request_save("SIGUSR1"), EventKind.CONTROL_REQUEST)
    assert not wanted(), "no step is trained"
    machine.recorded(record(key(1)), 1.0)
    machine.request_save("SIGUSR1")
    assert wanted()
    assert not machine.control_requests(1, 1, 0).stop
    machine.voted(key(1))
    assert not wanted()
    machine.committed(key(1))
    machine.request_save("SIGUSR1")
    assert not wanted(), "nothing was trained since"
