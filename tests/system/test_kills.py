"""Kill anything: the same training follows, to the last bit, as in an uninterrupted run with one worker."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.elastic import supervisor
from orchestrator.faults import FREEZE
from orchestrator.history.journal_reader import read_journal
from orchestrator.storage.files import Storage
from tests.system.harness import (
    Job,
    assert_exactly_once,
    assert_survivors_stayed,
    feeder_pid,
    log_text,
    sigkill,
    when_said,
    when_struck,
)

pytestmark = pytest.mark.system
ADDRESS = r"[\d.]+"


@pytest.fixture(scope="module")
def unbroken(
    cluster: Any, tiny_config: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[float]]]:
    """The weights' digest and the losses of the same job, uninterrupted, on one worker."""
    job = Job(job_mapping(tiny_config), tmp_path_factory.mktemp("unbroken"))
    result = job.train(cluster__num_workers=1)
    assert result.outcome == "done", result.reason
    assert_exactly_once(job)
    return job.final_digest(), job.losses()


def job_mapping(tiny_config: Any) -> dict[str, Any]:
    return tiny_config(
        {
            "train.max_steps": 16,
            "resume.every_steps": 4,
            "cluster.num_workers": 2,
            "data.num_tokenizers": 1,
            "data.window_bytes": 1 << 18,
            "data.fragment_bytes": 1 << 16,
        }
    )


def assert_same_training(job: Job, unbroken: tuple[str, list[float]]) -> None:
    digest, losses = unbroken
    assert_exactly_once(job)
    assert job.losses() == losses
    assert job.final_digest() == digest


def test_two_workers_train_the_same_bits_as_one(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]]
) -> None:
    assert job.train().outcome == "done"
    assert_same_training(job, unbroken)


def test_workers_are_killed_one_after_the_other_at_every_place(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]], capfd: pytest.CaptureFixture[str]
) -> None:
    # one worker is left each time, and saves; the first replacement dies, too, while it receives the state
    plan = (
        job.faults()
        .kill("step_begin", step=3, rank=1)
        .kill("state_half_received")
        .kill("summary_received", step=7, rank=0)
        .kill("applied", step=10, rank=0)
        .kill("save_part_written", step=12, rank=1)
    )
    result = job.train(plan, cluster__num_workers=[2, 2])
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0, 1, 2, 3, 4]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
    said = capfd.readouterr()
    lost = rf"worker 1 \({ADDRESS}, pid \d+\) lost: its process died without an error \(SIGKILL, .*\)"
    assert re.search(lost + r" · 1 of 2 left, continuing at step 3 · paused \d+\.\d s", log_text(job))
    assert re.search(rf"worker 1 \({ADDRESS}, pid \d+\) joined · 2 of 2 workers, continuing at", said.err)
    assert "[state-dump]" not in said.err
    assert max(map(len, said.err.splitlines())) < 400, "what Ray says at length is one line"
    assert said.out == "", "stdout is for results"
    assert "Worker exit detail: " in log_text(job), "all that Ray said is in the log file"


def test_the_coordinator_is_killed_again_and_again(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]]
) -> None:
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
    assert "the coordinator was restarted (attempt 2) · 2 of 2 workers, continuing at step " in log_text(job)


def test_a_frozen_coordinator_is_replaced_and_no_step_is_lost(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_S", 1.5)
    plan = job.faults().add(FREEZE, "votes_complete", step=4)
    result = job.train(plan)
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
    assert {start.attempt for start in read_journal(Storage(job.run.uri)).generations} == {1, 2}


def test_a_frozen_worker_is_named_while_the_others_wait_for_it(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]]
) -> None:
    plan = job.faults().add(FREEZE, "step_begin", step=9, rank=1)

    def thaw() -> None:
        for event in read_journal(Storage(job.run.uri)).events:
            if event.kind == "join":
                os.kill(event.fields["pid"], signal.SIGCONT)

    watch = threading.Thread(target=when_said, args=(job, "has not answered for", thaw))
    watch.start()
    result = job.train(plan)
    watch.join()
    assert result.outcome == "done", result.reason
    named = (
        rf"worker 1 \({ADDRESS}, pid \d+\) has not answered for \d+\.\d s: its process is stopped \(SIGSTOP\)"
    )
    assert re.search(named, log_text(job))
    assert "worker 0 (" not in log_text(job), "who waits for it is not named"
    assert_same_training(job, unbroken)


def test_the_feeder_is_killed_and_training_goes_on(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]]
) -> None:
    killed: list[int] = []

    def kill() -> None:
        killed.append(feeder_pid())
        sigkill(killed[0])
        for event in read_journal(Storage(job.run.uri)).events:
            if event.kind == "join":
                os.kill(event.fields["pid"], signal.SIGCONT)

    # one rank stands still meanwhile, so that the others are not done before
    plan = job.faults().add(FREEZE, "step_begin", step=9, rank=1)
    watch = threading.Thread(target=when_struck, args=(plan, 0, kill))
    watch.start()
    result = job.train(plan)
    watch.join()
    assert result.outcome == "done", result.reason
    assert killed, "the feeder lived to the end"
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
