"""What a run can do without is reported and left out: a full or read-only temporary folder, a failed copy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.files.part_writer import PartCancelled
from orchestrator.checkpoint.node_local.node_folder import PartsOnNode
from orchestrator.checkpoint.node_local.remote_nodes import ReachedNodes, Servers
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.attempt.metric_sinks import measured
from orchestrator.errors import StorageError, UnreachableNodeError
from orchestrator.launch.on_ray.worker import announce_workers
from orchestrator.launch.process.progress import RunLog
from orchestrator.planning.schedule import Budgets
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage
from tests.storage.model_store import ModelBucket, ModelStore

ATTEMPT = Attempt(
    number=1, launch="l", why="start", point=None, inherited=(), step_label=0, budgets=Budgets(), encoders=()
)


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))  # nothing can be made below it


def test_a_run_in_a_bucket_without_a_temporary_folder_says_that_it_sends_no_metrics(
    no_temporary_folder: None,
) -> None:
    logs = measured({"monitor.tensorboard": True}, "s3://bucket/run", "run", ATTEMPT)
    (said,) = logs.troubles()
    assert "TensorBoard" in said
    logs.close()
    assert measured({"monitor.tensorboard": False}, "s3://bucket/run", "run", ATTEMPT).troubles() == []


def test_a_run_in_a_bucket_without_a_temporary_folder_has_no_log_file_and_says_so(
    no_temporary_folder: None,
) -> None:
    said: list[str] = []
    log = RunLog(said.append)
    log.open(Storage.on(ModelStore(ModelBucket())), 1)
    log.write("a line")
    log.close()
    assert len(said) == 1
    assert "no log file" in said[0]


def test_a_later_attempt_of_a_start_has_a_log_file_of_its_own(tmp_path: Path) -> None:
    log = RunLog(pytest.fail)
    for attempt in (1, 2):
        log.open(Storage(str(tmp_path)), attempt)
        log.write(f"of attempt {attempt}")
    log.close()
    first, second = sorted((tmp_path / "logs").iterdir())
    assert "of attempt 1" in first.read_text()
    assert "of attempt 2" in second.read_text()
    assert "of attempt 2" not in first.read_text()


class Unreached(Servers):
    """Nodes of which none answers."""

    def own(self) -> str:
        return "here"

    def all(self) -> list[str]:
        return ["here"]

    def call(self, node: str, method: str, *arguments: object) -> Any:
        raise UnreachableNodeError(f"node {node} does not answer")


def test_a_node_that_cannot_be_offered_for_copies_costs_those_and_no_worker() -> None:
    said: list[str] = []
    announce_workers(ReachedNodes(Unreached(), "/nvme"), said.append)
    assert len(said) == 1
    assert "does not answer" in said[0]


class Failing:
    """A way to another node that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        raise self.error


@pytest.mark.parametrize(
    "error", [StorageError("the cable is gone"), OSError(28, "full"), RuntimeError("Ray"), MemoryError()]
)
def test_a_copy_to_another_node_that_fails_in_any_way_costs_the_point_that_copy(
    tmp_path: Path, error: Exception
) -> None:
    said: list[str] = []
    parts = PartsOnNode(str(tmp_path / "disk"), "run-1", "10.0.0.1", Failing(error), said.append)
    entry = FileEntry(path="state/00000-of-00001.safetensors", bytes=1, digest="0" * 64)
    assert len(parts.placed("00000001-a0001-g0001", entry, lambda: None)) == 1
    assert len(said) == 1
    unwanted = Failing(PartCancelled("no longer wanted"))
    cancelled = PartsOnNode(str(tmp_path / "disk"), "run-1", "", unwanted, said.append)
    assert len(cancelled.placed("00000001-a0001-g0001", entry, lambda: None)) == 1
    assert len(said) == 1, "nobody wants the copy any more"
