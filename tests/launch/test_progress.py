"""What a launch says: on the screen with time stamps, all of it in its log file; how it is interrupted."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import orchestrator
from orchestrator.cli import commands as cli
from orchestrator.cluster.connection import _RayHeard
from orchestrator.cluster.ray_state import NO_ERROR, cause_of_death, is_death_of
from orchestrator.elastic.supervision.policy import LaunchLimits
from orchestrator.history.journal.line_format import EventKind
from orchestrator.launch.on_ray.on_cluster import _note_feeder_death, _shower
from orchestrator.launch.process import stop_signals
from orchestrator.launch.process.progress import Progress
from orchestrator.records.run_status import GroupChange, GroupMember, Loss, RunStatus
from orchestrator.storage.files import Storage
from tests.elastic.builders import status
from tests.elastic.in_process import Handle
from tests.trainer.launch import Launch

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def log_of(folder: Path) -> str:
    (file,) = (folder / "logs").iterdir()
    assert re.fullmatch(r"0003-.+\.log", file.name)
    return file.read_text()


def test_every_line_has_a_time_stamp_and_the_log_file_has_them_all_and_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress.shown(0.0) as progress:
        progress.say("before there is a file")
        progress.begin(Storage(str(tmp_path)), 3, 2, 16)
        progress.show(status(7))
        progress.foreign("Ray", "Something failed.\nAnd why, at length")
        progress.note("for the file only")
    shown = capsys.readouterr().err
    assert all(re.match(STAMP + " ", line) for line in shown.splitlines())
    assert re.search("step 7/16  loss 0.5000 .*workers 2/2  last point none", shown)
    assert "Ray: Something failed. (19 more characters in " in shown
    assert "for the file only" not in shown
    kept = log_of(tmp_path)
    said = (
        "before there is a file",
        "step 7/16",
        "Ray: Something failed.\n    And why, at",
        "for the file only",
    )
    assert all(text in kept for text in said)
    assert re.match(STAMP + r"\.\d{3}[+-]\d\d:\d\d before there", kept)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> str:
    """What it gets while steps 7 and 8 are shown, where the environment has these settings."""
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress.shown(0.0) as progress:
        for step in (7, 8):
            progress.show(status(step))
    return screen.getvalue()


@pytest.mark.parametrize(
    "settings", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"TERM": "xterm", "TTY_COMPATIBLE": "0"}]
)
def test_a_terminal_that_cannot_redraw_a_line_is_given_plain_ones(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    lines = shown_on_a_terminal(monkeypatch, settings).splitlines()
    assert [
        bool(re.match(rf"{STAMP} step {step}  loss 0.5000", line))
        for step, line in zip((7, 8), lines, strict=True)
    ] == [True, True]


def test_a_terminal_that_can_is_given_one_line_that_is_kept_up_to_date(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = shown_on_a_terminal(monkeypatch, {"TERM": "xterm"})
    assert " step 8  loss 0.5000" in shown
    assert "\x1b[" in shown


def test_a_log_file_is_only_added_to_and_keeps_what_ended_the_launch(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with suppress(RuntimeError), Progress.shown(1.0) as progress:
            progress.begin(Storage(str(tmp_path)), 3, 2, None)
            raise RuntimeError(text)
    kept = log_of(tmp_path)
    assert kept.index("RuntimeError: one") < kept.index("RuntimeError: two")


def test_a_log_file_that_cannot_be_written_is_told_once_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("not a folder")
    with Progress.shown(1.0) as progress:
        progress.begin(Storage(str(tmp_path)), 3, 2, None)
        progress.say("one")
        progress.say("two")
    shown = capsys.readouterr().err
    assert shown.count("cannot be written (") == 1
    assert " one\n" in shown
    assert " two\n" in shown


def test_a_run_folder_that_is_gone_is_not_made_anew_by_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress.shown(1.0) as progress:
        progress.begin(Storage(str(tmp_path / "gone")), 3, 2, None)
        progress.say("one")
    assert not (tmp_path / "gone").exists()
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_before_the_first_step_the_line_says_what_is_being_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(0.0)
    progress._wanted = 2
    progress.show(status(None, world_size=0))
    progress.show(status(None))
    progress.close()
    shown = capsys.readouterr().err
    assert " starting 2 workers\n" in shown
    assert " 2 workers in the first step\n" in shown


def test_while_workers_read_the_resume_point_the_line_has_the_bytes_done_and_the_total(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = line_of(replace(status(None), loading=(3 << 30, 84 << 30)), capsys=capsys)
    assert "read the resume point: 3.0 of 84.0 GiB" in line


def line_of(*statuses: RunStatus, capsys: pytest.CaptureFixture[str]) -> str:
    """The newest line, when these were shown one after the other."""
    progress = Progress(0.0)
    progress._wanted, progress._total = 2, 16
    for each in statuses:
        progress.show(each)
    progress.close()
    return capsys.readouterr().err.splitlines()[-1]


def lost(rank: int | None) -> Loss:
    return Loss(worker=GroupMember(rank=rank, host="10.0.0.7", pid=5), reason="it was killed")


def test_a_rate_is_said_once_it_is_known_and_not_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tokens/s" not in line_of(status(1), capsys=capsys)
    assert re.search(r"  [\d,]+ tokens/s  ", line_of(status(1), status(2), capsys=capsys))


def test_a_rate_is_that_of_the_newest_group_alone(capsys: pytest.CaptureFixture[str]) -> None:
    first = status(2)
    assert first.last_step is not None
    of_next = replace(first.last_step, generation=2, step=3, consumed_tokens=24)
    line = line_of(status(1), first, status(3, last_step=of_next, generation=2), capsys=capsys)
    assert "step 3/16  loss" in line
    assert "tokens/s" not in line


@pytest.mark.parametrize(
    ("now", "workers"),
    [
        (status(3, lost=(lost(0), lost(1)), waiting_since=8.0), "workers 0/2  "),
        (status(3, lost=(lost(1),)), "workers 1/2  "),
        (status(3, lost=(lost(1), lost(None)), waiting_since=8.0), "workers 1/2  "),
        (status(3, world_size=0, generation=0), "workers meet again  "),
    ],
    ids=["all were killed", "one was killed", "a newcomer, too", "the coordinator was restarted"],
)
def test_while_no_group_trains_the_line_has_the_workers_that_are_left_and_no_rate(
    capsys: pytest.CaptureFixture[str], now: RunStatus, workers: str
) -> None:
    line = line_of(status(1), status(2), status(3), now, capsys=capsys)
    assert workers in line
    assert "tokens/s" not in line
    assert ("waiting for workers for 8 s" in line) == (now.waiting_since is not None)


def test_when_all_are_killed_in_the_first_step_nobody_is_said_to_be_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = line_of(status(None, lost=(lost(0), lost(1)), waiting_since=8.0), capsys=capsys)
    assert line.endswith(" no step yet  workers 0/2  waiting for workers for 8 s")


def test_a_coordinator_that_comes_back_is_not_taken_for_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    away = status(None, attempt=0, world_size=0, generation=0)
    assert line_of(away, capsys=capsys).endswith(" starting 2 workers")
    assert line_of(status(3), away, capsys=capsys).endswith(
        " waiting for the coordinator, which was restarted"
    )


# ------------------------------------------------------------ Ray
def test_what_ray_would_print_on_stdout_goes_where_it_is_heard_until_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ray._private import worker

    rays_own, heard = worker.print_to_stdstream, list[str]()
    handlers = logging.getLogger("ray").handlers
    listening = _RayHeard(heard.append)
    data = {"lines": ["Raylet is terminated", "[state-dump]"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(data, ignore_prefix=False)
    logging.getLogger("ray").error("an error of %s", "Ray's")
    logging.getLogger("ray.worker").warning("not worth a line")
    listening.end()
    assert heard == ["Raylet is terminated\n[state-dump]", "an error of Ray's"]
    assert worker.print_to_stdstream is rays_own
    assert logging.getLogger("ray").handlers is handlers
    assert capsys.readouterr() == ("", "")


DIED = (
    'actor_died_error_context {\n  error_message: "The actor is dead because its worker process has died. '
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
    'code 2. End of file."'
    "\n  reason: WORKER_DIED\n}"
)


WORKER_DIED = (
    "A worker died or was killed while executing a task by an unexpected system error. Worker ID: 6269 "
    "Node ID: 2c96e769f122 Worker IP address: 10.0.0.7 Worker port: 44023 Worker PID: 30080 Worker exit "
    "type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2."
)


@pytest.mark.parametrize(
    ("pid", "node", "told"),
    [(30080, "2c96e769f122", True), (3008, "2c96e769f122", False), (30080, "another", False), (0, "", False)],
)
def test_rays_word_of_a_death_is_of_the_actor_whose_process_that_was(pid: int, node: str, told: bool) -> None:
    row = {"Pid": pid, "Address": {"NodeID": node}}
    assert is_death_of(row, WORKER_DIED) == told
    assert not is_death_of(row, "another error of Ray's")
    assert not is_death_of(None, WORKER_DIED)


def test_a_part_of_the_launch_that_died_is_named_and_what_follows_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    died: list[tuple[int, str, str]] = []
    with Progress.shown(0.0) as progress:
        progress.begin(Storage(str(tmp_path)), 3, 2, None)
        progress.named("feeder", lambda text: "Worker PID: 30080 " in text, lambda *of: died.append(of))
        progress.foreign("Ray", WORKER_DIED)
        progress.foreign("Ray", WORKER_DIED.replace("30080", "5"))
    shown = capsys.readouterr().err
    assert "the feeder (pid 30080) died: Ray restarts it; the workers wait for it\n" in shown
    assert "process 30080" not in shown
    assert "Ray: process 5 on 10.0.0.7 died (SYSTEM_ERROR)" in shown
    assert log_of(tmp_path).count("Worker PID: 30080") == 1
    assert died == [(30080, "10.0.0.7", WORKER_DIED)]


def test_the_death_of_the_feeder_is_an_event_of_the_journal(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 1)
    _note_feeder_death(Handle(launch), 30080, "10.0.0.7", WORKER_DIED)
    launch.run(launch.coordinator.end("stopped", "enough"))
    (event,) = (event for event in launch.journal().events if event.kind == EventKind.FEEDER_DIED)
    said = {name: event.fields[name] for name in EventKind.FEEDER_DIED.fields}
    assert said == {"pid": 30080, "host": "10.0.0.7", "reason": NO_ERROR}


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (DIED, NO_ERROR),
        (DIED.replace("WORKER_DIED", "NODE_DIED"), "its node died"),
        ("error_message: Owner's node has crashed.\n reason: OWNER_DIED", "its node died"),
        ("reason: OWNER_DIED", "its node's agent died"),
        ("reason: RAY_KILL", "its node group was stopped"),
        ("oom_context {}", "killed by Ray: its node ran out of memory"),
        (None, NO_ERROR),
        (
            "Worker exit type: INTENDED_SYSTEM_EXIT Worker exit detail: Worker exits by an exit request. And",
            "its process ended (INTENDED_SYSTEM_EXIT: Worker exits by an exit request)",
        ),
    ],
)
def test_why_a_worker_died_is_said_as_far_as_ray_knows_it(cause: str | None, why: str) -> None:
    assert cause_of_death({"DeathCause": cause}) == why


# ------------------------------------------------------------ versions and signals
def test_the_version_names_what_a_report_of_a_bug_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert re.fullmatch(
        rf"orchestrator {re.escape(orchestrator.__version__)} \(ray 2\.\S+, torch \S+, Python 3\.\S+\)\n",
        said,
    )


INTERRUPTED = """
import os, signal, sys, orchestrator.launch.api
from orchestrator.cli import commands as cli
from orchestrator.launch.process import stop_signals

