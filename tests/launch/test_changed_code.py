"""A start warns if the code of `model.factory` is not the code that trained the state which it continues: a
point of its own run, or the point of another run that a fork begins with.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.run_file import RUN_FILE
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.coordinator.attempt.forking import code_changes, trained_code
from orchestrator.data.common.user_code import reading_only
from orchestrator.inspect.run import Run
from orchestrator.launch.branch import fork as forks
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.state.memory import ParallelChoice
from orchestrator.trainer.dry_run.model_dry_run import is_to_try
from tests.launch.runner import Runner

FIRST, SECOND = "first = 1\n", "second = 2\n"
TRAINS = ParallelChoice(num_shards=1, reason="one worker")


class Of(Runner):
    """Starts of the run `name` beside another one's."""

    def __init__(self, mapping: Mapping[str, Any], name: str = "tiny", **resume: str) -> None:
        run = {**mapping["run"], "name": name}
        super().__init__({**mapping, "run": run, "resume": {**mapping["resume"], **resume}})

    def another(self, name: str, **resume: str) -> Of:
        return Of(self.mapping, name, **resume)

    def begin(self, *args: Any, **data: Any) -> Any:
        """As an attempt that trains."""
        return replace(super().begin(*args, **data), parallel=TRAINS)

    def forked(self, name: str, point: str = "latest") -> Of:
        fork = self.another(name)
        Run(self.folder).fork(fork.folder, point)
        return fork


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "made_here.py").write_text(FIRST)
    monkeypatch.syspath_prepend(folder)
    return folder / "made_here.py"


@pytest.fixture
def run(tiny_config: Any, module: Path) -> Of:
    changes = {"train.max_steps": 1000, "model.config": None, "model.factory": "made_here:build"}
    return Of(tiny_config(changes))


def warnings(plan: ResumePlan) -> list[str]:
    return [note for note in plan.notes if "made_here.py (changed)" in note]


def assert_warned(fork: Of, *names: object) -> None:
    """By the plan and at the start, with these names."""
    plan = fork.plan()
    assert plan.action == "resume"
    (warning,) = warnings(plan)
    assert all(str(name) in warning for name in names), warning
    assert code_changes(fork.store, fork.config(), plan.point) == [warning]
    assert is_to_try(plan), "what the other code makes may be no model"


def assert_silent(fork: Of) -> None:
    plan = fork.plan()
    assert plan.action == "resume"
    assert warnings(plan) == []
    assert code_changes(fork.store, fork.config(), plan.point) == []
    assert not is_to_try(plan)


def test_a_fork_keeps_the_record_of_the_code_that_trained_its_point(run: Of, module: Path) -> None:
    point = run.launch().point_name
    fork = run.forked("mine")
    assert_silent(fork)
    module.write_text(SECOND)
    assert_warned(fork, run.folder, point)
    shutil.rmtree(run.folder)
    assert_warned(fork, run.folder, point)
    with reading_only():
        assert warnings(fork.plan()) == [], "the page and `status` look for no code"
    assert fork.launch().attempt == 2
    assert_silent(fork)


def test_a_start_that_begins_a_fork_is_compared_with_the_other_run(run: Of, module: Path) -> None:
    point = run.launch().point_name
    fork = run.another("mine", **{"from": f"{run.folder}/points/{point}"})
    assert_silent(fork)
    module.write_text(SECOND)
    assert_warned(fork, run.folder, point)
    attempt = fork.begin()
    journal = fork.journal(attempt)
    note_beginning(journal, attempt, fork.config().flat())
    journal.close()
    fork.store.write_end(attempt.number, "failed", "killed before its first save", attempt.run_id)
    assert_warned(fork, run.folder, point)  # the killed attempt kept nothing
    shutil.rmtree(run.folder)
    assert_silent(fork)  # its own record is that of an attempt after the point
    module.write_text(FIRST)
    assert_silent(fork)


def test_only_attempts_up_to_the_point_count(run: Of, module: Path) -> None:
    first = run.launch().point_name
    module.write_text(SECOND)
    assert_warned(run, "attempt 1")
    second = run.launch().point_name
    assert_silent(run)
    assert_silent(run.forked("of-second", second))
    assert_warned(run.forked("of-first", first), run.folder, first)
    assert_warned(run.another("tiny", **{"from": first}), "attempt 1")
    assert_warned(run.another("new", **{"from": f"{run.folder}/points/{first}"}), first)
    module.write_text(FIRST)
    assert_warned(run, "attempt 2")
    assert_silent(run.another("tiny", **{"from": first}))


def test_a_fork_of_a_fork_has_the_record_of_the_run_that_trained(run: Of, module: Path) -> None:
    run.launch()
    middle = run.forked("middle")
    begun = run.another("begun", **{"from": f"{run.folder}/points/{run.plan().point}"})
    of_begun = begun.begin().forked_from
    assert of_begun is not None
    last = middle.forked("last")
    of_third = begun.another("third", **{"from": f"{begun.folder}/points/{begun.store.point_names()[0]}"})
    module.write_text(SECOND)
    for fork in (last, of_third):
        assert_warned(fork)
    shutil.rmtree(run.folder)
    shutil.rmtree(middle.folder)
    assert_warned(last)
    assert_silent(of_third)  # nobody copied the record, and its run is gone


@pytest.mark.parametrize("lost", ["deleted", "another run", "unreadable"])
def test_where_the_record_is_missing_and_the_other_run_cannot_be_read_nothing_is_said(
    lost: str, run: Of, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.launch()
    fork = run.another("mine")
    monkeypatch.setattr(forks, "end_at_once", cut_off)
    with pytest.raises(KeyboardInterrupt):
        Run(run.folder).fork(fork.folder, "latest")
    module.write_text(SECOND)
    assert_warned(fork, run.folder)
    path = run.folder / RUN_FILE
    match lost:
        case "deleted":
            shutil.rmtree(run.folder)
        case "another run":
            path.write_bytes((fork.folder / RUN_FILE).read_bytes())
        case "unreadable":
            path.write_bytes(b"{")
    assert_silent(fork)
    assert trained_code(fork.store, fork.plan().point) is None


def cut_off(*args: object) -> None:
    """As a kill between the parent file and the journal."""
    raise KeyboardInterrupt


def test_a_run_without_a_record_counts_as_unchanged(run: Of, module: Path) -> None:
    attempt = run.begin()
    journal = run.journal(attempt)
    note_beginning(journal, replace(attempt, code={}), run.config().flat())
    journal.close()
    run.store.write_end(attempt.number, "failed", "", attempt.run_id)
    module.write_text(SECOND)
    assert code_changes(run.store, run.config(), None) == []
