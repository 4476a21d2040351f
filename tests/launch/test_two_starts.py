"""Two starts of one run: who may claim, who is watched for how long, and what is known of dead processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.machine import Process, ProcessLook, Thread, machine_id, process_start
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.errors import BusyError, ConfigError, CoordinatorSilentError, OrchestratorError
from orchestrator.history.claims.liveness import Busy
from orchestrator.launch import api
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.torchrun import run as torchrun
from tests.launch.runner import LIMIT_S, Runner, begun
from tests.raising import raises


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


class Driver:
    """A process that does nothing, for claims and journals in its name."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.process = Process(machine_id(), self.child.pid, process_start(self.child.pid) or "")

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


class Watched:
    """How long starts have watched and waited, and what happens while they wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.meanwhile: Callable[[], object] = bool

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.meanwhile()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The time of a watch passes at once."""
    watched, real = Watched(), RunStore.watch_busy

    def watch(store: RunStore, seconds: float, clock: Any, wait: Any, *more: Any) -> Any:
        return real(store, seconds, lambda: sum(watched.waits), watched.wait, *more)

    monkeypatch.setattr(RunStore, "watch_busy", watch)
    return watched


@pytest.fixture
def watched_for(watched: Watched) -> list[float]:
    """How long starts have watched."""
    return watched.waits


def no_word(text: str) -> None:
    """Nobody listens."""


def test_a_launch_whose_driver_and_coordinator_are_seen_to_be_dead_is_not_watched(
    runner: Runner, watched_for: list[float]
) -> None:
    with Driver() as driver:
        assert begun(runner, driver.process).number == 1
        driver.kill()
        assert attempt_claim.refuse_busy(runner.store, no_word) == 1
        assert watched_for == []


@pytest.mark.parametrize(
    "what", ["the coordinator lives", "no journal yet", "another machine", "an old claim"]
)
def test_a_launch_of_which_not_all_is_known_is_watched_although_its_driver_is_dead(
    runner: Runner, watched_for: list[float], what: str
) -> None:
    with Driver() as driver:
        machines = {"another machine": "another boot", "an old claim": ""}
        by = driver.process._replace(machine=machines.get(what, driver.process.machine))
        attempt = runner.begin(by)
        if what != "no journal yet":
            journal = runner.journal(attempt)
            note_beginning(journal, attempt, {}, None if what == "the coordinator lives" else by)
            journal.close()
        driver.kill()
        assert attempt_claim.refuse_busy(runner.store, no_word) == 1
        assert sum(watched_for) >= attempt_claim.BUSY_WATCH_S


def test_a_process_that_has_the_pid_of_a_dead_driver_is_not_taken_for_it(
    runner: Runner, watched_for: list[float]
) -> None:
    with Driver() as driver:
        begun(runner, driver.process._replace(start="1"))
        num_refused = attempt_claim.refuse_busy(runner.store, no_word)
        assert num_refused == 1, "its pid is that of one that began later"
        assert watched_for == []


