"""Members that are missed have longer where their machine let them not run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from orchestrator.cluster.machine import ProcessLook, Thread
from orchestrator.elastic.supervision.supervisor import AGENT_LIMIT_S, LOOK_EVERY_S, MissedMembers
from orchestrator.records.run_status import MemberInfo

SLOW = MemberInfo(member="slow", actor_id="", node_id="n", pid=7, host="h")


class Agent:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.open: list[Future[dict[int, ProcessLook | None]]] = []

    def cpu_time_of(self, pids: Sequence[int]) -> Any:
        assert list(pids) == [SLOW.pid]
        self.open.append(Future())
        return self.open[-1]


class Scene:
    """The watch, with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agent, self.now, self.excused = Agent(), 100.0, 0.0
        self.watch = MissedMembers(excuse=self._excuse, clock=lambda: self.now)
        monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([r for r in refs if r.done()], []))
        monkeypatch.setattr(ray, "get", lambda ref: ref.result())

    def _excuse(self, member: str, seconds: float) -> None:
        assert (member, seconds > 0) == ("slow", True)
        self.excused += seconds

    def look(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.watch.watch([SLOW], {"n": self.agent})

    def answer(self, ran_s: float, waited_s: float, state: str = "S") -> None:
        threads = {1: Thread(ran_s=ran_s, waited_s=waited_s, state=state)}
        self.agent.open[-1].set_result({SLOW.pid: ProcessLook(at_s=self.now, threads=threads)})
        self.look()


def test_a_starved_member_is_excused_for_as_long_as_it_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.look()
    scene.answer(1.0, 10.0)
    scene.look(LOOK_EVERY_S)
    scene.answer(1.1, 10.9)
    assert scene.excused == pytest.approx(0.9 * LOOK_EVERY_S)


@pytest.mark.parametrize("state", ["S", "T"])
def test_a_member_that_wants_no_cpu_is_not_excused(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    scene = Scene(monkeypatch)
    scene.look()
    for _ in range(20):
        scene.answer(1.0, 10.0, state)
        scene.look(LOOK_EVERY_S)
    assert scene.excused == 0.0


def test_an_agent_that_does_not_answer_excuses_its_members_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.look()
    for _ in range(int(3 * AGENT_LIMIT_S)):
        scene.look(1.0)
    assert len(scene.agent.open) == 1
    assert scene.excused == pytest.approx(AGENT_LIMIT_S)
    scene.answer(1.0, 10.0)
    assert scene.excused == pytest.approx(AGENT_LIMIT_S)


def test_nobody_is_asked_while_nobody_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.watch.watch([], {"n": scene.agent})
    assert not scene.agent.open
