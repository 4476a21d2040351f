"""Faults at moments that timing never hits, on real processes: the same training follows, to the last bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from orchestrator.faults import FAIL, FREEZE, HANG
from orchestrator.history.claims import GenerationStart
from orchestrator.history.journal_reader import read_journal
from orchestrator.storage.files import Storage
from tests.system.harness import Job, assert_exactly_once, assert_survivors_stayed, spawn, when_struck
from tests.system.test_kills import assert_same_training, unbroken  # noqa: F401  a fixture
from tests.system.test_nodes import wait_for_world

pytestmark = pytest.mark.system
Unbroken = tuple[str, list[float]]


def generations(job: Job) -> tuple[GenerationStart, ...]:
    return read_journal(Storage(job.run.uri)).generations


def test_an_attempt_that_was_cut_off_and_commits_late_never_enters_the_lineage(
    job: Job,
    cluster: Any,
    unbroken: Unbroken,  # noqa: F811
) -> None:
    # the coordinator has all votes of step 8 and is about to write COMMIT when its machine stands still, and
    # the driver with it
    plan = job.faults().add(FREEZE, "votes_complete", step=8)
    old = spawn(job, cluster, plan)
    when_struck(plan, 0, lambda: old.send_signal(signal.SIGSTOP))
    (frozen,) = (e.fields["pid"] for e in read_journal(Storage(job.run.uri)).events if e.kind == "attempt")
    assert job.train(cluster__num_workers=1).outcome == "done"
    os.kill(frozen, signal.SIGCONT)
    old.send_signal(signal.SIGCONT)
    said, _ = old.communicate(timeout=60)
    # it did commit, and then it learned that it has been replaced
    late = {row["name"]: row for row in job.run.points()}["00000008-a0001-g0001"]
    assert (late["healthy"], late["on_lineage"]) == (True, False)
    assert "another launch has taken it over" in said
    assert not said.rstrip().endswith("done")
    assert_same_training(job, unbroken)
    assert {record.attempt for record in job.run.steps()} == {1, 2}


def test_a_start_dies_between_claim_and_parent_file_and_the_next_one_dies_while_it_restarts(
    job: Job,
    cluster: Any,
    unbroken: Unbroken,  # noqa: F811
) -> None:
    # stopped in the middle by a driver that is killed
    first = job.faults().add(HANG, "step_begin", step=9, rank=0)
    driver = spawn(job, cluster, first)
    when_struck(first, 0, driver.kill)
    driver.communicate()
    second = job.faults().kill("claim_made")
    assert spawn(job, cluster, second).wait(timeout=60) == -signal.SIGKILL
    assert second.struck() == [0]
    third = job.faults().kill("joined", rank=1)
    assert job.train(third).outcome == "done"
    assert third.struck() == [0]
    assert_same_training(job, unbroken)
    assert {start.attempt for start in generations(job)} == {1, 3}


def test_a_joiner_that_reaches_the_coordinator_but_not_rank_0_stops_nobody(job: Job, cluster: Any) -> None:
    plan = job.faults().kill("step_begin", step=5, rank=1).add(FAIL, "connecting", rank=1, after=0)
    driver = spawn(job, cluster, plan, train__max_steps=100_000, data__num_epochs=100)
    when_struck(plan, 1, lambda: None)
    alone = wait_for_world(job, 1)
    failed = wait_for_world(job, 2, after=alone)
    again = wait_for_world(job, 1, after=failed)  # the other one goes on without it
    wait_for_world(job, 2, after=again)  # it had to wait, and is in
    driver.terminate()
    said, _ = driver.communicate(timeout=60)
    assert said.splitlines()[-1].startswith("stopped"), said
    assert_exactly_once(job)


def test_two_generations_come_to_nothing_and_then_a_member_dies_on_its_way_to_the_group(
    job: Job,
    cluster: Any,
    unbroken: Unbroken,  # noqa: F811
) -> None:
    plan = job.faults().add(FAIL, "connecting", rank=1).add(FAIL, "connecting", rank=1, after=0)
    plan = plan.kill("connecting", rank=1, after=1)
    assert job.train(plan).outcome == "done"
    assert plan.struck() == [0, 1, 2]
    assert_survivors_stayed(job)
    assert_same_training(job, unbroken)
    # the third was formed to try ports only; nobody waited out a time-out for the dead one
    assert [start.world_size for start in generations(job)[:5]] == [2, 2, 2, 2, 1]
