"""The command itself: killed, interrupted, submitted as a Ray job; the same command again continues."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.run_control import Reply
from orchestrator.storage.files import Storage
from tests.system.harness import LIMIT_S, Job, assert_exactly_once, assert_same_training, when_step

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
ENDLESS = {"train__max_steps": 100_000, "data__num_epochs": 100}
ROOT = Path(__file__).resolve().parents[2]

# `orchestrator`, which starts Python as the first word says
PROGRAM = """
import sys
from orchestrator.cli.commands import main

sys.executable = sys.argv.pop(1)
main()
"""


def start(job: Job, cluster: Any, folder: Path) -> subprocess.Popen[str]:
    """`orchestrator train` as a process of its own on the module's cluster, with no end."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.config(cluster__address=cluster.address, **ENDLESS).to_json()))
    command = [sys.executable, "-c", PROGRAM, sys.executable, "train", str(path), "--json"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_saves_and_stops_and_loses_nothing(job: Job, cluster: Any, tmp_path: Path) -> None:
    driver = start(job, cluster, tmp_path)
    job.drivers.append(driver)
    saved: list[Reply] = []

    def save_and_interrupt() -> None:
        saved.append(job.run.save())
        driver.send_signal(signal.SIGINT)

    watch = when_step(job, 5, save_and_interrupt)
    out, err = driver.communicate(timeout=LIMIT_S)
    watch.join()
    assert driver.returncode == 0, err
    assert [reply.outcome for reply in saved] == ["done"]
    events = read_journal(Storage(job.run.uri)).events
    committed = [event.fields["point"] for event in events if event.kind == EventKind.POINT_COMMITTED]
    assert saved[0].point in committed
    stopped = json.loads(out)
    assert stopped["outcome"] == "stopped"
    newest, last = job.run.list_points()[-1], job.run.records()[-1]
    assert newest["consumed_samples"] == stopped["consumed_samples"] == last.consumed_samples
    assert_exactly_once(job)


@pytest.mark.chaos
def test_a_start_falls_back_past_a_damaged_point_and_says_so(
    finished: Job, cluster: Any, unbroken: tuple[str, list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    older, newest = sorted((Path(finished.run.uri) / "points").iterdir())[-2:]
    kept = int(older.name.partition("-")[0])
    damaged = max((newest / "state").iterdir())
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    assert finished.train().outcome == "done"
    said = capfd.readouterr().err
    assert newest.name in said
    assert damaged.name in said
    assert "falling back" in said
    assert_same_training(finished, unbroken)
    assert [record.attempt for record in finished.run.records()] == [1] * kept + [2] * (16 - kept)


@pytest.mark.chaos
def test_workers_that_find_the_newest_point_damaged_continue_the_older_one_within_the_same_start(
    job: Job, unbroken: tuple[str, list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert job.train(train__max_steps=8).outcome == "done"
    older, newest = sorted((Path(job.run.uri) / "points").iterdir())
    part = max((newest / "state").iterdir())
    content = bytearray(part.read_bytes())
    content[-1] ^= 1  # neither sizes nor headers show it
    part.write_bytes(bytes(content))
    capfd.readouterr()
    result = job.train()
    assert (result.outcome, result.attempt) == ("done", 3)
    said = capfd.readouterr().err
    assert f"{newest.name}: state/{part.name} holds" in said
    assert "falling back" in said
    assert_same_training(job, unbroken)
    assert [record.attempt for record in job.run.records()] == [1] * 4 + [3] * 12
    checked = [
        (event.attempt, event.fields["point"])
        for event in read_journal(Storage(job.run.uri)).events
        if event.kind == EventKind.POINT_VERIFIED and event.attempt > 1
    ]
    assert (3, older.name) in checked, "the workers have read it"
    assert newest.name not in [name for _, name in checked]
