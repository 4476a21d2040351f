"""Whose error it is that a worker reports: the run's, or one machine's. Histories are searched in
`test_launch_search`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator import errors
from orchestrator.coordinator.machine.launch_actions import Action, End, Note, Warn
from orchestrator.coordinator.machine.launch_machine import LaunchMachine
from orchestrator.elastic.failure import FailureBudget, StorageOutage
from orchestrator.elastic.formation import Form, GroupSize
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.cursor import Cursor
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import StateKey
from tests.coordinator.builders import JOIN, LAUNCH

OURS = sorted(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.OrchestratorError)
)
THE_RUNS = [name for name in OURS if name not in ("FencedError", "ElasticError")]


def launch(members: str, min_workers: int = 1, max_failures: int = 3) -> LaunchMachine:
    """These members have come, each on a node of its own."""
    rendezvous = Rendezvous(
        attempt=1,
        launch=LAUNCH,
        size=GroupSize(min_workers=min_workers, max_workers=4, expected=max(1, len(members))),
    )
    machine = LaunchMachine(rendezvous, FailureBudget(max_failures), StorageOutage())
    for member in members:
        come(machine, member, 0.0)
    return machine


def come(machine: LaunchMachine, member: str, now: float, step: int | None = None, left: int = 1) -> None:
    """`step`: of the state that it brings from generation `left`."""
    state = None if step is None else StateKey(attempt=1, generation=left, step=step)
    leaves = None if step is None else (1, left)
    cursor = None if step is None else Cursor()
    request = replace(JOIN, member=member, node_id=f"n-{member}", key=state, leaves=leaves, cursor=cursor)
    machine.join(request, now)


def training(members: str, **settings: int) -> LaunchMachine:
    """They have done a step together."""
    machine = launch(members, **settings)
    form(machine, 0.0)
    machine.rendezvous.applied(1, 1, 1.0)
    return machine


def form(machine: LaunchMachine, now: float) -> tuple[str, ...]:
    (made,) = [action for action in machine.tick(now) if isinstance(action, Form)]
    machine.formed(made.formation, now)
    return made.formation.members


def fail(machine: LaunchMachine, member: str, kind: str, now: float) -> list[Action]:
    ours = kind in OURS
    place = MemberInfo(member=member, actor_id="", node_id=f"n-{member}", pid=7, host=f"host-{member}")
    code = f"code.{kind}" if ours else None
    return machine.failed(member, kind, f"what {kind} says", ours, place, now, code)


def ends(actions: list[Action]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, End)]


def refused(actions: list[Action]) -> list[tuple[object, object, object]]:
    notes = [a.fields for a in actions if isinstance(a, Note) and a.kind == EventKind.MACHINE_REFUSED]
    return [(note["host"], note["error"], note["retry_s"]) for note in notes]


@pytest.mark.parametrize("kind", [*OURS, "ValueError", "OutOfMemoryError"])
def test_an_error_of_one_member_leaves_the_others_training(kind: str) -> None:
    machine = training("ab")
    assert not ends(fail(machine, "a", kind, 2.0))
    assert not ends(machine.tick(2.0)), "b may report it, too"
    come(machine, "b", 3.0, step=1)
    assert form(machine, 3.0) == ("b",)
    assert machine.may_end("a", 3.0), "another process takes its place"
    assert machine.ended is None


@pytest.mark.parametrize("kind", THE_RUNS)
@pytest.mark.parametrize("members", ["a", "ab", "abcd"])
def test_an_error_of_ours_that_all_members_report_ends_the_run_at_once(members: str, kind: str) -> None:
    machine = training(members)
    *before, last = [fail(machine, member, kind, 2.0) for member in members]
    assert [ends(actions) for actions in before] == [[] for _ in members[1:]]
    assert ends(last) == [f"what {kind} says"]
    assert machine.code == f"code.{kind}"


def test_a_run_that_different_errors_end_has_the_code_of_the_first_that_has_one() -> None:
    machine = training("abc")
    machine.failed("a", "DataError", "no code yet", True, at("a", "n-a"), 2.0)
    fail(machine, "b", "TrainingError", 2.0)
    last = fail(machine, "c", "ConfigError", 2.0)
    assert ends(last) == ["no code yet\nwhat TrainingError says\nwhat ConfigError says"]
    assert machine.code == "code.TrainingError"


def test_an_error_that_each_machine_meets_in_turn_is_the_runs() -> None:
    machine = training("ab")
    fail(machine, "a", "DataError", 2.0)
    come(machine, "b", 3.0, step=1)
    form(machine, 3.0)
    assert ends(fail(machine, "b", "DataError", 4.0)) == ["what DataError says"]


def test_a_member_that_died_is_not_waited_for_before_the_error_is_the_runs() -> None:
    machine = training("ab")
    fail(machine, "a", "TrainingError", 2.0)
    machine.dead("b", "killed", 2.5)
    assert ends(machine.tick(2.5)) == ["what TrainingError says"]


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("who", ["given up by Ray", "left out", "of an older generation", "unknown"])
def test_nothing_that_an_outsider_reports_ends_the_run(who: str, kind: str) -> None:
    machine = training("ab")
    if who == "given up by Ray":
        machine.dead("b", "its node died", 2.0)
        come(machine, "a", 2.0, step=1)
        form(machine, 2.0)
    elif who in ("left out", "of an older generation"):
        come(machine, "a", 2.0, step=1)
        machine.tick(100.0)
        form(machine, 100.0) if machine.rendezvous.generation == 1 else None
    if who == "of an older generation":
        machine.dead("b", "killed", 101.0)
    reporter = "x" if who == "unknown" else "b"
    before = machine.failures
    assert not ends(fail(machine, reporter, kind, 102.0))
    assert not ends(machine.tick(102.0))
    assert machine.failures == before, "the run's own failures are counted alone"


def test_a_newcomer_that_cannot_work_is_refused_alone_and_tried_again_later() -> None:
    machine = training("ab", max_failures=0)
    first = fail(machine, "c", "ConfigError", 2.0)
    assert refused(first) == [("host-c", "ConfigError", 10.0)]
    assert [
        text for text in (a.text for a in first if isinstance(a, Warn)) if "what ConfigError says" in text
    ]
    assert (machine.may_end("c", 11.9), machine.may_end("c", 12.0)) == (False, True)
    again = machine.failed("d", "ConfigError", "what ConfigError says", True, at("d", "n-c"), 13.0)
    assert [retry_s for _, _, retry_s in refused(again)] == [20.0]
    assert not [a for a in again if isinstance(a, Warn)], "the same reason is said once"
    assert machine.rendezvous.resting(13.0) == ("n-c",)
    assert machine.rendezvous.control_requests(1, 1, 0).ended is False, "nobody paused for it"
    assert machine.failures == ()


def at(member: str, node: str) -> MemberInfo:
    return MemberInfo(member=member, actor_id="", node_id=node, pid=8, host="host-c")


@pytest.mark.parametrize("kind", ["StorageError", "ValueError"])
def test_a_newcomer_that_fails_before_its_first_step_pauses_the_others_once(kind: str) -> None:
    machine = training("a", max_failures=0)
    come(machine, "c", 2.0)
    machine.tick(2.5)
    come(machine, "a", 3.0, step=1)
    assert form(machine, 3.0) == ("a", "c")
    actions = fail(machine, "c", kind, 4.0)
    come(machine, "a", 4.0, step=1, left=2)
    actions += machine.tick(4.0)
    assert refused(actions) == [(JOIN.host, kind, 10.0)]
    (made,) = [action for action in actions if isinstance(action, Form)]
    machine.formed(made.formation, 4.0)
    come(machine, "c2", 5.0)
    request = replace(JOIN, member="c3", node_id="n-c")
    machine.join(request, 5.0)
    assert made.formation.members == ("a",)
    assert machine.failures == ()


def test_newcomers_that_die_at_every_join_never_stop_the_run() -> None:
    machine = training("a", max_failures=0)
    now, paused = 2.0, 0
    for number in range(40):
        name = f"c{number}"
        machine.join(replace(JOIN, member=name, node_id="bad"), now)
        assert not ends(machine.tick(now + 0.5))
        if machine.rendezvous.control_requests(1, machine.rendezvous.generation, 0).reform:
            paused += 1
            left = machine.rendezvous.generation
            come(machine, "a", now + 1, step=1, left=left)
            form(machine, now + 1)
            machine.dead(name, "killed", now + 2)
            come(machine, "a", now + 2, step=1, left=left + 1)
            form(machine, now + 2)
        else:
            machine.dead(name, "killed", now + 2)
        now += 5.0
    assert machine.ended is None
    assert 0 < paused < 6, f"{paused} of 40 newcomers paused the others"


def test_one_machine_of_four_that_cannot_work_does_not_end_a_start() -> None:
    machine = launch("abc")
    machine.rendezvous.expect(4)
    assert not [a for a in machine.tick(1.0) if isinstance(a, Form)], "the fourth is still to come"
    found = fail(machine, "d", "ConfigError", 2.0)
    assert (ends(found), refused(found)) == ([], [("host-d", "ConfigError", 10.0)])
    assert form(machine, 2.0) == ("a", "b", "c"), "without waiting any longer"


def test_a_start_ends_at_once_when_the_others_are_too_few() -> None:
    machine = launch("a", min_workers=2)
    machine.rendezvous.expect(2)
    (reason,) = ends(fail(machine, "b", "ConfigError", 2.0))
    assert machine.code == "code.ConfigError"
    assert "host-b" in reason
    assert "what ConfigError says" in reason


def test_all_machines_of_a_start_that_fail_for_one_reason_end_it_at_once_with_it() -> None:
    machine = launch("", min_workers=2)
    machine.rendezvous.expect(4)
    found = [ends(fail(machine, member, "ConfigError", 2.0)) for member in "abcd"]
    assert found == [[], [], [], ["what ConfigError says"]]


def test_who_holds_the_state_waits_for_a_machine_that_can_work() -> None:
    machine = training("ab", min_workers=2)
    machine.dead("b", "its node died", 2.0)
    come(machine, "a", 2.0, step=1)
    machine.tick(2.0)
    for number in range(6):
        found = fail(machine, f"b{number}", "ConfigError", 3.0 + number)
        assert (ends(found), len(refused(found))) == ([], 1)
    (reason,) = ends(machine.end("failed", "fewer than 2 workers were there"))
    assert "what ConfigError says" in reason, "the end says why nobody else could work"


def test_a_machine_whose_groups_fail_is_left_alone_for_longer_and_longer() -> None:
    machine = training("a", max_failures=0)
    for number in range(3):
        assert not ends(machine.group_failed("bad", f"no such module, try {number}"))
        machine.tick(3.0 + number)
    assert machine.rendezvous.resting(5.0) == ("bad",)
    assert machine.failures == ()
