"""How long the last state of a run is tried to be saved."""

from __future__ import annotations

from orchestrator.elastic.failure import STORAGE_LIMIT_S
from orchestrator.errors import UnsavedError
from orchestrator.trainer.saving.saver import LAST_SAVE_LIMIT_S, Unsaved
from tests.raising import raises


def test_the_last_state_is_tried_for_a_while_and_then_the_run_stops_with_the_time_and_the_limit():
    unsaved = Unsaved(limit_s=0.0)
    assert unsaved.again("p1") == 0.0
    with raises(UnsavedError, "training.unsaved", "allowed: 0 s", "p2"):
        unsaved.again("p2")


def test_the_coordinator_tells_the_limit_that_the_workers_keep():
    assert LAST_SAVE_LIMIT_S == STORAGE_LIMIT_S
