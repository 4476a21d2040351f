"""Signals to every process of a launch with a Ray of its own, as batch systems and containers send them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from orchestrator.cluster.machine import Process, descendants, process_start
from orchestrator.inspect.run import Run
from tests.ports import free_ports
from tests.system.harness import LIMIT_S, Job, assert_exactly_once, when_saved, when_step

pytestmark = [pytest.mark.system, pytest.mark.chaos]
ROOT = Path(__file__).resolve().parents[2]


def send(number: signal.Signals, processes: list[Process]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def test_sigusr1_saves_and_sigterm_to_every_process_saves_and_stops_with_nothing_left(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    endless = {"train__max_steps": 100_000, "data__num_epochs": 100, "resume__every_steps": 1000}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.config(cluster__address=None, **endless).to_json()))
    command = [sys.executable, "-m", "orchestrator.cli.commands", "train", str(path), "--json"]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True, start_new_session=True)
    job.drivers.append(driver)
    every: list[Process] = []

    def to_all(number: signal.Signals) -> None:
        every[:] = descendants([driver.pid])
        send(number, [*every, Process("", driver.pid, "")])

    watches = [
        when_step(job, 3, lambda: to_all(signal.SIGUSR1)),
        when_saved(job, lambda: to_all(signal.SIGTERM)),
    ]
    out, err = driver.communicate(timeout=LIMIT_S)
    for watch in watches:
        watch.join()
    assert driver.returncode == 0, err
    stopped = json.loads(out)
    assert stopped["outcome"] == "stopped"
    points = job.run.list_points()
    assert len(points) >= 2, "of SIGUSR1, and of SIGTERM"
    assert points[-1]["consumed_samples"] == stopped["consumed_samples"]
    assert [p.pid for p in every if process_start(p.pid) == p.start] == []
    assert_exactly_once(job)


@pytest.fixture
def ray_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A head that the command `ray start` started, and its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (port,) = free_ports(1)
    options = ["--head", "--block", f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    options += ["--disable-usage-stats", f"--object-store-memory={200 << 20}"]
    line = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    with (tmp_path / "head.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + LIMIT_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, (tmp_path / "head.log").read_text()
            assert time.monotonic() < deadline
            threading.Event().wait(0.1)
        yield process, f"127.0.0.1:{port}"
    finally:
        started = descendants([process.pid])
        process.kill()
        send(signal.SIGKILL, [each for each in started if process_start(each.pid) == each.start])
        process.wait()


def test_sigterm_to_every_process_of_a_cluster_costs_no_step(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_start: tuple[subprocess.Popen[bytes], str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    server, address = ray_start
    endless = {"train__max_steps": 100_000, "data__num_epochs": 100, "resume__every_steps": 1000}
    path = tmp_path / "job.yaml"
    command = [sys.executable, "-m", "orchestrator.cli.commands", "train", str(path), "--json"]

    def start(cluster: str | None) -> subprocess.Popen[str]:
        path.write_text(yaml.safe_dump(job.config(cluster__address=cluster, **endless).to_json()))
        with (tmp_path / "err").open("w") as err:
            driver = subprocess.Popen(
                command, cwd=ROOT, stdout=-1, stderr=err, text=True, start_new_session=True
            )
        job.drivers.append(driver)
        return driver

    every: list[Process] = []

    def to_all() -> None:
        every[:] = [Process("", pid, process_start(pid) or "") for pid in (server.pid, driver.pid)]
        every.extend(descendants([server.pid, driver.pid]))
        send(signal.SIGTERM, every)

    driver = start(address)
    watch = when_step(job, 60, to_all)
    driver.communicate(timeout=LIMIT_S)
    assert every, (tmp_path / "err").read_text()
    watch.join()
    deadline = time.monotonic() + LIMIT_S
    while left := [p.pid for p in every if process_start(p.pid) == p.start]:
        assert time.monotonic() < deadline, left
        threading.Event().wait(0.1)
    trained = Run(job.run.uri).records()[-1].step

    driver = start(None)
    watch = when_step(job, trained + 10, driver.terminate)
    driver.communicate(timeout=LIMIT_S)
    watch.join()
    assert driver.returncode == 0, (tmp_path / "err").read_text()
    begun = [record for record in job.run.records() if record.attempt > 1][0]
    assert begun.step > trained, "no step is trained again"
    assert_exactly_once(job)
