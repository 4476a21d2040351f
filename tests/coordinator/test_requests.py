"""What was asked of a launch from outside is answered once, and a save is done when it is in a point."""

from __future__ import annotations

from orchestrator.coordinator.machine.requests import SAVE_AGAIN_S, RequestAnswer, Requests
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW, Request
from orchestrator.records.steps import StateKey


def key(step: int, generation: int = 1) -> StateKey:
    return StateKey(attempt=1, generation=generation, step=step)


def asked(number: int, what: str = SAVE, unreadable: str = "") -> Request:
    return Request(number=number, launch="l", what=what, by="ada@desk", created="", unreadable=unreadable)


def outcome(answer: RequestAnswer | None) -> tuple[str, str] | None:
    return answer and (answer.outcome, answer.point)


def test_a_save_is_met_by_the_first_point_that_holds_what_was_trained_when_it_was_heard() -> None:
    requests = Requests()
    assert requests.heard(asked(1), key(7), key(5)) is None
    assert requests.heard(asked(2), key(9), key(5)) is None
    assert requests.committed(key(6)) == []
    (first,) = requests.committed(key(8))
    assert (first.request, first.outcome, first.point) == (1, "done", key(8).point_name)
    (second,) = requests.committed(key(1, generation=2))
    assert (second.request, second.point) == (2, key(1, generation=2).point_name)
    assert requests.committed(key(9, generation=2)) == []
    assert requests.ended("done", "done at step 9") == []


def test_what_needs_no_save_is_answered_at_once() -> None:
    requests = Requests()
    assert outcome(requests.heard(asked(1), None, None)) == ("refused", "")
    assert outcome(requests.heard(asked(2), None, key(4))) == ("done", key(4).point_name)
    assert outcome(requests.heard(asked(3), key(4), key(4))) == ("done", key(4).point_name)
    assert not requests.wants_save(0.0)


def test_a_save_is_asked_for_once_and_again_a_while_after_it_was_given_up_or_did_not_meet_the_request() -> (
    None
):
    requests = Requests()
    assert requests.heard(asked(1), key(7), None) is None
    assert [requests.wants_save(now) for now in (0.0, 1.0, 2.0)] == [True, False, False]
    requests.save_given_up(10.0)
    again = 10.0 + SAVE_AGAIN_S
    assert [requests.wants_save(now) for now in (10.0, again - 0.1, again, again + 1)] == [
        False,
        False,
        True,
        False,
    ]
    assert requests.committed(key(6)) == [], "it was under way when the request came"
    assert [requests.wants_save(now) for now in (30.0, 31.0)] == [True, False]
    assert len(requests.committed(key(8))) == 1
    assert not requests.wants_save(40.0)


def test_the_end_of_the_run_answers_what_is_open() -> None:
    requests = Requests()
    for number, what in enumerate((STOP, SAVE, STOP_NOW), start=1):
        assert requests.heard(asked(number, what), key(7), None) is None
    answers = requests.ended("stopped", "stopped at step 8")
    assert [(answer.request, answer.outcome) for answer in answers] == [
        (1, "done"),
        (2, "failed"),
        (3, "done"),
    ]
    assert requests.ended("stopped", "stopped at step 8") == []


def test_a_stop_of_a_run_that_fails_first_has_failed() -> None:
    requests = Requests()
    requests.heard(asked(1, STOP), key(7), None)
    (answer,) = requests.ended("failed", "no space")
    assert (answer.outcome, answer.text) == ("failed", "failed: no space")


def test_what_is_unknown_or_unreadable_is_refused_and_the_next_one_is_heard() -> None:
    requests = Requests(known=(SAVE, STOP))
    assert outcome(requests.heard(asked(1, "dance"), key(1), None)) == ("refused", "")
    assert outcome(requests.heard(asked(2, STOP_NOW), key(1), None)) == ("refused", "")
    assert outcome(requests.heard(asked(3, "", unreadable="it is torn"), key(1), None)) == ("refused", "")
    assert requests.next_number == 4


def test_what_an_earlier_coordinator_has_answered_is_passed_over_and_what_it_left_is_heard_again() -> None:
    requests = Requests(answered=(1, 3))
    assert requests.next_number == 2
    assert requests.heard(asked(2), key(7), None) is None
    assert requests.next_number == 4
