"""Undisturbed runs of sharded groups, trained once for a module."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from orchestrator.trainer.objective import logit_loss
from tests.trainer.launch import Launch
from tests.trainer.member import run_to_end
from tests.trainer.sharded_kills import HSDP, Segments, job_of, losses


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Runs that nobody disturbs: each segment is a launch of its own that continues the point of the last."""

    @cache
    def run(parallel: str, segments: Segments, **changes: Any) -> tuple[list[float], str]:
        folder, launches, point = tmp_path_factory.mktemp("calm"), list[Launch](), None
        for attempt, (world, end) in enumerate(segments, 1):
            job = job_of(HSDP if parallel == "hsdp" else parallel, train__max_steps=end, **changes)
            launches.append(run_to_end(folder, world, attempt=attempt, point=point, job=job))
            point = launches[-1].last_point().key.point_name
        return losses(*launches), launches[-1].last_point().state_digest

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    return losses(run_to_end(tmp_path_factory.mktemp("alone"), 1, job=job_of("replicate")))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 5 positions."""
    monkeypatch.setattr(logit_loss, "_MIN_POSITIONS", 5)
    monkeypatch.setattr(logit_loss, "_MIN_LOGITS", 1)
    return 5
