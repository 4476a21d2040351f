"""Continue with another shape, several times in a row: no token trained twice, none skipped."""

from __future__ import annotations

from typing import Any

import pytest

import orchestrator
from orchestrator.errors import RefusedError
from tests.system.harness import Job, assert_exactly_once

pytestmark = pytest.mark.system


def test_world_batch_and_length_change_at_every_start(job: Job, cluster: Any) -> None:
    # token budgets that are no multiples of anything: last samples are shortened, and the next start goes on
    # behind them
    first = job.train(train__max_steps=None, train__max_tokens=1500)
    assert (first.outcome, first.consumed_tokens) == ("done", 1500)
    second = job.train(
        train__max_steps=None,
        train__max_tokens=2777,
        cluster__num_workers=1,
        train__global_batch_size=24,
        pack__seq_len=16,
    )
    assert (second.outcome, second.consumed_tokens) == ("done", 2777)
    # back to the first shape, more tokens than before, two workers
    third = job.train(train__max_steps=None, train__max_tokens=4000, train__global_batch_size=16)
    assert (third.outcome, third.consumed_tokens) == ("done", 4000)
    assert_exactly_once(job)
    plan = orchestrator.plan(job.config(train__max_steps=None, train__max_tokens=4000))
    assert (plan.action, plan.remaining_steps, plan.consumed_tokens) == ("resume", 0, 4000)


def test_a_stop_that_is_reached_ends_at_once_and_what_must_stay_is_refused(job: Job, cluster: Any) -> None:
    assert job.train(train__max_steps=4).outcome == "done"
    again = job.train(train__max_steps=4)
    assert (again.outcome, again.consumed_tokens) == ("done", 4 * 8 * 32)
    assert len(job.run.steps()) == 4
    with pytest.raises(RefusedError, match=r"data\.seed=0.*asks for 7"):
        job.train(data__seed=7)
    assert_exactly_once(job)
