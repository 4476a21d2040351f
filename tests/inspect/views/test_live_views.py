"""A page beside a run that goes on between any two calls to the disk: it shows no damage, no contradiction
and no gap that there is not.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.spec import DataSpec
from orchestrator.errors import StorageError
from orchestrator.inspect.views.facts.facts import RunFiles
from orchestrator.inspect.views.run_views import PIECES_S, RunViews
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.inspect.live_readers import Beside, WrongError
from tests.inspect.live_run import READS, ROOT, Paused

SEEDS = (*range(7), 103)
LOOKS = 8  # in each history


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 100_000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return starting.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)


def look(beside: Beside, views: RunViews) -> bool:
    """One look while the run goes on; whether it moved on too fast."""
    beside.writer.finish()
    beside.left = beside.random.choice([0, 20, 100, 250])
    beside.often = beside.random.choice([0.02, 0.1, 0.5])
    try:
        views.refresh()
    except StorageError:
        return True
    finally:
        beside.left = 0
        beside.writer.finish()
    if views.unreadable is not None:
        raise WrongError(f"unreadable: {views.unreadable}")
    if gone := views.summary()["missing"]:
        raise WrongError(f"seems to be gone: {gone}")
    rows = views.points(limit=500)["rows"]
    for row in rows:
        if row["state"] == "damaged":
            raise WrongError(f"false damage of {row['name']}: {row['reason']}")
        if not row["on_lineage"] and row["name"] not in beside.live.orphans:
            raise WrongError(f"{row['name']} is no orphan: {row['orphan_why']}")
    if not rows:
        raise WrongError("no points are shown")
    labels = views._facts.history["step"].tolist()
    if labels != list(range(1, len(labels) + 1)):
        raise WrongError(f"steps with gaps: {labels}")
    return False


def walk(job: JobConfig, data: DataSpec, seed: int) -> int:
    """How often the run moved on too fast to be looked at."""
    beside = Beside(job, data, seed)
    paused = Paused(beside.writer.disk, READS, beside.goes_on)
    seconds = count(0, PIECES_S)  # so that each look lists all folders
    views = RunViews(RunStore(Storage(ROOT, paused, no_sleep)), monotonic=lambda: next(seconds))
    beside.left, beside.often = 0, 0.0
    try:
        return sum(look(beside, views) for _ in range(LOOKS))
    except WrongError as wrong:
        raise WrongError(f"seed {seed}: {wrong}") from wrong
    finally:
        beside.writer.stop()


@pytest.mark.chaos
def test_a_page_calls_no_healthy_run_damaged_whatever_happens_while_it_looks(
    job: JobConfig, data: DataSpec
) -> None:
    assert sum(walk(job, data, seed) for seed in SEEDS) < len(SEEDS) * LOOKS / 20


def never_looks_again(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: a claim that came meanwhile is not noticed."""
    patch.setattr(RunStore, "attempt_files", lambda store: [])


def believes_the_first_damage(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: nobody asks whether the point was deleted meanwhile."""
    patch.setattr(RunFiles, "_drop_deleted", lambda files, name: False)


@pytest.mark.parametrize("mistake", [never_looks_again, believes_the_first_damage])
def test_the_search_catches_a_planted_mistake(
    job: JobConfig, data: DataSpec, monkeypatch: pytest.MonkeyPatch, mistake: Any
) -> None:
    mistake(monkeypatch)
    with pytest.raises(WrongError):
        sum(walk(job, data, seed) for seed in range(60))
