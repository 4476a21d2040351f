"""A worker's machine is examined before it joins: the run's storage, the driver's packages, the coordinator's
time. The coordinator's own class answers, in this process.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.run_file import RunFile, read_run
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator import actor
from orchestrator.coordinator.actor import checked
from orchestrator.errors import MachineError, ResumePointError, StorageError
from orchestrator.launch.on_ray.worker import packages_here, require_packages, require_storage
from orchestrator.records.membership import MachineProof, StillWaiting, Unfit
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.planning.identities import IDENTITY
from tests.raising import raises


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    """A run's folder, as the coordinator sees it."""
    storage = Storage(str(tmp_path / "run"), sleep=no_sleep)
    RunStore(storage).create_run("tiny", IDENTITY)
    return storage


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "_PROBE_AGAIN_S", 0.0)


def coordinator(run: Storage, clock_off_s: float = 0.0) -> Callable[[MachineProof], Unfit | None]:
    """What the coordinator answers to a machine whose clock is off."""

    def answer(proof: MachineProof) -> Unfit | None:
        found = asyncio.run(checked(run, replace(proof, unix_s=proof.unix_s + clock_off_s)))
        assert not isinstance(found, StillWaiting)
        return found

    return answer


def run_id(run: Storage) -> str:
    document = read_run(run)
    assert isinstance(document, RunFile)
    return document.id


def code_of(run: Storage, here: Storage, clock_off_s: float = 0.0) -> str | None:
    with pytest.raises(MachineError) as caught:
        require_storage(here, run_id(run), coordinator(run, clock_off_s))
    return caught.value.code


def test_a_machine_that_sees_the_run_may_join_and_leaves_nothing_in_it(run: Storage) -> None:
    assert run.folder is not None
    before = sorted(run.folder.rglob("*"))
    same = Storage(run.root, sleep=no_sleep)
    require_storage(same, run_id(run), coordinator(run))
    assert sorted(run.folder.rglob("*")) == before


def test_a_machine_without_the_mount_is_refused_and_nothing_is_written_there(
    run: Storage, tmp_path: Path
) -> None:
    (tmp_path / "unmounted").mkdir()
    assert code_of(run, Storage(str(tmp_path / "unmounted"), sleep=no_sleep)) == "machine.storage"
    assert code_of(run, Storage(str(tmp_path / "no folder"), sleep=no_sleep)) == "machine.storage"
    assert list((tmp_path / "unmounted").iterdir()) == []
    assert not (tmp_path / "no folder").exists()


def test_a_copy_of_the_runs_folder_is_told_apart_from_the_run(run: Storage, tmp_path: Path) -> None:
    shutil.copytree(run.root, tmp_path / "copy")
    assert code_of(run, Storage(str(tmp_path / "copy"), sleep=no_sleep)) == "machine.storage"


def test_another_run_of_the_same_name_is_refused(run: Storage, tmp_path: Path) -> None:
    other = Storage(str(tmp_path / "other"), sleep=no_sleep)
    RunStore(other).create_run("tiny", IDENTITY)
    assert code_of(run, other) == "machine.storage"


def test_a_run_file_that_is_damaged_on_this_machine_is_an_error_of_this_machine(
    run: Storage, tmp_path: Path
) -> None:
    shutil.copytree(run.root, tmp_path / "copy")
    text = (tmp_path / "copy/run.json").read_text()
    (tmp_path / "copy/run.json").write_text(text.replace("tiny", "tine"))
    with pytest.raises(ResumePointError):
        require_storage(Storage(str(tmp_path / "copy"), sleep=no_sleep), run_id(run), coordinator(run))


class ReadOnly(Storage):
    """A mount that takes no writes."""

    def create(self, path: str, data: bytes) -> bool:
        raise StorageError(f"cannot write {path}: read-only file system (EROFS)")


def test_a_machine_that_may_not_write_is_refused(run: Storage) -> None:
    assert code_of(run, ReadOnly(run.root, sleep=no_sleep)) == "machine.storage"


@pytest.mark.parametrize(
    ("off_s", "code"),
    [(-10_800.0, "machine.clock"), (10_800.0, "machine.clock"), (60.0, None), (-60.0, None)],
)
def test_a_clock_that_is_wrong_by_hours_is_refused(run: Storage, off_s: float, code: str | None) -> None:
    here = Storage(run.root, sleep=no_sleep)
    if code is None:
        require_storage(here, run_id(run), coordinator(run, off_s))
    else:
        assert code_of(run, here, off_s) == code


class Failing(Storage):
    """Cannot be read now."""

    def read(self, path: str, start: int = 0) -> bytes:
        raise StorageError(f"cannot read {path}: timed out")


def test_while_the_coordinators_own_storage_fails_no_machine_is_refused(run: Storage) -> None:
    proof = MachineProof(probe=".probe-1/probe", token="1", unix_s=time.time())
    answer = asyncio.run(checked(Failing(run.root, sleep=no_sleep), proof))
    assert isinstance(answer, StillWaiting)


HERE = {"orchestrator": "0.1.0", "torch": "2.9.0+cpu", "transformers": "5.0.0", "tokenizers": "0.22.1"}


@pytest.mark.parametrize("name", HERE)
def test_another_version_of_a_package_is_refused_with_both(name: str) -> None:
    for here in ({**HERE, name: "0.0.9"}, {n: v for n, v in HERE.items() if n != name}):
        with raises(MachineError, "machine.packages", name, HERE[name], here.get(name, "not installed")):
            require_packages(HERE, here)


def test_another_build_of_a_version_and_packages_that_the_driver_lacks_are_no_difference() -> None:
    require_packages(HERE, {**HERE, "torch": "2.9.0+cu128", "numpy": "1.0"})
    require_packages(packages_here(), packages_here())
    assert {"orchestrator", "torch"} <= set(packages_here())
