"""A run that has a tenth of its machine's CPU time for a while: nothing is killed, and it ends whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from orchestrator.cluster.machine import Process, descendants, process_start, this_process
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.storage.files import Storage
from tests.system import throttled as throttling
from tests.system.harness import LIMIT_S, ROOT, Job, assert_exactly_once, when_step

pytestmark = [pytest.mark.system, pytest.mark.chaos, pytest.mark.timeout(1200)]
SHARE, THROTTLED_S = 0.1, 100.0


@pytest.mark.parametrize("by", ["cgroup", "signals"])
def test_a_run_with_a_tenth_of_the_cpu_time_loses_no_process_and_ends_whole(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if by == "signals":
        monkeypatch.setattr(throttling, "_cgroup", lambda share: None)
    changes = {"train__max_steps": 1_000_000, "data__num_epochs": 10_000, "resume__every_steps": 20}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.config(cluster__address=None, **changes).to_json()))
    command = [sys.executable, "-m", "orchestrator.cli.commands", "train", str(path), "--json"]
    with (tmp_path / "err").open("w+") as err:
        driver = subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=err, text=True, start_new_session=True)
        job.drivers.append(driver)
        was, trained = list[str](), list[int]()

        def every() -> list[Process]:
            own = Process(this_process().machine, driver.pid, process_start(driver.pid) or "")
            return [own, *descendants([driver.pid])]

        def throttle() -> None:
            with throttling.throttled(every, SHARE) as how:
                was.append(how)
                began, before = time.monotonic(), job.run.records()[-1].step
                while driver.poll() is None and time.monotonic() - began < THROTTLED_S:
                    threading.Event().wait(1.0)
                trained.append(job.run.records()[-1].step - before)
            driver.send_signal(signal.SIGTERM)

        watch = when_step(job, 20, throttle)
        out, _ = driver.communicate(timeout=3 * LIMIT_S)
        watch.join()
        err.seek(0)
        assert driver.returncode == 0, err.read()[-4000:]
    assert was == [by]
    assert trained[0] > 0
    ended = json.loads(out)
    assert ended["outcome"] == "stopped"
    events = read_journal(Storage(job.run.uri)).events
    lost = (EventKind.MEMBER_DEAD, EventKind.MEMBER_FAILED, EventKind.GROUP_ENDED, EventKind.FEEDER_DIED)
    assert [event for event in events if event.kind in lost] == []
    assert ended["attempt"] == 1, "no coordinator was killed"
    assert_exactly_once(job)
