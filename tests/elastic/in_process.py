"""A coordinator of this process behind a handle like Ray's, for the supervisor: its calls are answered by
whichever coordinator lives then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from orchestrator.elastic.supervision import supervisor
from orchestrator.elastic.supervision.policy import LaunchLimits, NodeFacts
from orchestrator.elastic.supervision.supervisor import SupervisedLaunch, Supervisor
from orchestrator.records.run_status import RunStatus
from tests.trainer import launch as launches

LIMITS = LaunchLimits(
    start_workers=1,
    min_workers=1,
    max_workers=1,
    cpus_per_worker=1.0,
    gpus_per_worker=0.0,
    num_tokenizers=1,
    wait_s=600.0,
)

SPEC = SupervisedLaunch(
    name="tiny",
    train_function=lambda config: None,
    worker_config={},
    resources_per_worker={},
    ray_storage="",
    limits=LIMITS,
)


class Handle:
    """`current`: the launch whose coordinator is called."""

    def __init__(self, current: launches.Launch) -> None:
        self._current = current

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._current.ask(method, *arguments))


class Driver:
    """A supervisor that runs in a thread, on no node; its workers are the test's own."""

    def __init__(
        self,
        launch: launches.Launch,
        monkeypatch: pytest.MonkeyPatch,
        nodes: Callable[[], tuple[NodeFacts, ...]] = tuple,
        own_node: str = "",
    ) -> None:
        def get(answer: Future[Any], timeout: float) -> Any:
            try:
                return answer.result(timeout)
            except TimeoutError as error:
                raise GetTimeoutError from error

        monkeypatch.setattr(ray, "get", get)
        # the coordinator may be slow, and is no actor that could be killed
        monkeypatch.setattr(supervisor, "FROZEN_S", launches.WAIT_S)
        self.said: list[str] = []
        self._shown: list[RunStatus] = []
        self._changed = threading.Condition()
        handle = Handle(launch)
        self.supervisor = Supervisor(SPEC, handle, nodes, self._show, say=self._say, own_node=own_node)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._end: Future[RunStatus] = Future()
        self._thread.start()

    def until(self, what: Callable[[RunStatus], bool]) -> None:
        """Waits until it has shown such a status."""
        self._wait(lambda: any(map(what, self._shown)))

    def until_said(self, text: str) -> None:
        self._wait(lambda: any(text in said for said in self.said))

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: until() or self._end.done(), launches.WAIT_S)
            assert until(), (self.said, self._shown[-1:], self._end.done() and self._end.result())

    def ended(self) -> RunStatus:
        """What `run` returned, or raised."""
        return self._end.result(launches.WAIT_S)

    def _run(self) -> None:
        try:
            self._end.set_result(self.supervisor.run())
        except BaseException as error:  # noqa: BLE001  the test hears of it
            self._end.set_exception(error)
        with self._changed:
            self._changed.notify_all()

    def _show(self, status: RunStatus) -> None:
        with self._changed:
            self._shown.append(status)
            self._changed.notify_all()

    def _say(self, text: str) -> None:
        with self._changed:
            self.said.append(text)
            self._changed.notify_all()
