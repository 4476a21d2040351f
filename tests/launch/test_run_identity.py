"""A run's folder that was deleted, replaced or mixed with another one's: every piece says whose it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.coordinator.attempt.launch_attempts import continue_launch
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import FencedError, OrchestratorError, RefusedError, ResumePointError, StorageError
from orchestrator.faults import no_fault
from orchestrator.launch.start import attempt_claim
from orchestrator.records.steps import StateKey
from tests.checkpoint.samples import key, record, write_vote
from tests.launch.coordinated import Coordinated
from tests.launch.runner import Runner
from tests.raising import raises


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


@pytest.fixture
def other(tiny_config: Any) -> Runner:
    """Another run of the same job, in another folder."""
    return Runner(tiny_config({"train.max_steps": 1000}))


def save(group: Coordinated, at: StateKey) -> list[bool]:
    """The answers to the votes of both ranks."""
    group.report([record(key(step)) for step in range(at.step - 9, at.step + 1)])
    return group.save(at)


# The coordinator looks at its folder whenever it likes: what befalls it does so at one moment.
def all_gone(folder: Path) -> None:
    shutil.rmtree(folder.rename(folder.with_name("gone")))


def run_file_gone(folder: Path) -> None:
    (folder / "run.json").unlink()


def journal_gone(folder: Path) -> None:
    shutil.rmtree(folder / "journal")


def journal_replaced(folder: Path) -> None:
    path = folder / "journal" / "a0001" / "000001.jsonl"
    Path(shutil.copy(path, folder / "copy")).replace(path)


def journal_changed(folder: Path) -> None:
    path = folder / "journal" / "a0001" / "000001.jsonl"
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (all_gone, "run.json is gone"),
        (run_file_gone, "run.json is gone"),
        (journal_gone, "000001.jsonl is gone"),
        (journal_replaced, "000001.jsonl is another file now"),
        (journal_changed, "written were"),
    ],
)
def test_a_launch_whose_folder_is_deleted_commits_nothing_more_and_says_why(
    runner: Runner, harm: Callable[[Path], None], text: str
) -> None:
    with Coordinated(runner.store, runner.begin(), runner.config()) as group:
        assert save(group, key(10)) == [True, True]
        harm(runner.folder)
        assert save(group, key(20)) == [False, False]
        status = group.ended()
        assert (status.ended, status.code) == ("failed", "run.fenced")
        assert text in status.reason
    assert key(20).point_name not in runner.store.point_names()
    assert runner.store.read_end(1) is None


def test_a_launch_in_whose_place_another_run_began_commits_nothing_there(
    runner: Runner, other: Runner, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    runner.folder.symlink_to(tmp_path / "first")
    other.begin()
    (tmp_path / "another").symlink_to(other.folder)
    with Coordinated(runner.store, runner.begin(), runner.config()) as group:
        (tmp_path / "another").replace(runner.folder)
        theirs = other.store.read_run()
        assert theirs is not None
        assert save(group, key(10)) == [False, False]
        status = group.ended()
        assert (status.ended, status.code) == ("failed", "run.fenced")
        assert "run.json" in status.reason
        assert theirs.id in status.reason
    assert runner.store.point_names() == []


@pytest.mark.parametrize("harm", [all_gone, run_file_gone])
def test_a_coordinator_that_restarts_in_a_deleted_folder_goes_on_with_nothing(
    runner: Runner, harm: Callable[[Path], None]
) -> None:
    attempt = runner.begin()
    runner.journal(attempt).close()
    harm(runner.folder)
    with raises(FencedError, "run.fenced"):
        continue_launch(runner.store, attempt, "host", no_fault)
    assert not (runner.folder / "attempts" / "0002.json").exists()


@pytest.mark.parametrize("left", ["points", "attempts", "journal"])
def test_nothing_begins_beside_what_is_left_of_a_run(runner: Runner, left: str) -> None:
    runner.launch()
    for path in runner.folder.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sorted(runner.folder.rglob("*"))
    values = "run.no_run_file", runner.folder, f"{left} of a run"
    with raises(RefusedError, *values):
        runner.plan()
    with raises(RefusedError, *values):
        orchestrator.open(runner.folder)
    assert sorted(runner.folder.rglob("*")) == before
    start = attempt_claim.claimed(runner.store, runner.config(), runner.prepared(), 0)
    with raises(RefusedError, *values), start:
        pass
    assert sorted(runner.folder.rglob("*")) == before


def test_a_point_of_another_run_is_shown_as_damaged_and_never_resumed(runner: Runner, other: Runner) -> None:
    name = runner.launch().point_name
    assert other.launch().point_name == name, "both runs' first point has this name"
    shutil.rmtree(runner.folder / "points" / name)
    shutil.copytree(other.folder / "points" / name, runner.folder / "points" / name)
    (row,) = orchestrator.open(runner.folder).verify()
    (damage,) = row["damaged"]
    assert damage["file"] == "COMMIT"
    assert f"belongs to run {other.begin().run_id}, run.json says" in damage["reason"]
    assert survey(runner.store).points == ()
    with raises(ResumePointError, "point.none_healthy", " 1 ", name):
        runner.begin()


@pytest.mark.parametrize("file", ["attempts/0002.json", "journal/a0002/000001.jsonl"])
def test_claims_and_journals_of_another_run_are_refused_by_name(
    runner: Runner, other: Runner, file: str
) -> None:
    for each in (runner, other):
        each.launch()
        each.launch()
    shutil.copyfile(other.folder / file, runner.folder / file)
    ids = [run.id for each in (runner, other) if (run := each.store.read_run()) is not None]
    assert len(ids) == 2
    for read in (runner.plan, orchestrator.open(runner.folder).points):
        with raises(OrchestratorError, "run.mixed_files", *ids):
            read()


def test_the_end_that_another_run_said_is_not_this_runs_end(runner: Runner, other: Runner) -> None:
    runner.begin()
    other.launch()
    shutil.copyfile(other.folder / "attempts" / "0001.end.json", runner.folder / "attempts" / "0001.end.json")
    assert other.store.read_end(1) is not None
    assert runner.store.read_end(1) is None


def test_a_save_that_meets_a_name_that_exists_says_why(runner: Runner) -> None:
    write_vote(runner.store.storage, key(10), rank=0)
    with raises(StorageError, "storage.name_taken", key(10).point_name, "EEXIST"):
        write_vote(runner.store.storage, key(10), rank=0)
