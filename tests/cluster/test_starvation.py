"""Silence counts only while the silent process could run and its judge could hear it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cluster.machine import (
    ProcessLook,
    Silence,
    Thread,
    look_at_process,
    ran_s,
    starved_s,
)

LIMIT_S = 60.0
SPIN = "while True: pass"
SLEEP = "import threading; threading.Event().wait()"
needs_linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not tell"
)


def look(at_s: float, *threads: tuple[float, float, str]) -> ProcessLook:
    """A process whose threads are (ran, waited, state)."""
    made = {tid: Thread(ran_s=r, waited_s=w, state=s) for tid, (r, w, s) in enumerate(threads, 1)}
    return ProcessLook(at_s=at_s, threads=made)


def test_a_process_is_starved_for_the_share_of_the_cpu_time_that_it_wanted_and_did_not_get() -> None:
    before = look(0.0, (1.0, 5.0, "S"), (0.0, 0.0, "S"))
    assert starved_s(before, look(10.0, (2.0, 14.0, "R"), (0.0, 0.0, "S"))) == pytest.approx(9.0)
    assert starved_s(before, look(10.0, (9.0, 5.0, "R"), (0.0, 0.0, "S"))) == 0.0
    assert starved_s(before, replace(before, at_s=10.0)) == 0.0, "it wanted no CPU"
    assert starved_s(before, look(10.0)) == 0.0, "it is gone"


def test_a_thread_that_waits_all_the_time_is_starved_before_the_system_counts_it() -> None:
    assert starved_s(look(0.0, (1.0, 5.0, "R")), look(10.0, (1.0, 5.0, "R"))) == 10.0


def test_a_process_that_is_stopped_and_continued_again_and_again_is_starved_and_a_stopped_one_is_not() -> (
    None
):
    assert starved_s(look(0.0, (1.0, 0.0, "T")), look(5.0, (1.2, 0.0, "T"))) == 5.0
    assert starved_s(look(0.0, (1.0, 0.0, "T")), look(5.0, (1.0, 0.0, "T"))) == 0.0


EIGHTHS = st.integers(0, 40).map(lambda eighths: eighths / 8)  # exact as floats


@given(
    st.lists(st.tuples(st.integers(1, 400).map(lambda e: e / 8), EIGHTHS, EIGHTHS), min_size=1, max_size=20)
)
def test_no_more_is_counted_than_the_judge_was_there_for_and_the_process_could_run(
    looks: list[tuple[float, float, float]],
) -> None:
    silence, now, ran, waited = Silence(0.0, 1.0, look(0.0, (0.0, 0.0, "S"))), 0.0, 0.0, 0.0
    for passed_s, more, wait in looks:
        now, ran, waited = now + passed_s, ran + more, waited + wait
        before = silence.counted_s
        counted_s = silence.look(now, look(now, (ran, waited, "S"))) - before
        share = more / (more + wait) if wait else 1.0
        assert -1e-9 <= counted_s <= min(1.0, passed_s, passed_s * share) + 1e-9
    assert silence.lasts_s == pytest.approx(now)


def test_a_process_with_a_cpu_for_itself_is_counted_in_full() -> None:
    silence = Silence(0.0, 1.0, look(0.0, (0.0, 0.0, "S")))
    for second in range(1, 31):
        silence.look(float(second), look(float(second), (0.0, 0.0, "S")))
    assert silence.counted_s == 30.0
    assert silence.stands_still(frozen_s=20.0, hung_s=60.0)


def test_one_that_uses_cpu_time_has_longer_and_one_that_is_gone_is_nobodys_to_end() -> None:
    silence, gone = (
        Silence(0.0, 10.0, look(0.0, (0.0, 0.0, "S"))),
        Silence(0.0, 30.0, look(0.0, (0.0, 0.0, "S"))),
    )
    for second in range(10, 60, 10):
        silence.look(float(second), look(float(second), (second / 10, 0.0, "S")))
        assert not silence.stands_still(frozen_s=5.0, hung_s=50.0)
    silence.look(60.0, look(60.0, (6.0, 0.0, "S")))
    assert silence.stands_still(frozen_s=5.0, hung_s=50.0)
    gone.look(30.0, look(30.0))
    assert not gone.stands_still(frozen_s=5.0, hung_s=5.0)


def test_one_that_is_stopped_after_it_has_worked_stands_still_from_then_on() -> None:
    silence = Silence(0.0, 10.0)
    silence.look(10.0, look(10.0, (1.0, 0.0, "S")))
    silence.look(20.0, look(20.0, (2.0, 0.0, "S")))
    silence.look(30.0, look(30.0, (2.0, 0.0, "T")))
    assert not silence.stands_still(frozen_s=10.0, hung_s=50.0)
    silence.look(40.0, look(40.0, (2.0, 0.0, "T")))
    assert silence.stands_still(frozen_s=10.0, hung_s=50.0)


def test_where_the_system_does_not_tell_the_judges_own_delay_is_left_out() -> None:
    silence = Silence(0.0, 1.0)
    silence.look(1.0)
    silence.look(60.0)
    assert silence.counted_s == 2.0
    assert silence.stands_still(frozen_s=1.5, hung_s=60.0)


@contextmanager
def running(code: str, cpu: int | None = None) -> Iterator[int]:
    """A process that does this, on one CPU."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            if cpu is not None:
                os.sched_setaffinity(process.pid, {cpu})
            yield process.pid
        finally:
            process.kill()


