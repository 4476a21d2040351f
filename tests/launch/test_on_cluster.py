"""What a launch says at its start and at its end."""

from __future__ import annotations

import os
import re
import shutil
import signal
from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.launch.process import launch_report
from orchestrator.launch.process.launch_report import (
    FolderAtEnd,
    end_lines,
    next_commands,
    say_done_before,
    say_end,
    trained_again,
    wait_for_points,
)
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.process.stop_signals import stop_on_signals
from orchestrator.records.run_status import RunStatus
from tests.elastic.builders import status
from tests.launch.runner import Runner

GONE = (
    "/somewhere/runs/r/run.json is gone: the run's folder was deleted or moved while this launch wrote into "
    "it, and nothing that it trained since its newest resume point can be saved any more; restore the folder "
    "from a copy, or start the run anew under another run.name"
)


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


def test_a_launch_that_trained_nothing_promises_no_proof(tiny_config: Any) -> None:
    job = parse_config(tiny_config({}))
    assert end_lines(job, status(None, ended="done"), FolderAtEnd(run=True, point=False)) == [
        "newest resume point: no resume point was written"
    ]


def commands(job: JobConfig, outcome: str, has_point: bool = True) -> list[str]:
    """The commands that are proposed."""
    head, *lines = next_commands(job, outcome, has_point=has_point)
    assert head == ("next (the same command continues it):" if outcome == "stopped" else "next:")
    assert all(f" {job.run.run_uri} " in line for line in lines)
    return [line.split()[1] for line in lines]


def test_what_is_proposed_fits_how_the_run_ended_and_what_it_has(tiny_config: Any) -> None:
    plain = parse_config(tiny_config({}))
    assert commands(plain, "done") == ["export", "points", "audit"]
    assert commands(plain, "done", has_point=False) == ["points", "audit"]
    assert commands(plain, "stopped") == ["points", "audit"]
    assert commands(plain, "failed") == ["status", "logs"]
    held_out = parse_config(tiny_config({"data.holdout": 0.01}))
    assert commands(held_out, "done") == ["evaluate", "export", "points", "audit"]
    lines: list[str] = []
    say_done_before(lines.append, held_out, "the stop is reached already")
    assert lines == ["done: the stop is reached already", *next_commands(held_out, "done", has_point=True)]
    everything = next_commands(plain, "done", has_point=True)
    assert not [line for line in everything if "=" in line], "no value that fits no job"


@pytest.mark.parametrize(("damaged", "said"), [(1, "steps 11 to 20 (10 of"), (2, "steps 11 to 30 (20 of")])
def test_a_fallback_to_an_older_point_says_how_many_steps_are_trained_again(
    runner: Runner, damaged: int, said: str
) -> None:
    points = [runner.launch().point_name for _ in range(1 + damaged)]
    assert trained_again(runner.begin()) == []
    for name in points[1:]:
        shutil.rmtree(runner.folder / "points" / name / "state")
    (line,) = trained_again(runner.begin())
    assert line == f"the newest whole resume point is {points[0]}: {said} them) are trained again"


def end_of(runner: Runner, ended: RunStatus, capsys: pytest.CaptureFixture[str]) -> tuple[str, str | None]:
    """What is said, and the point that the result names."""
    run = runner.store.read_run()
    with Progress.shown(0.0) as progress:
        left = say_end(progress, runner.config(), ended, runner.store, run.id if run else "lost")
    return capsys.readouterr().err, left.newest_point


def test_an_end_names_the_newest_point_and_what_to_try_next(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    point = runner.launch().point_name
    uri = runner.config().run.run_uri
    ended = status(10, ended="done", reason="done at step 10", newest_point=point)
    said, left = end_of(runner, ended, capsys)
    assert f"newest resume point: {uri}/points/{point}\n" in said
    assert f"orchestrator points {uri}" in said
    assert f"orchestrator export {uri} OUT" in said
    assert left == point


def test_after_the_runs_folder_was_deleted_the_end_names_nothing_in_it(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    point = runner.launch().point_name
    shutil.rmtree(runner.folder)
    said, left = end_of(runner, status(12, ended="failed", reason=GONE, newest_point=point), capsys)
    assert f"newest resume point: none, {runner.config().run.run_uri}/points/{point} is gone\n" in said
    assert "orchestrator points" not in said
    assert left is None


def test_after_another_run_took_the_folders_place_the_end_sends_nobody_to_it(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner.store.create_run("mine", runner.prepared().identity())
    ended = status(12, ended="failed", reason=GONE, newest_point="00000010-a0001-g0001")
    shutil.rmtree(runner.folder)
    runner.launch()
    with Progress.shown(0.0) as progress:
        say_end(progress, runner.config(), ended, runner.store, run.id)
    assert "orchestrator points" not in capsys.readouterr().err


def test_an_end_at_a_storage_that_cannot_be_read_says_what_is_not_known(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    point = runner.launch().point_name
    (runner.folder / "run.json").write_text("cut")
    with Progress.shown(0.0) as progress:
        ended = status(10, ended="done", reason="done at step 10", newest_point=point)
        left = say_end(progress, runner.config(), ended, runner.store, "any").newest_point
    said = capsys.readouterr().err
    assert re.search(rf"points/{point} \(whether it is there is not known: .*run.json", said)
    assert "orchestrator points" not in said
    assert left == point


@pytest.mark.parametrize(
    ("answers", "limit_s", "warned"),
    [
        ([False, False, True], 300.0, False),  # points were still being deleted
        ([None], 300.0, True),  # the coordinator is gone
        ([False] * 3, 0.0, True),
    ],
)
def test_a_launch_that_ended_waits_for_the_points_that_are_deleted_and_says_when_it_does_not(
    answers: list[bool | None], limit_s: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_report, "SETTLE_LIMIT_S", limit_s)
    left, said = list(answers), list[str]()
    wait_for_points(lambda most_s: left.pop(0), said.append)
    assert bool(said) == warned
    assert left == (answers if not limit_s else []), "it asks until the answer is final"


def test_a_signal_that_comes_while_points_are_deleted_shortens_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "1")  # less than what the end itself needs
    asked, said = list[float](), list[str]()

    def settle(most_s: float) -> bool:
        asked.append(most_s)
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    with stop_on_signals(said.append, said.append, lambda text: None):
        wait_for_points(settle, said.append)
    assert len(asked) == 1
    assert "without waiting for it" in said[-1]
