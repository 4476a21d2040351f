"""The supervisor over the real coordinator, in one process: what it asks for again, and what it does not wait
for.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from orchestrator.cluster.machine import ProcessLook, Thread
from orchestrator.elastic.supervision import supervisor as module
from orchestrator.elastic.supervision.background_call import BackgroundCall
from orchestrator.elastic.supervision.policy import NodeFacts
from orchestrator.errors import CoordinatorSilentError, ElasticError
from orchestrator.history.journal.line_format import EventKind
from tests.coordinator.builders import JOIN
from tests.elastic.in_process import Driver
from tests.raising import raises
from tests.trainer.launch import LAUNCH, WAIT_S, Launch


def training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Launch, Driver]:
    """A launch with one member that trains, and its driver."""
    launch = Launch(folder, 1)
    driver = Driver(launch, monkeypatch)
    launch.ask("join", replace(JOIN, launch=LAUNCH))
    driver.until(lambda status: status.world_size == 1)
    return launch, driver


def test_a_stop_is_asked_for_again_when_the_coordinator_that_knew_it_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, driver = training(tmp_path, monkeypatch)
    driver.supervisor.ask_stop()
    driver.until(lambda status: status.attempt == 1 and status.stopping)
    launch.restart_coordinator()
    driver.until(lambda status: status.attempt == 2 and status.stopping)
    launch.run(launch.coordinator.end("stopped", "enough"))
    assert driver.ended().ended == "stopped"
    wishes = [event.attempt for event in launch.journal().events if event.kind == "wish"]
    assert wishes.count(2) == 1, "the first one's may not have been durable; the second was told once"


def test_a_stop_whose_save_takes_longer_than_the_launch_has_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, driver = training(tmp_path, monkeypatch)
    driver.supervisor.ask_stop("SIGTERM to me", 0.2)
    ended = driver.ended()
    assert (ended.ended, ended.stopping) == ("failed", True)
    assert ended.reason.startswith("SIGTERM to me: ")


STOPPED = ProcessLook(at_s=0.0, threads={1: Thread(ran_s=1.0, waited_s=0.0, state="T")})


def test_a_coordinator_that_is_at_work_and_slow_is_named_and_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(tmp_path, 1)
    driver = Driver(launch, monkeypatch)
    driver.until(lambda status: status.pid == os.getpid())
    answered, killed = launch.ask, list[object]()

    def unanswered(method: str, *arguments: object) -> Future[object]:
        monkeypatch.setattr(module, "FROZEN_S", 0.01)
        monkeypatch.setattr(module, "HUNG_S", WAIT_S)
        return Future()

    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: killed.append(handle))
    monkeypatch.setattr(launch, "ask", unanswered)
    driver.until_said("is at work")
    monkeypatch.setattr(launch, "ask", answered)
    launch.run(launch.coordinator.end("stopped", "enough"))
    assert driver.ended().ended == "stopped"
    assert not killed


def test_a_coordinator_that_stays_away_ends_the_launch_only_when_no_worker_holds_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(tmp_path, 1)
    driver = Driver(launch, monkeypatch)
    driver.until(lambda status: status.pid == os.getpid())
    supervisor, groups = driver.supervisor, {"node": _Group()}
    monkeypatch.setattr(supervisor, "_groups", groups)
    assert supervisor._silence_limit_s() == module.COORDINATOR_LIMIT_S, "nobody has trained"
    supervisor.has_trained = True
    assert supervisor._silence_limit_s() == supervisor._launch.limits.wait_s
    groups.clear()

    def unanswered(method: str, *arguments: object) -> Future[object]:
        monkeypatch.setattr(module, "FROZEN_S", 0.01)
        monkeypatch.setattr(module, "COORDINATOR_LIMIT_S", 0.02)
        return Future()

    monkeypatch.setattr(launch, "ask", unanswered)
    with raises(CoordinatorSilentError, "launch.coordinator_silent"):
        driver.ended()


class _Group:
    """A node group that lives."""

    def ended(self) -> None:
        """See `NodeGroup`."""


def test_a_frozen_coordinator_is_named_when_it_is_killed_and_the_journal_of_the_next_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "look_at_process", lambda pid, now: STOPPED)
    launch = Launch(tmp_path, 1)
    driver = Driver(launch, monkeypatch)
    driver.until(lambda status: status.pid == os.getpid())
    answered = launch.ask

    def unanswered(method: str, *arguments: object) -> Future[object]:
        monkeypatch.setattr(module, "FROZEN_S", 0.01)
        return Future()

    def kill(handle: object, no_restart: bool) -> None:
        monkeypatch.setattr(module, "FROZEN_S", WAIT_S)
        monkeypatch.setattr(launch, "ask", answered)
        launch.restart_coordinator()

    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(launch, "ask", unanswered)
    driver.until(lambda status: status.attempt == 2)
    launch.run(launch.coordinator.end("stopped", "enough"))
    assert driver.ended().ended == "stopped"
    events = [e for e in launch.journal().events if e.attempt == 2]
    (killed,) = (e.fields["reason"] for e in events if e.kind == EventKind.UNRESPONSIVE)
    assert killed in driver.said
    assert re.match(rf"the coordinator \(pid {os.getpid()}\) has not answered for 0 s: it is killed", killed)


def test_a_drain_notice_reaches_each_attempt_once_and_that_of_the_drivers_node_saves_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = [NodeFacts(node_id=name, host=f"host-{name}", is_head=False, cpus=1, gpus=0, free_cpus=0,
                       free_gpus=0, grace_s=100.0) for name in ("far", "own")]  # fmt: skip
    nodes = [going[0]]
    launch = Launch(tmp_path, 1)
    driver = Driver(launch, monkeypatch, lambda: tuple(nodes), own_node="own")
    launch.ask("join", replace(JOIN, launch=LAUNCH))

    def heard() -> list[tuple[int, str]]:
        events = launch.journal().events
        return [(e.attempt, e.fields["node"]) for e in events if e.kind == EventKind.DRAIN_NOTICE]

    driver.until(lambda status: status.world_size == 1 and bool(heard()))
    launch.restart_coordinator()
    driver.until(lambda status: status.attempt == 2)
    nodes.append(going[1])
    driver.until(lambda status: status.stopping)
    launch.run(launch.coordinator.end("stopped", "enough"))
    assert driver.ended().ended == "stopped"
    assert heard() == [(1, "far"), (2, "far"), (2, "own")]
    (wish,) = [e.fields["by"] for e in launch.journal().events if e.kind == EventKind.CONTROL_REQUEST]
    assert wish == "a drain notice for the driver's node host-own"


class Nodes:
    """A GCS that answers once, and then only when it is thawed."""

    def __init__(self, answers: int) -> None:
        self.thawed = threading.Event()
        self._answers = answers

    def __call__(self) -> tuple[NodeFacts, ...]:
        self._answers -= 1
        if self._answers < 0:
            self.thawed.wait(WAIT_S)
        return ()


def test_while_the_gcs_stands_still_a_stop_is_heard_and_the_silence_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NODES_SILENT_S", 0.2)
    launch, nodes = Launch(tmp_path, 1), Nodes(1)
    driver = Driver(launch, monkeypatch, nodes)
    launch.ask("join", replace(JOIN, launch=LAUNCH))  # so that the stop does not end the launch at once
    try:
        driver.until(lambda status: status.world_size == 1)
        driver.until_said("the cluster's GCS has not answered for")
        driver.supervisor.ask_stop()
        driver.until(lambda status: status.stopping)
        monkeypatch.setattr(module, "NODES_SILENT_S", WAIT_S)
        nodes.thawed.set()
        driver.until_said("the cluster's GCS answers again")
    finally:
        nodes.thawed.set()
    launch.run(launch.coordinator.end("stopped", "enough"))
    assert driver.ended().ended == "stopped"
    assert len(driver.said) == 2, driver.said


def test_a_gcs_that_never_says_which_nodes_there_are_ends_the_launch_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_NODES_S", 0.2)
    nodes = Nodes(0)
    driver = Driver(Launch(tmp_path, 1), monkeypatch, nodes)
    try:
        with raises(ElasticError, "cluster.gcs_silent", "0 s"):
            driver.ended()
    finally:
        nodes.thawed.set()


def test_a_signal_is_heeded_while_an_answer_is_waited_for() -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        asked = BackgroundCall(lambda: os.kill(os.getpid(), signal.SIGUSR1) or heard.wait(WAIT_S))
        assert asked.ask()
        assert not asked.ask(), "one question at a time"
        assert asked.answer(WAIT_S) is True
        assert asked.answer() is None, "each answer once"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_a_question_raises_is_raised_to_who_asked() -> None:
    asked = BackgroundCall(lambda: {}["missing"])
    asked.ask()
    with pytest.raises(KeyError):
        asked.answer(WAIT_S)
    assert asked.ask(), "and it may be asked again"
    assert asked.unanswered_s >= 0.0
