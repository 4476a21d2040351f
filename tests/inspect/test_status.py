"""A run at a glance, from storage alone: alive or not by change, where it stands, what went wrong last."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli import commands as cli
from orchestrator.errors import StorageError
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect import run as history
from orchestrator.inspect.run import Run
from orchestrator.inspect.status import snapshot, tail, view
from orchestrator.inspect.status.view import status_lines
from orchestrator.storage.disk import OsDisk
from orchestrator.text import count
from tests.checkpoint.samples import key, record, start
from tests.inspect.watched_attempt import Attempt
from tests.launch.runner import Runner
from tests.raising import raises

SHORT_S = 0.3
LONG_S = 120.0  # until somebody who lives has shown it, however slow the machine is


def run_of(runner: Runner) -> Run:
    return Run(runner.folder)


def test_a_run_that_trains_is_running_with_its_workers_its_speed_and_when_it_is_done(
    runner: Runner,
) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 100, step_s=0.5)
    with attempt.alive():
        view = run_of(runner).status(LONG_S)
    assert (view.state, view.alive, view.step, view.total_steps) == ("running", True, 100, 1000)
    tokens = count(record(key(100)).consumed_tokens)
    assert view.verdict == (
        "running: step 100 of 1,000, 2 of 2 workers. "
        f"If everything died now, 100 steps ({tokens} tokens, 50 s of work) would be trained again"
    )
    per_step = record(key(2)).consumed_tokens - record(key(1)).consumed_tokens
    assert view.tokens_per_s == per_step / 0.5
    assert view.eta_s == 900 * 0.5
    assert view.layout is None, "journals of earlier versions do not say it"
    assert view.last_fault is None
    assert not view.is_broken


def evaluate(attempt: Attempt, step: int, part: str, loss: float | None, generation: int = 1) -> None:
    attempt.journal.event(
        EventKind.EVALUATED,
        generation=generation,
        step=step,
        part=part,
        loss=loss,
        perplexity=None if loss is None else math.exp(loss),
        targets=640,
        samples=64,
        per_source={},
        metrics={},
        seconds=1.25,
    )
    attempt.journal.flush()


def test_a_status_has_the_parts_of_the_newest_state_that_was_evaluated(runner: Runner) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 10)
    assert run_of(runner).status(0.0).last_evaluation == ()
    assert "last eval" not in "".join(status_lines(run_of(runner).status(0.0)))
    for step, loss in ((5, 4.0), (10, 3.0)):
        evaluate(attempt, step, "holdout", loss)
        evaluate(attempt, step, "code", None)
    attempt.steps(11, 12)
    view = run_of(runner).status(0.0)
    assert (view.last_evaluation_step, [at.part for at in view.last_evaluation]) == (10, ["holdout", "code"])
    (line,) = [line for line in status_lines(view) if "last eval" in line]
    assert line.startswith("  last eval   10  holdout: loss 3.0000, perplexity 20.09; code: loss none  20")
    assert line.endswith(" UTC")
    assert "step 10, holdout: loss 3.0000, perplexity 20.09; code: loss none" in run_of(runner)._repr_html_()
    first, second = view.to_json()["last_evaluation"]
    assert first == {
        "part": "holdout", "loss": 3.0, "perplexity": math.exp(3.0), "samples": 64, "seconds": 1.25
    }  # fmt: skip
    assert (second["part"], second["loss"], second["perplexity"]) == ("code", None, None)


def test_an_evaluation_of_a_state_that_was_lost_is_not_shown(runner: Runner) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 10)
    evaluate(attempt, 5, "holdout", 4.0)
    evaluate(attempt, 10, "holdout", 3.0)
    attempt.journal.generation(start(2, key(7, attempt=attempt.number), attempt.number))
    attempt.journal.flush()
    assert run_of(runner).status(0.0).last_evaluation_step == 5
    evaluate(attempt, 7, "holdout", 3.5, generation=2)
    assert run_of(runner).status(0.0).last_evaluation_step == 7


@pytest.mark.parametrize(
    ("num_shards", "said"),
    [(1, "replicate: each holds the whole state"), (2, "shard: the state in 2 parts")],
)
def test_a_status_says_how_the_newest_group_holds_the_state(
    runner: Runner,
    num_shards: int,
    said: str,
) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    again = replace(start(2, None, attempt.number), world_size=2, members=("a", "b"), num_shards=num_shards)
    attempt.journal.generation(again)
    attempt.journal.flush()
    view = run_of(runner).status(0.0)
    assert view.layout == said
    assert f"  state       {said}" in status_lines(view)


def test_a_worker_that_died_since_is_not_counted_and_is_the_last_fault(runner: Runner) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 3)
    attempt.journal.event(EventKind.MEMBER_DEAD, member="b", reason="its node died")
    attempt.journal.flush()
    with attempt.alive():
        view = run_of(runner).status(LONG_S)
    assert (view.state, view.workers, view.workers_wanted) == ("running", 1, 2)
    assert view.last_fault == "worker 1 (10.0.0.7, pid 22506) lost: its node died"
    attempt.journal.event(
        EventKind.UNRESPONSIVE, reason="worker 0 (10.0.0.7, pid 1) has not answered for 5.0 s"
    )
    attempt.journal.flush()
    assert run_of(runner).status(0).last_fault == "worker 0 (10.0.0.7, pid 1) has not answered for 5.0 s"
    attempt.journal.event(EventKind.FEEDER_DIED, pid=30080, host="10.0.0.7", reason="its process died")
    attempt.journal.flush()
    assert run_of(runner).status(0).last_fault == "the feeder (10.0.0.7, pid 30080) died: its process died"
    attempt.journal.event(EventKind.LEFT_OUT, member="a", reason="it did not answer")
    attempt.journal.flush()
    with attempt.alive():
        view = run_of(runner).status(LONG_S)
    assert (view.state, view.workers) == ("waiting", 0)
    assert view.verdict.startswith("waiting for workers at step 3 of 1,000: 0 of 2 workers are left. If")


def test_workers_that_ended_because_the_last_state_was_not_saved_are_not_lost_and_the_save_is_the_fault(
    runner: Runner,
) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    attempt.journal.event(EventKind.SAVE_GIVEN_UP, point="p2", reason="no room", retry_s=5.0)
    for member in "ab":
        attempt.journal.event(EventKind.MEMBER_FAILED, member=member, error="UnsavedError", text="for 300 s")
    attempt.journal.flush()
    assert run_of(runner).status(0).last_fault == "save given up p2: no room"
    attempt.journal.event(EventKind.MEMBER_FAILED, member="b", error="OSError", text="OSError: no")
    attempt.journal.flush()
    assert run_of(runner).status(0).last_fault == "worker 1 (10.0.0.7, pid 22506) lost: OSError: no"


def test_a_run_below_its_minimum_waits_also_where_a_worker_is_left_and_a_drained_one_is_no_fault(
    runner: Runner,
) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 3)
    attempt.journal.event(EventKind.WAITING, needed=2, there=1, reason="1 of at least 2 members are there")
    attempt.journal.event(EventKind.MEMBER_LEFT, member="b", reason="its node is about to be taken away")
    attempt.journal.flush()
    with attempt.alive():
        view = run_of(runner).status(LONG_S)
    assert (view.state, view.workers, view.last_fault) == ("waiting", 1, None)
    assert view.verdict.startswith(
        "waiting for workers at step 3 of 1,000: 1 of at least 2 workers are there. If"
    )
    assert view.eta_s is None


def test_a_run_without_an_end_and_without_a_sign_of_life_is_not_running(runner: Runner) -> None:
    point = runner.launch()
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(11, 12)
    view = run_of(runner).status(SHORT_S)
    assert (view.state, view.alive, view.is_broken) == ("gone", False, True)
    assert view.verdict.endswith(
        f"the same command again: it continues from {point.point_name}; 2 steps (512 tokens) after it are "
        "trained again"
    )
    assert view.newest_point == point.point_name


@pytest.mark.parametrize("label", [10, 20])
def test_a_resumed_run_says_what_would_be_lost_before_it_has_a_point_of_its_own_however_it_counts(
    runner: Runner,
    label: int,
) -> None:
    runner.launch()
    attempt = Attempt(runner)
    attempt.begin()
    for done in (1, 2, 3):
        trained = record(key(10 + done)).consumed_tokens
        attempt.steps(label + done, label + done, consumed_tokens=trained)
    with attempt.alive():
        view = run_of(runner).status(LONG_S)
    assert view.verdict.endswith(
        "If everything died now, 3 steps (768 tokens, 1.5 s of work) would be trained again"
    )


def test_an_attempt_that_has_not_formed_a_group_is_starting_and_still_shows_where_the_run_stands(
    runner: Runner,
) -> None:
    runner.launch()
    attempt = Attempt(runner)
    with attempt.alive():
        view = run_of(runner).status(LONG_S)
    assert (view.state, view.step, view.attempt) == ("starting", 10, 2)


def test_an_end_is_told_at_once_with_its_reason(runner: Runner) -> None:
    runner.launch()
    run = run_of(runner)
    view = run.status(1e9)
    assert (view.state, view.verdict) == ("stopped", "stopped: asked to")
    assert repr(run) == f"Run('{runner.folder}': stopped: asked to, newest point 00000010-a0001-g0001)"
    attempt = runner.begin()
    runner.store.write_end(attempt.number, "failed", "cannot write", attempt.run_id)
    assert run.status().is_broken


def test_a_look_reads_only_the_newest_segments_of_a_long_journal(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail, "LEAST_BYTES", 1 << 16)
    attempt = Attempt(runner, segment_bytes=1 << 16)
    attempt.begin()
    attempt.steps(1, 900)
    segments = sorted((runner.folder / "journal" / "a0001").iterdir())
    assert len(segments) > 4
    segments[-3].unlink()
    segments[-3].mkdir()  # whoever read it would fail
    view = run_of(runner).status(SHORT_S)
    assert (view.step, view.tokens_per_s is not None) == (900, True)
    segments[-2].unlink()
    segments[-2].mkdir()
    with raises(StorageError, "run.changed_while_read", segments[-2].name):
        run_of(runner).status(SHORT_S)


class FailingDisk(OsDisk):
    """While it is broken a sync fails after the bytes were written, or nothing can be written at all."""

    broken = ""

    def write(self, handle: int, data: memoryview) -> int:
        if self.broken == "write":
            raise OSError(28, "No space left on device")
        return super().write(handle, data)

    def fsync(self, handle: int) -> None:
        if self.broken == "sync":
            raise OSError(5, "Input/output error")
        super().fsync(handle)


@pytest.mark.parametrize("how", ["sync", "write"])
def test_while_storage_fails_and_after_it_a_run_is_seen_as_it_is(runner: Runner, how: str) -> None:
    disk = FailingDisk()
    attempt = Attempt(runner, disk=disk)
    attempt.begin()
    attempt.steps(1, 2, step_s=0.5)
    disk.broken = how
    for step in range(3, 33):
        with pytest.raises(StorageError):
            attempt.steps(step, step, step_s=0.5)
    assert len(list((runner.folder / "journal" / "a0001").iterdir())) == 30
    with attempt.alive():
        assert run_of(runner).status(LONG_S).state == "running"
        disk.broken = ""
        attempt.steps(33, 33, step_s=0.5)
        view = run_of(runner).status(LONG_S)
    assert (view.state, view.workers, view.step) == ("running", 2, 33)
    per_step = record(key(2)).consumed_tokens - record(key(1)).consumed_tokens
    assert view.tokens_per_s == per_step / 0.5
    assert len(tail.read_tail(runner.store.storage).steps) == 33


def test_a_line_in_the_middle_of_being_written_and_a_loss_that_is_no_number_do_no_harm(
    runner: Runner,
) -> None:
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 3, loss=float("nan"))
    segment = next((runner.folder / "journal" / "a0001").iterdir())
    segment.write_bytes(segment.read_bytes()[:-20])
    view = run_of(runner).status(SHORT_S)
    assert (view.step, view.loss) == (2, None)
    json.dumps(view.to_json(), allow_nan=False)


def test_a_frame_says_by_one_clock_for_how_long_no_step_came_and_not_that_of_a_step_that_came(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "WATCH_S", LONG_S)
    for module in (snapshot, view):
        monkeypatch.setattr(module, "STILL_S", 1e-6)
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 1)
    with attempt.alive():
        views = run_of(runner).looks(every_s=0.01)
        frames = ["\n".join(status_lines(next(views))) for _ in range(2)]
        attempt.steps(2, 2)
        frames.append("\n".join(status_lines(next(views))))
    assert ["no step for" in frame for frame in frames] == [False, True, False]
    times = [re.search(r"last step .* UTC(.*)", frame)[1] for frame in frames]  # type: ignore[index]
    assert times[1] == "", "the writer's clock says another number"
    assert times[0].endswith(" ago")
    assert times[2].endswith(" ago")


def test_who_watches_sees_the_run_go_on_and_stand_still_and_end(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "WATCH_S", LONG_S)
    attempt = Attempt(runner)
    attempt.begin()
    attempt.steps(1, 1)
    with attempt.alive():
        views = run_of(runner).looks(every_s=0.01)
        assert (first := next(views)).step == 1
        assert first.quiet_s == 0.0
        assert (second := next(views)).quiet_s is not None
        assert second.quiet_s > 0
        attempt.steps(2, 2)
        assert [(view.step, view.quiet_s) for view in (next(views),)] == [(2, 0.0)]
        attempt.store.write_end(attempt.number, "done", "done at step 2", attempt.run_id)
        assert [view.state for view in views] == ["done"]


def test_the_time_without_a_step_counts_from_the_newest_generation(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "WATCH_S", LONG_S)
    attempt = Attempt(runner)
    attempt.begin()
    with attempt.alive():
        views = run_of(runner).looks(every_s=0.01)
        before = [next(views) for _ in range(2)]
        again = replace(start(2, None, attempt.number), world_size=2, members=("a", "b"))
        attempt.journal.generation(again)
        attempt.journal.flush()
        after = next(views)
    assert [view.state for view in (*before, after)] == ["running"] * 3
    assert [view.step for view in (*before, after)] == [None] * 3
    assert [view.quiet_s == 0.0 for view in (*before, after)] == [True, False, True]


def test_the_command_prints_the_verdict_first_or_one_document_and_ends_with_1_if_somebody_should_look(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner.launch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", str(runner.folder)])
    assert not ended.value.code
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{runner.folder}: stopped: asked to"
    assert out[1].startswith("  last step   10  loss ")
    assert out[2].startswith("  last point  00000010-a0001-g0001  20")
    Attempt(runner).begin()
    monkeypatch.setattr(history, "WATCH_S", SHORT_S)
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", str(runner.folder), "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["state"] == "gone"


def test_a_look_loads_neither_ray_nor_torch(runner: Runner, tmp_path: Path) -> None:
    runner.launch()
    code = (
        "import sys; from orchestrator.inspect.run import Run; Run(sys.argv[1]).status();"
        "print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    line = [sys.executable, "-c", code, str(runner.folder)]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip() == "[]"
