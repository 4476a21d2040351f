"""Whoever reads what a launch shows goes away: lines are lost, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.launch.process import stop_signals
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.process.safe_output import MOST_WAITING, Screen, let_go
from orchestrator.storage.files import Storage
from tests.elastic.builders import status

WAIT_S = 240.0  # on a busy machine

# The command, with a run that lasts until SIGINT has asked it to stop. `go`: this end of a pipe says when the
# readers of stdout and stderr have gone.
PROGRAM = """
import os, signal, sys
import orchestrator.launch.api as api
from orchestrator.cli import commands as cli
from orchestrator.launch.process import stop_signals
from orchestrator.launch.process.progress import Progress
from orchestrator.storage.files import Storage

def train(config, overrides):
    stopped = []
    with Progress.shown(1.0) as progress:
        progress.begin(Storage(sys.argv[1]), 3, 2, None)
        with stop_signals.stop_on_signals(lambda by: stopped.append(1), lambda by: None, progress.say):
            progress.say("training")
            sys.stdin.read()
            progress.say("a line that nobody reads")
            os.kill(os.getpid(), signal.SIGINT)
        progress.note(f"asked to stop: {bool(stopped)}")
    return api.RunResult(
        outcome=sys.argv[2], reason="", run_uri="runs/r", attempt=3, step=8, consumed_samples=64,
        consumed_tokens=64, loss=0.5, point=None, seconds=1.0,
    )

api.train = train
cli.main(["train", "job.yaml", "--json"])
"""


def log_of(folder: Path) -> str:
    (file,) = (folder / "logs").iterdir()
    return file.read_text()


@pytest.mark.quick("both-stopped-0", "stderr-failed-1", "stdout-failed-1")
@pytest.mark.parametrize(("outcome", "code"), [("stopped", 0), ("failed", 1)])
@pytest.mark.parametrize("gone", ["both", "stderr", "stdout"])
def test_a_reader_that_is_gone_when_ctrl_c_comes_costs_neither_the_stop_nor_the_exit_code(
    tmp_path: Path, gone: str, outcome: str, code: int
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), outcome]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as ended:
        assert ended.stdin
        assert ended.stdout
        assert ended.stderr
        assert "training" in ended.stderr.readline()
        for name in ("stdout", "stderr") if gone == "both" else (gone,):
            getattr(ended, name).close()
        ended.stdin.close()
        shown = "" if ended.stdout.closed else ended.stdout.read()
        said = "" if ended.stderr.closed else ended.stderr.read()
    assert ended.returncode == code, said
    kept = log_of(tmp_path)
    assert "a line that nobody reads" in kept
    assert "SIGINT: saving and stopping" in kept
    assert "asked to stop: True" in kept
    if gone == "stderr":
        assert json.loads(shown)["outcome"] == outcome
    if gone == "stdout":
        assert "standard output" in said
        assert "Traceback" not in said


MANY = """
progress_say = Progress.say
def say_much(self, text):
    for number in range(8_000):
        progress_say(self, f"{text} {number}")
Progress.say = say_much
"""


@pytest.mark.chaos
def test_output_that_nobody_reads_delays_neither_a_stop_nor_the_end_and_the_log_has_all(
    tmp_path: Path,
) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    program = PROGRAM.replace("api.train = train", f"{MANY}\napi.train = train")
    command = [sys.executable, "-c", program, str(tmp_path), "stopped"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer) as ended:
        os.close(writer)
        assert ended.wait(WAIT_S) == 0
    kept = log_of(tmp_path)
    assert "a line that nobody reads 7999" in kept
    assert "asked to stop: True" in kept
    with open(reader, "rb") as pipe:
        assert pipe.read(12) != b"", "what the pipe had room for was written"


def test_a_reader_that_starts_again_sees_how_many_messages_it_missed() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as pipe, open(writer, "w", encoding="utf-8") as stream:
        screen = Screen(stream)
        for number in range(MOST_WAITING + 2000):
            screen.write(f"line {number} {'x' * 100}\n")
        assert screen.drain(0.0) != "", "nobody has read"
        lines = [pipe.readline() for _ in range(MOST_WAITING)]
        screen.write("the last one\n")
        while b"the last one" not in lines[-1]:
            lines.append(pipe.readline())
    assert lines[0].startswith(b"line 0 ")
    expected = 0  # the number of the next line; each notice stands where lines are missing
    for line in lines[:-1]:
        if b"messages are missing here" in line:
            expected += int(line.split()[0].strip(b"["))
        else:
            assert line.startswith(b"line %d " % expected)
            expected += 1
    assert expected == MOST_WAITING + 2000
    assert any(b"messages are missing here" in line for line in lines)


@pytest.mark.quick("arguments1-full", "arguments0-closed", "arguments2-closed")
@pytest.mark.parametrize("output", ["closed", "full"])
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["doctor", "--help"]])
def test_a_result_that_cannot_be_written_is_an_error_in_a_line(output: str, arguments: list[str]) -> None:
    to = ">&-" if output == "closed" else ">/dev/full"
    line = f'exec "{sys.executable}" -m orchestrator.cli.commands "$@" {to}'
    ended = subprocess.run(["sh", "-c", line, "sh", *arguments], check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "standard output" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_terminal_that_is_closed_costs_lines_and_the_log_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = pty.openpty()
    terminal = open(slave, "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress.shown(0.0) as progress:
        assert progress._live is not None, "it is a terminal"
        progress.begin(Storage(str(tmp_path)), 3, 2, 16)
        progress.say("seen")
        os.close(master)
        progress.say("not seen")
        progress.show(status(7))
    monkeypatch.undo()
    let_go(terminal)
    terminal.close()
    kept = log_of(tmp_path)
    assert "not seen" in kept
    assert "step 7/16" in kept


def test_without_a_standard_error_a_launch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (None, open(os.devnull, "w", encoding="utf-8")):  # noqa: SIM115
        if stream is not None:
            stream.close()
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress.shown(0.0) as progress:
            progress.begin(Storage(str(tmp_path)), 3, 2, None)
            progress.say("one")
        monkeypatch.undo()
    assert log_of(tmp_path).count("one") == 2


def test_a_signal_asks_for_the_stop_before_it_says_so() -> None:
    done: list[str] = []
    with stop_signals.stop_on_signals(
        lambda by: done.append("stop"), lambda by: None, lambda text: done.append("say")
    ):
        os.kill(os.getpid(), signal.SIGINT)
    assert done == ["stop", "say"]


def test_a_command_that_was_started_without_standard_streams_has_the_exit_code_of_its_run(
    tmp_path: Path,
) -> None:
    line = f'exec "{sys.executable}" -c "$0" "$1" stopped </dev/null >&- 2>&-'
    ended = subprocess.run(["sh", "-c", line, PROGRAM, str(tmp_path)], check=False)
    assert ended.returncode == 0
    assert "asked to stop: True" in log_of(tmp_path)
