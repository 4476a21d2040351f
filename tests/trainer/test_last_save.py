"""How long the last state of a run is tried to be saved."""

from __future__ import annotations

import pytest

from orchestrator.errors import ElasticError
from orchestrator.trainer.saving import Unsaved


def test_the_last_state_is_tried_for_a_while_and_then_the_run_stops_with_the_time_and_the_limit():
    unsaved = Unsaved(limit_s=0.5)
    left = [unsaved.again("p1"), unsaved.again("p2")]
    assert left[0] == 0.5 > left[1] > 0
    unsaved.again("p3")
    told = r"for \d s \(allowed: 0.5 s\): every save was given up, the last one as p4"
    with pytest.raises(ElasticError, match=told):
        unsaved.again("p4")
