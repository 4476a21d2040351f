"""Faults at moments that timing never hits, on real processes: the same training follows, to the last bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from orchestrator.faults import FREEZE, HANG
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.storage.files import Storage
from tests.system.harness import LIMIT_S, Job, assert_same_training, spawn, when_struck

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
Unbroken = tuple[str, list[float]]


def generations(job: Job) -> tuple[GenerationStart, ...]:
    return read_journal(Storage(job.run.uri)).generations


@pytest.mark.chaos
def test_an_attempt_that_was_cut_off_and_commits_late_never_enters_the_lineage(
    job: Job,
    cluster: Any,
    unbroken: Unbroken,
) -> None:
    # the coordinator has all votes of the last step and is about to write COMMIT when its machine stands
    # still, and the driver with it; the point before is committed, because one follows the other
    plan = job.faults().add(FREEZE, "votes_complete", step=16)
    old = spawn(job, cluster, plan, resume__every_steps=12)
    when_struck(plan, 0, lambda: old.send_signal(signal.SIGSTOP))
    (frozen,) = (e.fields["pid"] for e in read_journal(Storage(job.run.uri)).events if e.kind == "attempt")
    assert job.train(cluster__num_workers=1).outcome == "done"
    os.kill(frozen, signal.SIGCONT)
    old.send_signal(signal.SIGCONT)
    said, _ = old.communicate(timeout=LIMIT_S)
    # it did commit, and then it learned that it has been replaced
    late = {row["name"]: row for row in job.run.list_points(verify=True)}["00000016-a0001-g0001"]
    assert (late["healthy"], late["on_lineage"]) == (True, False)
    assert "another launch has taken it over" in said
    assert not said.rstrip().endswith("done")
    assert_same_training(job, unbroken)
    assert {record.attempt for record in job.run.records()} == {1, 2}


@pytest.mark.chaos
def test_a_start_dies_between_claim_and_parent_file_and_the_next_one_dies_while_it_restarts(
    job: Job,
    cluster: Any,
    unbroken: Unbroken,
) -> None:
    # stopped in the middle by a driver that is killed
    first = job.faults().add(HANG, "step_begin", step=9, rank=0)
    driver = spawn(job, cluster, first)
    when_struck(first, 0, driver.kill)
    driver.communicate()
    second = job.faults().kill("claim_made")
    assert spawn(job, cluster, second).wait(timeout=LIMIT_S) == -signal.SIGKILL
    assert second.struck() == [0]
    third = job.faults().kill("joined", rank=1)
    assert job.train(third).outcome == "done"
    assert third.struck() == [0]
    assert_same_training(job, unbroken)
    assert {start.attempt for start in generations(job)} == {1, 3}
