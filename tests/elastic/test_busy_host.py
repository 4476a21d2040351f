"""A member of a busy host is missed for as long as it could have come, and no longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.elastic.formation import GroupSize, LeaveOut
from orchestrator.elastic.rendezvous import Rendezvous
from tests.elastic.builders import ATTEMPT, form, key, rendezvous, request

GRACE_S = 10.0
SECONDS = st.integers(0, 40).map(lambda eighths: eighths / 8)  # exact as floats
EVENTS = st.lists(st.tuples(st.sampled_from(["passes", "starved", "late"]), SECONDS), max_size=40)


class Unexcused(Rendezvous):
    """Judges a member of a busy host by the clock alone."""

    def excuse(self, member: str, seconds: float) -> None:
        """See `Rendezvous`."""


class LateAndUnaware(Rendezvous):
    """Judges others for the time in which it could not hear them."""

    def judge_was_late(self, seconds: float) -> None:
        """See `Rendezvous`."""


def missing_one(machine: Rendezvous) -> Rendezvous:
    """Generation 1 of a and b has ended at 0, and b has not come."""
    for member in "ab":
        machine.join(request(member), 0.0)
    form(machine)
    machine.join(request("a", key(1, 7), leaves=1), 0.0)
    return machine


def check(machine: Rendezvous, events: list[tuple[str, float]]) -> None:
    """`b` is left out in the first tick after its counted silence is over."""
    now = excused_s = 0.0
    for event, seconds in events:
        match event:
            case "passes":
                now += seconds
            case "starved":
                machine.excuse("b", seconds)
                excused_s += seconds
            case "late":
                machine.judge_was_late(seconds)
                excused_s += seconds
        left_out = any(isinstance(action, LeaveOut) for action in machine.tick(now))
        assert left_out == (now - excused_s >= GRACE_S)
        if left_out:
            return


@given(EVENTS)
def test_a_missing_member_is_left_out_when_its_counted_silence_is_over_and_not_before(
    events: list[tuple[str, float]],
) -> None:
    check(missing_one(rendezvous(high=2, expected=2)), events)


@pytest.mark.parametrize(("mistake", "event"), [(Unexcused, "starved"), (LateAndUnaware, "late")])
def test_a_judge_that_goes_by_the_clock_alone_is_caught(mistake: type[Rendezvous], event: str) -> None:
    machine = mistake(
        attempt=ATTEMPT, launch="launch", size=GroupSize(min_workers=1, max_workers=2, expected=2)
    )
    with pytest.raises(AssertionError):
        check(missing_one(machine), [(event, 5.0), ("passes", 5.0), ("passes", 5.0)])
