"""What the launch machine says of one member; whole histories are searched in `test_launch_search`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.coordinator.launch_machine import Kill, LaunchMachine
from orchestrator.elastic.failure_budget import FailureBudget
from orchestrator.elastic.formation import Form
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.elastic.storage_trouble import StorageTrouble
from orchestrator.records import Cursor, StateKey
from orchestrator.resume.commit_events import VoterGone
from tests.coordinator.test_actor import JOIN, LAUNCH


def test_a_member_that_is_left_out_will_not_vote_and_may_still_be_writing() -> None:
    rendezvous = Rendezvous(attempt=1, launch=LAUNCH, min_workers=1, max_workers=2, expected=2)
    machine = LaunchMachine(rendezvous, FailureBudget(3), StorageTrouble())
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
    assert VoterGone(generation=1, rank=rank, voted=None, writing=True) in actions
