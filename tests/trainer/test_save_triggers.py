"""At which steps a save is due, and what of a summary all ranks carry out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.records.membership import ControlRequests
from orchestrator.trainer.saving.save_machines import REFORM, SAVE, STOP, SaveTriggers, asked_for, carried_out

EVERY_5 = SaveTriggers(every_steps=5, every_minutes=None, since_s=0.0)
EVERY_2_MINUTES = SaveTriggers(every_steps=None, every_minutes=2.0, since_s=100.0)


def saved_steps(triggers: SaveTriggers, steps: range, busy: range = range(0)) -> list[int]:
    """The steps at which a save begins, if it cannot at those of `busy`."""
    found = []
    for step in steps:
        if triggers.due(step, 0.0) and step not in busy:
            triggers = triggers.begun(step, 0.0)
            found.append(step)
    return found


def test_saves_are_due_at_multiples_whatever_a_launch_began_with():
    assert saved_steps(EVERY_5, range(1, 21)) == [5, 10, 15, 20]
    assert saved_steps(EVERY_5.first(12), range(13, 21)) == [15, 20]


def test_a_save_that_could_not_begin_begins_later_once_and_moves_no_other():
    assert saved_steps(EVERY_5, range(1, 21), busy=range(10, 12)) == [5, 12, 15, 20]
    assert saved_steps(EVERY_5, range(1, 31), busy=range(10, 23)) == [5, 23, 25, 30]


def test_what_is_trained_again_is_saved_again_and_what_was_late_stays_due():
    saved = EVERY_5.begun(10, 0.0)
    assert saved_steps(saved.formed(8), range(9, 16)) == [10, 15]
    assert saved_steps(saved.formed(10), range(11, 16)) == [15]
    late = EVERY_5.begun(5, 0.0)
    assert late.due(11, 0.0)
    assert saved_steps(late.formed(11), range(12, 16)) == [12, 15]


def test_minutes_count_from_the_begin_of_the_last_save():
    assert not EVERY_2_MINUTES.due(1, 219.9)
    assert EVERY_2_MINUTES.due(1, 220.0)
    assert not EVERY_2_MINUTES.begun(1, 220.0).due(2, 339.9)


def test_nothing_is_due_where_nothing_is_configured():
    assert not SaveTriggers(every_steps=None, every_minutes=None, since_s=0.0).due(1000, 1e9)


@pytest.mark.parametrize(
    ("control", "num_busy", "expected"),
    [
        (SAVE | STOP | REFORM, 0, SAVE | STOP | REFORM),
        (SAVE, 1, 0),
        (SAVE | STOP, 2, STOP),
        (SAVE | REFORM, 1, 0),
        (REFORM, 3, REFORM),
        (0, 1, 0),
    ],
)
def test_a_save_is_begun_only_where_all_are_free_and_a_reform_with_it_waits(control, num_busy, expected):
    assert carried_out(control, num_busy) == expected


@given(st.tuples(*6 * [st.booleans()]), st.integers(0, 2))
def test_rank_0_adds_what_is_wanted_and_what_is_due_and_nothing_else(asked, num_busy):
    save, stop, reform, resize, due, is_free = asked
    wanted = ControlRequests(
        ended=False, save=save, stop=stop, reform=reform, resize=resize, acknowledged_step=0
    )
    control = asked_for(wanted, due=due, is_free=is_free, num_busy=num_busy)
    assert (bool(control & STOP), bool(control & REFORM)) == (stop, reform)
    assert not control & ~(SAVE | STOP | REFORM)
    if save:
        assert control & SAVE, "what the coordinator wants is not forgotten"
    elif not is_free:
        assert not control & SAVE
    elif not (reform and num_busy):
        assert bool(control & SAVE) == (due or resize)


def test_a_planned_reform_has_a_save_before_it_and_waits_for_none() -> None:
    wanted = ControlRequests(
        ended=False, save=False, stop=False, reform=True, resize=True, acknowledged_step=0
    )
    for is_free, num_busy in [(True, 0), (True, 1), (False, 0), (False, 2)]:
        control = asked_for(wanted, due=False, is_free=is_free, num_busy=num_busy)
        all_free = is_free and not num_busy
        assert carried_out(control, num_busy) == (SAVE | REFORM if all_free else REFORM)
