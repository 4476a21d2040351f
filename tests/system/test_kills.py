"""Kill anything: the same training follows, to the last bit, as in an uninterrupted run with one worker."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestrator.elastic.supervision import supervisor
from orchestrator.errors import ElasticError, FencedError
from orchestrator.faults import FREEZE
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.storage.files import Storage
from tests.elastic.in_process import SPEC
from tests.raising import raises
from tests.system.conftest import TINY, Make
from tests.system.harness import (
    Job,
    assert_same_training,
    assert_survivors_stayed,
    feeder_pid,
    log_text,
    sigkill,
    when_said,
)

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
ADDRESS = r"[\d.]+"


Unbroken = tuple[str, list[float]]


@pytest.mark.chaos
def test_two_workers_train_the_same_bits_as_one(undisturbed: dict[int, Job], unbroken: Unbroken) -> None:
    assert_same_training(undisturbed[2], unbroken)


@pytest.mark.chaos
def test_workers_are_killed_one_after_the_other_at_every_place(
    tiny_config: Make, tmp_path: Path, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    # one worker is left each time, saves, and trains on while that is written; the first replacement dies,
    # too, while it receives the state. After the last kill but one most of the run is left, for a replacement
    # to come in it: with ten steps left the worker that is alone has been at the end before.
    long = {**TINY, "train.max_steps": 64}
    job, alone = (Job(tiny_config(long), tmp_path / name) for name in ("killed", "alone"))
    assert alone.train(cluster__num_workers=1).outcome == "done"
    capfd.readouterr()
    plan = (
        job.faults()
        .kill("step_begin", step=2, rank=1)
        .kill("state_half_received")
        .kill("summary_received", step=4, rank=0)
        .kill("applied", step=6, rank=0)
        .kill("save_part_written", rank=1, after=3)
    )
    result = job.train(plan, cluster__num_workers=[2, 2])
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0, 1, 2, 3, 4]
    assert_survivors_stayed(job)
    assert_same_training(job, (alone.final_digest(), alone.losses()))
    said = capfd.readouterr()
    lost = rf"worker 1 \({ADDRESS}, pid \d+\) lost: its process died without an error \(SIGKILL, .*\)"
    # on a busy machine the loss is told by itself first: the minimum is two
    assert re.search(lost + r" · (1 of 2 left|fewer than 2 workers are left · waiting)", log_text(job))
    assert re.search(r" 1 of 2 left, continuing at step 2 · paused \d+\.\d s", log_text(job))
    assert re.search(rf"worker 1 \({ADDRESS}, pid \d+\) joined · 2 of 2 workers, continuing at", said.err)
    assert "[state-dump]" not in said.err
    assert max(map(len, said.err.splitlines())) < 400, "what Ray says at length is one line"
    assert said.out == "", "stdout is for results"
    assert "Worker exit detail: " in log_text(job), "all that Ray said is in the log file"


@pytest.mark.chaos
def test_the_coordinator_is_killed_again_and_again(job: Job, cluster: Any, unbroken: Unbroken) -> None:
    # the last one dies while it restarts: it has claimed, and has not said what it inherits
    plan = (
        job.faults()
        .kill("generation_journalled")
        .kill("votes_complete", step=4)
        .kill("commit_sent", after=1)
        .kill("claim_made", after=2)
    )
    result = job.train(plan)
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0, 1, 2, 3]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
    assert {start.attempt for start in read_journal(Storage(job.run.uri)).generations} == {1, 2, 3, 5}
    # those before died within seconds, which the driver may not have seen
    assert "the coordinator was restarted (attempt 5) · 2 of 2 workers, continuing at step " in log_text(job)


@pytest.mark.chaos
def test_a_frozen_coordinator_is_replaced_and_no_step_is_lost(
    job: Job, cluster: Any, unbroken: Unbroken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_S", 6.0)
    plan = job.faults().add(FREEZE, "votes_complete", step=4)
    result = job.train(plan)
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
    # one that takes long to begin is replaced, too: a new number each time
    journal = read_journal(Storage(job.run.uri))
    first, *_, last = journal.generations
    assert first.attempt < last.attempt
    killed = r"the coordinator \(pid \d+\) has not answered for 1[2-9] s: it is killed and restarted"
    assert re.search(killed, log_text(job))
    kinds = [event.kind for event in journal.events]
    assert EventKind.COORDINATOR_DIED in kinds
    assert [e for e in journal.events if e.kind == "unresponsive" and re.match(killed, e.fields["reason"])]


@pytest.mark.chaos
def test_a_frozen_worker_is_named_and_the_feeder_killed_meanwhile_and_training_goes_on(
    job: Job, cluster: Any, unbroken: Unbroken
) -> None:
    killed: list[int] = []

    def kill_and_thaw() -> None:
        killed.append(feeder_pid())
        sigkill(killed[0])
        for event in read_journal(Storage(job.run.uri)).events:
            if event.kind == "join":
                os.kill(event.fields["pid"], signal.SIGCONT)

    plan = job.faults().add(FREEZE, "step_begin", step=9, rank=1)
    watch = threading.Thread(target=when_said, args=(job, "its process is stopped (SIGSTOP)", kill_and_thaw))
    watch.start()
    result = job.train(plan)
    watch.join()
    assert result.outcome == "done", result.reason
    assert killed, "the feeder lived to the end"
    named = (
        rf"worker 1 \({ADDRESS}, pid \d+\) has not answered for \d+\.\d s: its process is stopped \(SIGSTOP\)"
    )
    (line,) = (line for line in log_text(job).splitlines() if re.search(named, line))
    assert "worker 0 (" not in line, "who waits for it is not named"
    died = [e for e in read_journal(Storage(job.run.uri)).events if e.kind == EventKind.FEEDER_DIED]
    assert [event.fields["pid"] for event in died] == killed
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)


class NeverAgain:
    """An actor whose process can be begun once."""

    def __init__(self, folder: str) -> None:
        if os.path.exists(f"{folder}/begun"):
            raise FencedError("another launch has taken the run over,\nso this one ends")
        Path(folder, "begun").touch()

    def status(self, seen: tuple[int, int], wait_s: float) -> int:
        """Called as the coordinator is."""
        return os.getpid()


def test_a_coordinator_that_cannot_begin_again_ends_the_launch_at_once_with_the_cause(
    cluster: Any, tmp_path: Path
) -> None:
    handle: Any = ray.remote(NeverAgain).options(max_restarts=-1, num_cpus=0).remote(str(tmp_path))
    sigkill(ray.get(handle.status.remote((-1, -1), 0.0)))
    driver = supervisor.Supervisor(SPEC, handle, tuple, lambda status: None)
    cause = "orchestrator.errors.FencedError: another launch has taken the run over,\nso this one ends"
    with raises(ElasticError, "launch.coordinator_not_started", cause):
        driver.run()
