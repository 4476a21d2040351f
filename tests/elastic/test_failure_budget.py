"""Failures count while no step comes between them, whoever has counted them so far."""

from __future__ import annotations

import pytest

from orchestrator.elastic.failure import Failure, FailureBudget


@pytest.mark.parametrize(
    ("steps", "last_step", "stops"),
    [
        ((), 7, False),
        ((7, 7, 7), 7, False),
        ((7, 7, 7, 7), 7, True),
        ((1, 2, 3, 4, 5, 6, 7), 7, False),
        ((7, 7, 7, 7), 8, False),
        ((3, 3, 3, 7, 7), 7, False),
        ((0, 0, 0, 0), 0, True),
    ],
)
def test_only_failures_without_a_step_between_them_count(
    steps: tuple[int, ...], last_step: int, *, stops: bool
) -> None:
    failures = [Failure(step=step, reason=f"failure {number}") for number, step in enumerate(steps)]
    verdict = FailureBudget(3, failures, last_step).verdict()
    assert (verdict is not None) == stops
    if verdict:
        assert "failure 3" in verdict
        assert "cluster.max_failures=3" in verdict


def test_a_run_that_goes_back_and_fails_at_the_same_step_again_and_again_is_stopped() -> None:
    budget = FailureBudget(1)
    for _ in range(2):
        budget.applied(50)
        budget.applied(51)
        assert budget.verdict() is None
        budget.failed("a poisoned batch")
    assert "2 failures after step 51" in (budget.verdict() or "")
