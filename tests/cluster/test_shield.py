"""Which signals the processes of a launch receive, and how long they live without the Ray that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cluster.machine import descendants
from orchestrator.cluster.shield import SIGNALS, shielded

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


def run(program: str) -> str:
    line = [sys.executable, "-c", program]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout.strip()


def blocked(pid: int) -> set[signal.Signals]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
    return {number for number in SIGNALS if mask & 1 << number - 1}


NESTED = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=0)
child.wait()
"""


@pytest.mark.parametrize("shield", [True, False])
def test_what_is_started_under_the_shield_and_what_that_starts_receive_no_signal(shield: bool) -> None:
    def start() -> subprocess.Popen[str]:
        line = [sys.executable, "-c", NESTED]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, preexec_fn=int)  # noqa: PLW1509  as Ray does

    if shield:
        with shielded():
            process = start()
    else:
        process = start()
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        started = [process.pid, *(each.pid for each in descendants([process.pid]))]
        assert len(started) == 2
        assert [blocked(pid) for pid in started] == [set(SIGNALS) if shield else set()] * 2
        assert blocked(os.getpid()) == set()
        process.kill()
        for pid in started[1:]:
            os.kill(pid, signal.SIGKILL)


OUTLIVES = """
import os, signal, subprocess, sys, threading
from orchestrator.cluster.shield import outlive_sigterm

if {in_main}:
    outlive_sigterm()
else:
    thread = threading.Thread(target=outlive_sigterm)
    thread.start()
    thread.join()
os.kill(os.getpid(), signal.SIGTERM)
if {in_main}:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    child.stdout.readline()
    child.terminate()
    print(child.wait())
    read, write = os.pipe()
    if not (forked := os.fork()):
        os.write(write, b"up")
        while True:  # a signal just before `signal.pause()` would be handled after it alone
            os.sched_yield()
    os.read(read, 2)
    os.kill(forked, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""


@pytest.mark.parametrize("in_main", [True, False])
def test_a_process_outlives_sigterm_and_what_it_starts_does_not(in_main: bool) -> None:
    ended = run(OUTLIVES.format(in_main=in_main)).split()
    assert ended == [str(-signal.SIGTERM)] * 2 * in_main


RAYLET = """
import os, subprocess, sys
program = '''
import sys, threading
from orchestrator.cluster import shield

shield.LOOK_S = 0.01
shield.end_without_raylet(lambda: {done}, {limit_s})
print(flush=True)
threading.Event().wait()
'''
child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, pass_fds=[{open}])
child.stdout.readline()
os._exit(0)
"""


@pytest.mark.parametrize(("done", "limit_s"), [(True, 1000.0), (False, 0.1)])
def test_a_process_ends_after_its_raylet_when_it_is_done_or_has_had_its_time(
    done: bool, limit_s: float
) -> None:
    ours, theirs = os.pipe()
    program = RAYLET.format(done=done, limit_s=limit_s, open=theirs)
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, pass_fds=[theirs], timeout=LIMIT_S, check=True)
    os.close(theirs)
    assert os.read(ours, 1) == b"", "the last process that could write has ended"
    os.close(ours)