def test_a_launch_that_is_starved_on_the_watchers_machine_is_not_free(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starved(pid: int, now: float) -> ProcessLook:
        wants = Thread(ran_s=1.0, waited_s=1.0, state="R" if pid == driver.process.pid else "S")
        return ProcessLook(at_s=now, threads={1: wants})

    monkeypatch.setattr(attempt_claim, "look_at_process", starved)
    with Driver() as driver:
        begun(runner, driver.process)
        clock = attempt_claim._silence_of(runner.store)
        began = time.monotonic()
        while time.monotonic() < began + 0.1:
            assert clock() < 0.05
        driver.process = driver.process._replace(pid=0)
        while clock() < 0.05:
            assert time.monotonic() < began + LIMIT_S


def test_the_end_of_a_launch_whose_coordinator_was_silent_is_written_once_that_is_dead(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_claim, "KILLED_S", 0.2)
    silent = CoordinatorSilentError("it is silent")
    with Driver() as driver:
        begun(runner, driver.process)
        made = runner.store.newest_claim()
        assert made is not None
        attempt_claim.end_of_silent(runner.store, made, silent)
        assert runner.store.read_end(1) is None, "it may write still"
        driver.kill()
        attempt_claim.end_of_silent(runner.store, replace(made, launch="another"), silent)
        assert runner.store.read_end(1) is None
        attempt_claim.end_of_silent(runner.store, made, silent)
        end = runner.store.read_end(1)
        assert end is not None
        assert (end.outcome, end.reason) == ("failed", "it is silent")


def test_a_claimer_shows_that_it_lives_before_its_coordinator_begins(runner: Runner) -> None:
    job, store = runner.config(), runner.store
    spec = starting.prepare(job, runner.store.storage, freeze=True)
    pause = threading.Event()
    with attempt_claim.claimed(store, job, spec, 0):
        seen = store.watch_busy(LIMIT_S, time.monotonic, lambda seconds: pause.wait(0.05) and None)
        assert seen == Busy(number=1)


def test_a_start_that_watched_while_another_one_claimed_is_busy(runner: Runner) -> None:
    job, store = runner.config(), runner.store
    spec = starting.prepare(job, runner.store.storage, freeze=True)
    watched = attempt_claim.refuse_busy(store, no_word)
    first = runner.begin()
    claimed = attempt_claim.claimed(store, job, spec, watched)
    with raises(BusyError, "run.busy", "attempt 1 ", f"launch {first.launch}"), claimed:
        raise AssertionError("the first launch is fenced")
    assert not store.next_claim_exists(first.number)


@contextmanager
def orphans(runner: Runner) -> Iterator[tuple[Driver, threading.Event]]:
    """The driver of attempt 1, which lives, and the processes that it started: they show that they live until
    the event is set, which they do themselves after some minutes.
    """
    with Driver() as driver:
        heart, over = runner.store.heartbeat(runner.begin(driver.process).number), threading.Event()

        def beat() -> None:
            for _ in range(4000):
                if over.wait(0.05):
                    break
                heart.beat()
            over.set()

        orphan = threading.Thread(target=beat)
        orphan.start()
        try:
            yield driver, over
        finally:
            over.set()
            orphan.join()


def test_the_processes_of_a_killed_driver_are_waited_for_and_a_live_one_is_not(
    runner: Runner, watched: Watched
) -> None:
    said: list[str] = []
    with Driver() as driver:
        heart = runner.store.heartbeat(runner.begin(driver.process).number)
        watched.meanwhile = heart.beat
        with raises(BusyError, "run.busy", "attempt 1 of launch"):
            attempt_claim.refuse_busy(runner.store, said.append)
        driver.kill()
        beats = [heart.beat] * 20  # of an orphan
        watched.meanwhile = lambda: beats and beats.pop()()
        assert attempt_claim.refuse_busy(runner.store, said.append) == 1
    assert not beats, "it waited for the orphan"
    assert sum("waiting for its processes to end" in text for text in said) == 1, said


@pytest.mark.parametrize("error", [ConfigError("data.tokenizer"), KeyboardInterrupt()])
def test_an_error_of_a_start_and_ctrl_c_do_not_wait_for_the_watch(
    runner: Runner, error: BaseException
) -> None:
    said = threading.Event()
    with orphans(runner) as (driver, over):
        driver.kill()

        def start() -> None:
            with attempt_claim.watching(runner.store, lambda text: said.set()):
                assert said.wait(LIMIT_S), "the watch has begun"
                raise error

        with pytest.raises(type(error)):
            start()
        assert not over.is_set()


ways_to_start = pytest.mark.parametrize(
    "start",
    [
        lambda runner, job: api.train(job),
        lambda runner, job: torchrun._look(runner.store, job, runner.store.storage, no_word),
    ],
    ids=["ray", "torchrun"],
)


@ways_to_start
def test_a_wrong_configuration_is_told_while_the_processes_of_a_killed_driver_live(
    runner: Runner, start: Callable[[Runner, Any], Any]
) -> None:
    job = runner.config()
    wrong = job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": "/nowhere"})})
    with orphans(runner) as (driver, over):
        driver.kill()
        with raises(OrchestratorError, "tokenizer.not_found", "/nowhere"):
            start(runner, wrong)
        assert not over.is_set(), "it waited for them before it told"


def until_now(runner: Runner) -> JobConfig:
    """A job whose stop is what the run has saved already."""
    job, point = runner.config(), runner.store.point_names()[-1]
    done = runner.store.read_point(point).cursor.consumed_samples
    stop = {"max_steps": None, "max_samples": done}
    return job.model_copy(update={"train": job.train.model_copy(update=stop)})


@ways_to_start
def test_a_start_with_nothing_left_to_train_is_busy_while_another_launch_works_on_the_run(
    runner: Runner, watched: Watched, start: Callable[[Runner, Any], Any]
) -> None:
    runner.launch()
    with Driver() as driver:
        alive = begun(runner, driver.process)
        watched.meanwhile = runner.store.heartbeat(alive.number).beat
        with raises(BusyError, "run.busy", f"attempt {alive.number} of launch {alive.launch}"):
            start(runner, until_now(runner))


@ways_to_start
@pytest.mark.parametrize("how", ["said its end", "seen to be dead"])
def test_a_start_with_nothing_left_to_train_watches_nobody_whose_end_is_known(
    runner: Runner, watched_for: list[float], start: Callable[[Runner, Any], Any], how: str
) -> None:
    runner.launch()
    if how == "seen to be dead":
        with Driver() as driver:
            begun(runner, driver.process)
    assert start(runner, until_now(runner))
    assert watched_for == []


def test_what_a_launch_saved_while_it_was_watched_is_what_a_start_with_nothing_left_answers(
    runner: Runner,
) -> None:
    runner.launch()
    job, later = until_now(runner), list[str]()

    def watched() -> int:
        later.append(runner.launch().point_name)
        return 2

    plan = preview.look_before_start(runner.store, job, runner.prepared(), watched)
    assert [plan.point] == later
    assert preview.reached(plan)
