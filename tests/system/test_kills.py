"""Kill anything: the same training follows, to the last bit, as in an uninterrupted run with one worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.faults import FREEZE
from orchestrator.monitor.reader import read_journal
from orchestrator.storage import Storage
from tests.system.harness import (
    Job,
    assert_exactly_once,
    assert_survivors_stayed,
    feeder_pid,
    sigkill,
    when_struck,
)

pytestmark = pytest.mark.system


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


@pytest.mark.parametrize(
    ("place", "step", "rank"),
    [
        ("step_begin", 6, 1),
        ("word_received", 7, 0),
        ("applied", 7, 0),
        ("save_part_written", 8, 1),
        ("votes_complete", 8, -1),
        ("generation_journalled", -1, -1),
    ],
)
def test_one_kill_changes_nothing(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]], place: str, step: int, rank: int
) -> None:
    plan = job.faults().kill(place, step=step, rank=rank)
    result = job.train(plan)
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)


def test_kills_in_a_row_also_while_the_state_is_sent_change_nothing(
    job: Job, cluster: Any, unbroken: tuple[str, list[float]]
) -> None:
    # the first kill leaves one worker; its replacement dies while it receives the state; then the coordinator
    # dies
    plan = (
        job.faults()
        .kill("step_begin", step=5, rank=1)
        .kill("state_half_received")
        .kill("commit_sent", step=12)
    )
    result = job.train(plan, train__max_steps=16, cluster__num_workers=[2, 2])
    assert result.outcome == "done", result.reason
    assert plan.struck() == [0, 1, 2]
    assert_survivors_stayed(job)
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
