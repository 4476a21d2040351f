"""Signals to every process of a launch with a Ray of its own, as batch systems and containers send them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from orchestrator.cluster.machine import Process, descendants, process_start
from tests.system.harness import LIMIT_S, Job, assert_exactly_once, when_step

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
        when_step(job, 60, lambda: to_all(signal.SIGTERM)),
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
