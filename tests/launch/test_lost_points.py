"""Points that lost their COMMIT, and points that were being deleted: what each command makes of them."""

from __future__ import annotations

import errno
import shutil
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.commit.commit_events import Deleted, DeletePoints
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli.commands import main
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.errors import ResumePointError
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.folders import files
from tests.launch.runner import Runner, rewind
from tests.raising import exits, raises
from tests.storage.failing import FailingDisk


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


def test_a_point_that_lost_its_commit_is_damaged_for_all_and_removed_by_no_start(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (at.point_name for at in (runner.launch(), runner.launch()))
    commit = runner.folder / "points" / newer / "COMMIT"
    content = commit.read_bytes()
    commit.unlink()
    whole = files(runner.folder / "points" / newer)
    for number in range(4):
        attempt = runner.begin() if number else None
        run = orchestrator.open(runner.folder)
        shown = [(row["name"], row["healthy"], row["reason"]) for row in run.list_points()]
        assert shown == [(older, None, ""), (newer, False, "COMMIT is missing")]
        with exits(1):
            main(["verify", str(runner.folder)])
        assert f"{newer}: damaged\n  COMMIT is missing\n" in capsys.readouterr().out
        with exits(1):
            main(["verify", str(runner.folder), newer])
        assert attempt is None or attempt.found.leftovers == ()
    assert files(runner.folder / "points" / newer) == whole
    commit.write_bytes(content)
    assert [row["healthy"] for row in orchestrator.open(runner.folder).verify()] == [True, True]


def test_a_point_named_to_resume_from_that_lost_its_commit_is_refused_as_damaged(runner: Runner) -> None:
    runner.launch()
    newer = runner.launch()
    (runner.folder / "points" / newer.point_name / "COMMIT").unlink()
    with raises(ResumePointError, "point.damaged", newer.point_name, "COMMIT is missing"):
        rewind(runner, newer)


def test_a_point_whose_every_file_vanished_is_shown_until_the_history_goes_on_without_it(
    runner: Runner,
) -> None:
    older, newer = (at.point_name for at in (runner.launch(), runner.launch()))
    shutil.rmtree(runner.folder / "points" / newer)
    run = orchestrator.open(runner.folder)
    assert [(row["name"], row["healthy"]) for row in run.verify()] == [(older, True), (newer, False)]
    assert [damage.point for damage in runner.begin().found.damages] == [newer]
    assert [(row["name"], row["healthy"]) for row in run.verify()] == [(older, True)]


@pytest.mark.parametrize("killed_at", ["COMMIT", "model", "the end"])
def test_a_kill_while_points_are_deleted_is_neither_damage_nor_left_behind(
    runner: Runner, killed_at: str
) -> None:
    first, second = runner.launch(), runner.launch()
    attempt = runner.begin()

    class Killed(Exception):
        pass

    class Dying(RunStore):
        def delete_point(self, name: str) -> None:
            if killed_at != "COMMIT":
                self.storage.delete(f"points/{name}/COMMIT")
            if killed_at == "the end":
                super().delete_point(name)
            raise Killed

    journal = runner.journal(attempt)
    note_beginning(journal, attempt, {})
    committer = PointCommitter(
        Dying(runner.store.storage), journal, attempt.number, {}, {}, lambda: 0.0, run_id=attempt.run_id
    )
    with pytest.raises(Killed):
        committer.perform(DeletePoints(names=(first.point_name,)))
    # nothing more of the journal becomes durable
    left = [second.point_name] if killed_at != "COMMIT" else [first.point_name, second.point_name]
    rows = orchestrator.open(runner.folder).list_points(verify=True)
    assert [(row["name"], row["healthy"]) for row in rows] == [(name, True) for name in left]
    assert runner.plan().point == second.point_name
    again = runner.begin()
    assert again.found.damages == ()
    removed = [first.point_name] if killed_at == "model" else []
    assert [name.point for name in again.found.leftovers] == removed
    assert runner.store.point_names() == left
    assert runner.store.leftovers() == []


def test_points_are_not_deleted_while_the_journal_cannot_say_so(runner: Runner) -> None:
    first = runner.launch()
    attempt = runner.begin()
    stuck = Storage(str(runner.folder), FailingDisk("fsync", errno.EIO), no_sleep)
    journal = JournalWriter(stuck, attempt.number, run_id=attempt.run_id)
    committer = PointCommitter(runner.store, journal, attempt.number, {}, {}, lambda: 0.0)
    deleted = committer.perform(DeletePoints(names=(first.point_name,)))
    assert isinstance(deleted, Deleted)
    assert (deleted.names, deleted.failed) == ((), (first.point_name,))
    assert deleted.reason.startswith("cannot sync ")
    assert runner.store.verify_point(first.point_name) == []
