"""Callbacks: called with what is in the history, in a process in which they can change nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import EvalRecord
from orchestrator.storage.files import Storage
from orchestrator.trainer import callback_process
from orchestrator.trainer.callback_process import Callbacks, require_callback
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.coordinator.builders import FailingDisk, no_sleep
from tests.raising import raises
from tests.trainer.callbacks import FILE
from tests.trainer.launch import WAIT_S, Launch
from tests.trainer.member import Plan, members, run_to_end, tiny_job

EVALUATED = EvalRecord(
    part="holdout", attempt=1, generation=1, step=4, loss=1.5, perplexity=None, targets=1, samples=1
)
class CountedCalls(Launch):
    """Counts how often members report evaluations."""

    num_evaluated = 0

    def _note(self, name: str, method: str, arguments: Sequence[Any]) -> None:
        super()._note(name, method, arguments)
        self.num_evaluated += method == "evaluated"


COMMITTED = EventKind.POINT_COMMITTED
MODULE = "tests.trainer.callbacks"


def job_of(folder: Path, *names: str, **changes: Any) -> TrainJob:
    callbacks = [f"{MODULE}:{name}" for name in names]
    return replace(tiny_job(train__callbacks=callbacks, **changes), run_uri=str(folder))


def called(folder: Path) -> list[tuple[int, str, Any]]:
    return [tuple(json.loads(line)) for line in (folder / FILE).read_text().splitlines()]


def errors(launch: Launch) -> list[str]:
    return [e.fields["text"] for e in launch.journal().events if e.kind == EventKind.CALLBACK_FAILED]


def test_rank_0_calls_each_method_once_for_each_fact_in_their_order(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Recorder", resume__every_steps=4)
    launch = run_to_end(tmp_path, 2, job=job)
    calls = called(tmp_path)
    assert len({pid for pid, _, _ in calls}) == 1
    assert calls[0][1:] == ("on_start", [1, 0, 0])
    assert calls[1][1:] == ("on_group_change", [1, 2, 0])
    assert [value for _, method, value in calls if method == "on_step"] == [[1, step] for step in range(1, 9)]
    points = [value for _, method, value in calls if method == "on_point"]
    assert points[-1] == launch.last_point().key.point_name
    assert calls[-1][1:] == ("on_end", "done")
    assert errors(launch) == []


@pytest.mark.chaos
def test_a_callback_changes_no_bit_whatever_it_does_and_its_first_errors_are_reported(tmp_path: Path) -> None:
    expected = run_to_end(tmp_path / "without", 2)
    launch = run_to_end(tmp_path / "with", 2, job=job_of(tmp_path, "Hostile", "Recorder"))
    assert launch.last_point().state_digest == expected.last_point().state_digest
    texts = errors(launch)
    begins = [f"{MODULE}:Hostile.on_step raised ValueError: step {step} (" for step in (1, 2, 3, 4)]
    told = [[text for text in texts if text.startswith(each)] for each in begins]
    assert [len(each) for each in told] == [1, 1, 1, 0]
    assert all("callbacks.py:" in text and text.endswith(" in on_step)") for (text,) in told[:3])
    assert f"{MODULE}:Hostile.on_step raised 8 times in all" in texts
    assert len([call for call in called(tmp_path) if call[1] == "on_step"]) == 8, "the other one is called"


@pytest.mark.chaos
def test_what_a_callback_is_called_with_can_be_read_in_the_run_at_that_moment(tmp_path: Path) -> None:
    """The journal cannot be written while the coordinator is asked several times to take an evaluation."""
    job = job_of(tmp_path, "Reader", eval__every_steps=2, resume__every_steps=3)
    disk = FailingDisk()
    on_disk = {"kind": CountedCalls, "storage": Storage(str(tmp_path), disk, no_sleep)}
    with members(tmp_path, "a", {"a": Plan(hold=("evaluating", 6))}, job=job, **on_disk) as group:
        launch = group.launch
        assert isinstance(launch, CountedCalls)
        launch.wait_for(lambda: launch.held("a") is not None)
        until = time.monotonic() + WAIT_S
        while not (tmp_path / FILE).exists():  # callbacks are at work
            assert time.monotonic() < until
            with launch.changed:
                launch.changed.wait(0.1)
        launch.coordinator._journal.close()  # the next segment is on the disk that fails
        disk.broken, before = True, launch.num_evaluated
        launch.release("a")
        launch.wait_for(lambda: launch.num_evaluated >= before + 5)
        disk.broken = False
        group.finish()
    calls = [(method, value) for _, method, value in called(tmp_path)]
    assert [value for method, value in calls if method == "on_eval"] == [
        [part, step, True] for step in (2, 4, 6, 8) for part in ("held", "few")
    ]
    assert [value for method, value in calls if method == "on_step"] == [[n, True] for n in range(1, 9)]
    points = [event.fields["point"] for event in launch.journal().events if event.kind == COMMITTED]
    assert [value for method, value in calls if method == "on_point"] == [[name, True] for name in points]
    assert errors(launch) == []


@pytest.mark.chaos
def test_an_error_saves_and_stops_the_run_if_that_is_chosen(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Hostile", train__on_callback_error="stop", train__max_steps=100_000)
    with members(tmp_path, "ab", job=job) as group:
        status = group.launch.wait_for_end()
        group.join_all()
    assert status.ended == "stopped"
    assert "train.on_callback_error=stop" in status.reason + str(group.launch.journal().events[-1].fields)
    assert group.launch.last_point().key.step >= 1


@pytest.mark.chaos
def test_a_process_that_ends_is_reported_and_training_continues(tmp_path: Path) -> None:
    launch = run_to_end(tmp_path, 1, job=job_of(tmp_path, "Exits"))
    assert launch.last_point().key.step == 8
    (text,) = errors(launch)
    assert "exit code 3" in text


@pytest.mark.chaos
def test_after_the_death_of_rank_0_another_member_calls_and_no_step_off_the_history_is_seen(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, "Recorder", train__max_steps=12)
    with members(tmp_path, "ab", {"a": Plan(kill=("applied", 6))}, job=job) as group:
        group.finish()
    launch = group.launch
    calls, history = called(tmp_path), launch.journal().records
    steps = [tuple(value) for _, method, value in calls if method == "on_step"]
    assert len(set(steps)) == len(steps), "none twice"
    assert set(steps) <= {(record.generation, record.step) for record in history}
    assert [step for _, step in steps] == sorted(step for _, step in steps)
    assert calls[-1][1:] == ("on_end", "done")
    assert steps[-1][1] == 12


@pytest.mark.chaos
def test_an_evaluation_reaches_on_eval(tmp_path: Path) -> None:
    view = run_to_end(tmp_path / "run", 1).views[0]
    failed: list[str] = []
    callbacks = Callbacks([f"{MODULE}:Recorder"], str(tmp_path), failed.append)
    callbacks.enter(view, Cursor(), ())
    callbacks.evaluated([EVALUATED])
    callbacks.end("done")
    assert called(tmp_path)[2][1:] == ("on_eval", ["holdout", 4, 1.5])
    assert failed == []


@pytest.mark.chaos
def test_a_callback_that_takes_longer_than_training_is_ended_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback_process, "HELD", 2)
    view = run_to_end(tmp_path / "run", 1).views[0]
    failed: list[str] = []
    callbacks = Callbacks([f"{MODULE}:Recorder"], str(tmp_path), failed.append)
    callbacks.enter(view, Cursor(), ())
    for _ in range(1000):  # the process is still being started
        callbacks.evaluated([EVALUATED])
    callbacks.end("done")
    assert any("2 calls to come" in text for text in failed)


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("Nothing", "callback.not_callable", ["train.callbacks", "Nothing"]),
        ("NeedsArguments", "callback.not_callable", ["NeedsArguments", "path"]),
        ("Hookless", "callback.without_hook", ["Hookless", "on_step"]),
        ("Misspelled", "callback.unknown_hook", ["on_stpe", "on_step"]),
        ("FILE", "callback.not_callable", ["FILE"]),
    ],
)
def test_what_is_no_callback_is_refused_by_name(name: str, code: str, values: list[str]) -> None:
    with raises(ConfigError, code, *values):
        require_callback(f"{MODULE}:{name}")
