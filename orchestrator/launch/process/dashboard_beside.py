"""Serves the run's dashboard (`monitor.dashboard`) beside the run, as a child process.

The child is the command `dashboard`. It reads a pipe of which the driver holds the other end, so it ends with
the driver in any case. The run does not depend on it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.launch.process.progress import Progress

END_S = 5.0  # how long to wait for its end


@contextmanager
def dashboard_beside(job: JobConfig, run: str, progress: Progress) -> Iterator[None]:
    """Serves the run (its folder, or its URI) inside, if the job asks for it.

    The link is shown only on the screen. If it cannot be served, a line reports that and the run continues.
    """
    process = _start(run, progress) if job.monitor.dashboard else None
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _start(run: str, progress: Progress) -> subprocess.Popen[str] | None:
    program = [sys.executable, "-m", "orchestrator.cli.commands", "dashboard", run, "--until-eof"]
    try:
        process = subprocess.Popen(  # noqa: S603  our own program
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C belongs to the driver, which saves first
        )
    except OSError as error:
        progress.say(f"warning: {_why(str(error))}")
        return None
    threading.Thread(target=_announce, args=(process, progress), name="dashboard", daemon=True).start()
    return process


def _announce(process: subprocess.Popen[str], progress: Progress) -> None:
    assert process.stdout is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    link = process.stdout.readline().strip()
    if link:
        progress.show_secret(f"dashboard: {link}")
    said = process.stderr.read()  # until it ends
    if not link and process.stdin is not None and not process.stdin.closed:
        progress.say(f"warning: {_why(said)}")


def _why(said: str) -> str:
    last = (said.strip().splitlines() or ["it ended without a word"])[-1]
    return (
        f"the dashboard was not started: {last}; the run continues without it. `orchestrator dashboard` "
        "serves it from any machine that sees the storage"
    )


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
