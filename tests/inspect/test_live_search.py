"""Readers beside a run that goes on: random histories (saves, deletions, generations, restarts, rewinds,
kills, leftovers) go on between any two calls of a reader to the disk; no reader calls a healthy run damaged.
Some of the readers look through an NFS client, which has cached what they saw before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.points.points import newest_first
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import POINTS
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt import survey as surveying
from orchestrator.data.spec import DataSpec
from orchestrator.inspect.status import point_rows, tail
from orchestrator.launch.start import preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.inspect.live_readers import Beside, WrongError
from tests.inspect.live_run import SEGMENT_BYTES, LiveRun
from tests.storage.nfs_client import trusts_the_miss

SEEDS = range(24)
READINGS = 6  # in each history


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 100_000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return starting.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)


@pytest.fixture(autouse=True)
def _looks_read_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LEAST_BYTES", SEGMENT_BYTES)


def walk(job: JobConfig, data: DataSpec, seed: int, branches: bool = False, on_nfs: bool = False) -> int:
    """How often a reader gave up, because the run went on too fast."""
    beside = Beside(job, data, seed, branches, on_nfs)
    try:
        for _ in range(READINGS):
            beside.look()
    except WrongError as wrong:
        raise WrongError(f"seed {seed}: {wrong}") from wrong
    finally:
        beside.writer.stop()
    return beside.moved_on


def search(job: JobConfig, data: DataSpec, seeds: Iterable[int], on_nfs: bool = False) -> int:
    return sum(walk(job, data, seed, on_nfs=on_nfs) for seed in seeds)


@pytest.mark.quick("some")
@pytest.mark.parametrize("seeds", [SEEDS[:8], SEEDS[8:]], ids=["some", "more"])
def test_no_reader_calls_a_healthy_run_damaged_whatever_happens_while_it_reads(
    job: JobConfig, data: DataSpec, seeds: range
) -> None:
    assert search(job, data, seeds) < len(seeds) * READINGS / 50


@pytest.mark.chaos
def test_no_reader_calls_a_fork_or_a_rewound_run_damaged(job: JobConfig, data: DataSpec) -> None:
    assert sum(walk(job, data, seed, branches=True) for seed in range(12)) < 12 * READINGS / 50


@pytest.mark.chaos
def test_no_reader_on_an_nfs_client_calls_a_healthy_run_damaged(job: JobConfig, data: DataSpec) -> None:
    assert search(job, data, range(8), on_nfs=True) < 8 * READINGS / 50


def test_the_search_catches_a_store_that_trusts_the_miss_of_an_nfs_client(
    job: JobConfig, data: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusts_the_miss(monkeypatch)
    with pytest.raises(WrongError):
        search(job, data, range(1000), on_nfs=True)


def never_looks_again(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: a claim that came meanwhile is not noticed."""
    patch.setattr(RunStore, "attempt_files", lambda store: [])


def believes_the_first_damage(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: nobody asks whether the run has deleted the point itself."""
    for module in (surveying, point_rows, preview):
        patch.setattr(module, "deleted_now", lambda store, names: frozenset())


def trusts_the_journal_it_has_read(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: a point of a generation that was formed meanwhile is an orphan."""
    patch.setattr(surveying, "_of_no_generation", lambda seen: frozenset())


def lists_the_points_once(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: one list of folders, looked at one after the other."""

    def names_once(store: PointFiles, has_commit: Callable[[str], bool], known: Any = ()) -> list[str]:
        names = newest_first(store.storage.list(POINTS))[::-1]
        return [name for name in names if name in known or has_commit(name)]

    patch.setattr(PointFiles, "_names", names_once)


def deletes_unannounced(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: points are deleted before the journal says so."""

    def delete(live: LiveRun, by: Any, names: list[str]) -> None:
        for name in names:
            live.store.delete_point(name)
        by.points[:] = [name for name in by.points if name not in names]

    patch.setattr(LiveRun, "delete", delete)


@pytest.mark.quick("never_looks_again-0", "deletes_unannounced-0")
@pytest.mark.parametrize(
    ("mistake", "seed"),
    [
        (never_looks_again, 0),
        (believes_the_first_damage, 1),
        (trusts_the_journal_it_has_read, 765),
        (lists_the_points_once, 332),
        (deletes_unannounced, 0),
    ],
)
def test_the_search_catches_a_planted_mistake(
    job: JobConfig,
    data: DataSpec,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    seed: int,
) -> None:
    """`seed`: near a history that showed it when this was written. The length of paths decides where segments
    end, so where it does not any more, others will do.
    """
    mistake(monkeypatch)
    with pytest.raises(WrongError):
        search(job, data, [*range(seed, seed + 20), *range(1000)])
