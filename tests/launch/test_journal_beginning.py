"""What the journal of an attempt says at its beginning, whoever begins it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.history.journal.journal_reader import JournalEvent, read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.launch import api
from orchestrator.torchrun import run as torchrun
from tests.launch.runner import Runner


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    job = tiny_config({"train.max_steps": 1000})
    job["data"]["sources"][0]["name"] = "s"  # that of the cursors
    return Runner(job)


def begun(runner: Runner, command: str = "") -> list[JournalEvent]:
    attempt = replace(runner.begin(), command=command)
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, runner.config().flat())
    journal.close()
    return [event for event in read_journal(runner.store.storage).events if event.attempt == attempt.number]


def test_an_attempt_says_the_command_that_would_continue_the_run(runner: Runner) -> None:
    command = api._command(Path("jobs/a b.yaml"), ["train.max_steps=5", "run.storage=s3://me:hush@h/b"])
    (attempt,) = [event for event in begun(runner, command) if event.kind == EventKind.ATTEMPT]
    said = "orchestrator train 'jobs/a b.yaml' train.max_steps=5 'run.storage=s3://***@h/b'"
    assert attempt.fields["command"] == said


def test_a_configuration_that_lies_in_no_file_has_no_command(runner: Runner) -> None:
    assert api._command(runner.config(), ["train.max_steps=5"]) == ""


@pytest.mark.parametrize(("nodes", "said"), [("1", ""), ("2", "--nnodes 2 ")])
def test_under_torchrun_the_command_is_torchruns(
    monkeypatch: pytest.MonkeyPatch, nodes: str, said: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setattr(sys, "argv", ["jobs/torchrun_train.py", "job.yaml", "run.name=a"])
    assert torchrun._command("job.yaml", ["run.name=a"]) == (
        f"torchrun {said}--nproc-per-node 4 jobs/torchrun_train.py job.yaml run.name=a"
    )


def test_an_attempt_says_how_each_source_stands_where_it_begins(runner: Runner) -> None:
    at = runner.launch()
    (sources,) = [event for event in begun(runner) if event.kind == EventKind.SOURCES]
    (name,) = {source.name for source in runner.config().data.sources}
    (plan,) = runner.prepared().plans
    point = runner.store.read_point(at.point_name)
    assert sources.fields == {
        "counts": {name: point.cursor.consumed_samples},
        "tokens": {name: point.cursor.consumed_tokens},
        "num_blocks": {name: plan.num_blocks},
        "weights": {name: 1.0},
    }
    assert point.cursor.consumed_samples > 0