def looked(pid: int) -> ProcessLook:
    found = look_at_process(pid, time.monotonic())
    assert found is not None
    return found


def until(holds: Callable[[ProcessLook], bool], pid: int) -> ProcessLook:
    """The first look at a process of which it holds."""
    deadline = time.monotonic() + LIMIT_S
    while not holds(found := looked(pid)):
        assert time.monotonic() < deadline, found
        os.sched_yield()
    return found


@needs_linux
def test_of_four_processes_on_one_cpu_each_is_starved_for_most_of_the_time() -> None:
    cpu = min(os.sched_getaffinity(0))
    with ExitStack() as stack:
        pid = [stack.enter_context(running(SPIN, cpu)) for _ in range(4)][0]
        first = until(lambda now: sum(t.ran_s for t in now.threads.values()) > 0.1, pid)
        last = until(lambda now: ran_s(first, now) > 0.2, pid)
        assert starved_s(first, last) > (last.at_s - first.at_s) / 2
        silence = Silence(first.at_s, 1e9, first)
        silence.look(last.at_s, last)
        assert silence.is_at_work
        assert silence.counted_s < (last.at_s - first.at_s) / 2


@needs_linux
def test_a_stopped_process_is_not_at_work_and_never_starved() -> None:
    with running(SPIN) as pid:
        until(lambda now: sum(t.ran_s for t in now.threads.values()) > 0, pid)
        os.kill(pid, signal.SIGSTOP)
        until(lambda now: now.is_stopped, pid)
        with running(SPIN) as other:  # time passes
            until(lambda now: sum(t.ran_s for t in now.threads.values()) > 0, other)
            first = looked(pid)  # Linux says "stopped" a moment before it has counted the last CPU time
            until(lambda now: sum(t.ran_s for t in now.threads.values()) > 0.05, other)
        last = looked(pid)
        silence = Silence(first.at_s, 1e9, first)
        silence.look(last.at_s, last)
        assert silence.counted_s == pytest.approx(last.at_s - first.at_s)
        assert silence.stands_still(frozen_s=0.01, hung_s=1e9)
        os.kill(pid, signal.SIGCONT)


@needs_linux
def test_a_process_that_has_ended_has_no_threads() -> None:
    with running(SLEEP) as pid:
        assert looked(pid).threads
    assert not looked(pid).threads
    assert look_at_process(0, 0.0) is None