def train(config, overrides):
    said = []
    with stop_signals.stop_on_signals(lambda by: None, lambda by: None, said.append):
        os.kill(os.getpid(), int(sys.argv[1]))
        assert said, "the first one saves and stops"
        os.kill(os.getpid(), int(sys.argv[1]))
    raise AssertionError("the second one ends it")

orchestrator.launch.api.train = train
cli.main(["train", "job.yaml"])
"""


@pytest.mark.quick("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_command_at_once_with_a_last_line_and_the_code_that_shells_expect(
    number: signal.Signals,
) -> None:
    line = [sys.executable, "-c", INTERRUPTED, str(int(number))]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        f"{number.name} came twice: stopped at once, without waiting for a save; the same command continues "
        "from the newest resume point"
    )


def test_a_second_signal_of_another_kind_is_not_called_the_same_one_twice() -> None:
    """torchrun passes a Ctrl-C on, and a second one as SIGTERM."""
    with stop_signals.stop_on_signals(lambda by: None, lambda by: None, lambda text: None):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(stop_signals.StoppedAtOnceError) as ended:
            signal.raise_signal(signal.SIGTERM)
    assert re.findall(r"SIG\w+", str(ended.value)) == ["SIGINT", "SIGTERM"]
    assert ended.value.exit_code == 128 + signal.SIGTERM


def test_a_third_ctrl_c_while_the_launch_ends_does_not_take_away_what_the_second_one_says() -> None:
    """Ray and the log file take their time to close."""
    program = INTERRUPTED.replace("    with stop", "    try:\n     with stop").replace(
        "    raise AssertionError", "    finally:\n        raise KeyboardInterrupt\n    raise AssertionError"
    )
    line = [sys.executable, "-c", program, str(int(signal.SIGINT))]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        "SIGINT came twice: stopped at once, without waiting for a save; the same command continues from the "
        "newest resume point"
    )


def test_a_launch_under_nohup_goes_on_when_its_terminal_is_closed() -> None:
    before, stopped = signal.signal(signal.SIGHUP, signal.SIG_IGN), threading.Event()
    try:
        with stop_signals.stop_on_signals(lambda by: stopped.set(), lambda by: None, lambda text: None):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not stopped.is_set()


def test_ctrl_c_before_anything_runs_ends_with_130() -> None:
    program = INTERRUPTED.replace("    said = []\n", "    raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, "-c", program, "2"], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted; the same command starts again\n")


def test_a_signal_that_comes_while_a_line_is_written_does_not_wait_for_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(1.0)
    with stop_signals.stop_on_signals(lambda by: None, lambda by: None, progress.say), progress._lock:
        os.kill(os.getpid(), signal.SIGTERM)
    progress.close()
    assert "SIGTERM: saving and stopping; once more to stop at once" in capsys.readouterr().err


def test_below_the_minimum_each_loss_is_told_once_and_a_failure_goes_into_the_log_with_all_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = LaunchLimits(
        start_workers=2,
        min_workers=2,
        max_workers=2,
        cpus_per_worker=1.0,
        gpus_per_worker=0.0,
        num_tokenizers=1,
        wait_s=600.0,
    )
    lost = (Loss(worker=GroupMember(rank=1, host="10.0.0.7", pid=5), reason="its node died"),)
    also = Loss(worker=GroupMember(rank=None, host="10.0.0.7", pid=6), reason="killed (SIGKILL)")
    formed = GroupChange(
        attempt=1,
        generation=2,
        world_size=1,
        wanted=2,
        step=4,
        step_before=7,
        lost=(*lost, also),
        joined=(GroupMember(rank=0, host="10.0.0.8", pid=9),),
        paused_s=None,
        reason="",
        restarted=False,
    )
    failures = ((7, "ValueError: Traceback\n  File x\nValueError: y"),)
    with Progress.shown(1000.0) as progress:
        progress.begin(Storage(str(tmp_path)), 3, 2, None)
        show = _shower(progress, limits, None)  # the feeder hears nothing while nothing is committed
        for waited in (0.1, 0.2):
            show(status(7, lost=lost, waiting_since=waited, failures=failures))
        show(status(7, lost=(*lost, also), waiting_since=0.3, failures=failures))
        show(status(7, changes=(formed,), failures=failures))
    shown = capsys.readouterr().err
    first, second, third = (line for line in shown.splitlines() if "lost:" in line or "joined" in line)
    assert "worker 1 (10.0.0.7, pid 5) lost: its node died · fewer than 2 workers are left" in first
    assert "a worker that was joining (10.0.0.7, pid 6) lost: killed (SIGKILL) · fewer than 2" in second
    assert third.endswith(
        " worker 0 (10.0.0.8, pid 9) joined · 1 of 2 workers, continuing at step 5 · no remaining "
        "worker holds step 7: 3 steps are trained again"
    )
    assert "Traceback" not in shown
    assert log_of(tmp_path).count("failure after step 7: ValueError: Traceback\n      File x\n") == 1


@pytest.mark.parametrize("length", [200, 2000])
def test_the_reason_of_an_end_is_told_whole_but_for_the_frames_of_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    reason = f"failed: {'why ' * (length // 4)}; restore the folder from a copy"
    trace = 'Traceback (most recent call last):\n  File "x", line 1, in y\n    z()\nValueError: y'
    with Progress.shown(0.0) as progress:
        progress.begin(Storage(str(tmp_path)), 3, 2, None)
        progress.say_at_length(reason)
        progress.say_at_length(f"4 failures after step 7:\n  {trace}")
    shown = capsys.readouterr().err
    assert f" {reason}\n" in shown
    assert "ValueError: y\n(all of it in " in shown
    assert 'File "x"' not in shown
    assert log_of(tmp_path).count(reason) == 1
