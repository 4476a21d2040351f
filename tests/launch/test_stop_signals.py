"""What a signal to a launch does: while it starts, while it trains, and once more."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from orchestrator.launch.process import stop_signals
from orchestrator.launch.process.stop_signals import (
    SignalledError,
    StoppedAtOnceError,
    ended_by_signals,
    stop_on_signals,
)

ENDING = (signal.SIGTERM, signal.SIGHUP)
HANDLED = (*ENDING, signal.SIGINT, signal.SIGUSR1)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in HANDLED]


class Heard:
    """What was asked of a launch, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def note(self, what: str) -> Callable[[str], None]:
        return lambda by: self.asked.append(f"{what} {by.partition(' ')[0]}")

    def listening(self, *, trains: bool = True) -> Any:
        return stop_on_signals(self.note("stop"), self.note("save"), lambda text: None, lambda: trains)


@pytest.fixture(autouse=True)
def hangups_end() -> Iterator[None]:
    """Whoever runs the tests may have SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", ENDING)
def test_a_start_ends_at_once_and_what_it_had_begun_is_ended(number: signal.Signals) -> None:
    before, ends = handlers(), ExitStack()
    closed = list[bool]()
    ends.callback(closed.append, True)
    with pytest.raises(SignalledError) as ended, ended_by_signals(), ends:
        send(number)
    assert ended.value.exit_code == 128 + number
    assert closed
    assert handlers() == before


def test_a_start_that_is_asked_for_a_save_starts_on() -> None:
    with ended_by_signals():
        send(signal.SIGUSR1)


def test_a_save_is_asked_for_as_often_as_its_signal_comes_until_a_stop_is() -> None:
    before, heard = handlers(), Heard()
    with heard.listening():
        send(signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)
    assert heard.asked == ["save SIGUSR1", "save SIGUSR1", "stop SIGTERM"]
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_its_sender_and_torchrun_both_send_is_one_and_a_third_one_stops_at_once(
    number: signal.Signals,
) -> None:
    asked = list[str]()
    within = stop_on_signals(asked.append, asked.append, lambda text: None, relayed_s=1e9)
    with within:
        send(number, number)
        assert len(asked) == 1
        with pytest.raises(StoppedAtOnceError):
            send(number)


def test_a_signal_that_nobody_relays_stops_at_once_when_it_comes_again() -> None:
    with pytest.raises(StoppedAtOnceError), Heard().listening():
        send(signal.SIGTERM, signal.SIGTERM)


@pytest.mark.parametrize("number", [*ENDING, signal.SIGINT])
def test_where_no_worker_trains_the_first_signal_ends_the_launch(number: signal.Signals) -> None:
    heard = Heard()
    with pytest.raises(SignalledError) as ended, heard.listening(trains=False):
        send(signal.SIGUSR1, number)
    assert ended.value.exit_code == 128 + number
    assert heard.asked == ["save SIGUSR1"]


def test_a_signal_while_a_start_ends_does_not_take_away_what_the_first_says() -> None:
    ends = ExitStack()
    ends.callback(send, signal.SIGHUP)
    with pytest.raises(SignalledError) as ended, ended_by_signals(), ends:
        send(signal.SIGTERM)
    first = stop_signals.told(ended.value)
    assert isinstance(first, SignalledError)
    assert first.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("trains", [True, False])
def test_a_signal_is_named_although_a_call_of_ray_raises_a_bare_interrupt(*, trains: bool) -> None:
    def call() -> None:
        with suppress(SignalledError), Heard().listening(trains=trains):
            send(signal.SIGTERM, signal.SIGTERM)
        raise KeyboardInterrupt

    with pytest.raises(SignalledError) as ended, ended_by_signals():
        call()
    assert ended.value.exit_code == 128 + signal.SIGTERM
    with pytest.raises(KeyboardInterrupt) as alone, ended_by_signals():
        raise KeyboardInterrupt
    assert not isinstance(alone.value, SignalledError), "that of another launch"


def test_waits_at_the_end_are_as_long_as_who_sent_sigterm_lets_the_process_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Heard()
    with ended_by_signals():
        assert stop_signals.grace_left_s() == math.inf
        with heard.listening():
            send(signal.SIGINT)
            assert stop_signals.grace_left_s() == math.inf, "a person waits"
        with heard.listening():
            send(signal.SIGTERM)
            assert 0 < stop_signals.grace_left_s() <= stop_signals.GRACE_S
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "500")
        with heard.listening():
            send(signal.SIGTERM)
            assert stop_signals.GRACE_S < stop_signals.grace_left_s() <= 500
    with ended_by_signals():
        assert stop_signals.grace_left_s() == math.inf, "another launch"
