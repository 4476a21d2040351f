"""When somebody looks which worker the others wait for."""

from __future__ import annotations

import pytest

from orchestrator.elastic.supervision.policy import StallWatch
from orchestrator.records.run_status import RunStatus
from tests.elastic.builders import status


@pytest.mark.parametrize(("step_s", "due_s"), [(0.1, 5.0), (1.0, 5.0), (4.0, 12.0)])
def test_a_look_is_due_after_5_s_or_three_median_steps_and_again_when_that_has_doubled(
    step_s: float, due_s: float
) -> None:
    watch = StallWatch()
    for step in range(1, 8):
        watch.saw(status(step, step_s), 100.0)
    assert watch.due(100.0 + due_s - 0.01) is None
    assert watch.due(100.0 + due_s) == due_s
    assert watch.due(100.0 + 1.9 * due_s) is None
    assert watch.due(100.0 + 2 * due_s) == 2 * due_s
    watch.saw(status(8, step_s), 200.0)
    assert watch.due(200.0 + due_s - 0.01) is None


@pytest.mark.parametrize(
    "quiet",
    [
        status(None),
        status(3, generation=2),
        status(3, waiting_since=1.0),
        status(3, ended="done"),
    ],
    ids=["no step yet", "a first step of a new group", "below the minimum", "ended"],
)
def test_nobody_is_looked_at_while_no_step_is_expected(quiet: RunStatus) -> None:
    watch = StallWatch()
    watch.saw(status(3), 0.0)
    watch.saw(quiet, 1.0)
    assert watch.due(10_000.0) is None
