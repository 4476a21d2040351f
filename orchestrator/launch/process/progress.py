"""Shows a launch's progress on stderr, and writes it with more details to the run's log file.

A capable terminal shows one line that is updated. Other outputs get a plain line with a time stamp every few
seconds.

`dashboard_beside` serves the run's dashboard (`monitor.dashboard`) in a child process, which runs the command
`dashboard`. It reads a pipe of which the driver holds the other end, so it ends with the driver in any case.
"""

from __future__ import annotations

import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from orchestrator.checkpoint.points.verify import read_of
from orchestrator.errors import text_of
from orchestrator.history import sentences
from orchestrator.history.metrics.published_folder import PublishedFolder
from orchestrator.launch.process.safe_output import Screen
from orchestrator.records.run_status import RunStatus
from orchestrator.storage.files import Storage
from orchestrator.text import visible

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig


_TRACEBACK = "Traceback (most recent call last)"


class Progress:
    """Receives every new status, and shows step, loss, tokens per second, data wait and the last resume
    point.

    Thread-safe. Its methods do not raise errors of the screen or the log file.
    """

    def __init__(self, every_s: float) -> None:
        """`every_s`: the minimum time between two plain lines about the same step."""
        self._every_s = every_s
        self._total: int | None = None
        self._wanted = 0
        self._shown_at = 0.0
        self._attempt = 0  # the first that was seen
        # attempt and generation of the newest step: `_marks` are (time, tokens) of its steps
        self._group = (0, 0)
        self._marks: deque[tuple[float, int]] = deque(maxlen=50)
        self._last_text = ""
        self._parts: dict[str, tuple[Callable[[str], bool], Callable[[int, str, str], None]]] = {}
        self._lock = threading.RLock()  # a signal's handler writes messages, too
        self._log = RunLog(self._put)
        self._live = None
        self._screen = Screen(sys.stderr)
        if self._screen.isatty():
            from rich.console import Console
            from rich.status import Status

            console = Console(file=cast(IO[str], self._screen))
            if console.is_terminal and not console.is_dumb_terminal:  # on any other it would draw nothing
                self._live = Status("starting", console=console)
                self._live.start()

    @classmethod
    @contextmanager
    def shown(cls, every_s: float) -> Iterator[Progress]:
        """A progress that ends with the context. The reason of the end is also in its log."""
        progress = cls(every_s)
        try:
            yield progress
        except BaseException as error:
            progress.note(text_of(error))
            raise
        finally:
            progress.close()

    def begin(self, storage: Storage, attempt: int, wanted: int, total_steps: int | None) -> None:
        """The run's storage may be written from now on. `wanted`: the target number of workers."""
        self._total, self._wanted = total_steps, wanted
        self._log.open(storage, attempt)

    def show(self, status: RunStatus) -> None:
        """Shows a new status. Its notices and warnings are shown at once, as separate lines."""
        for notice in status.notices:
            self.say(notice)
        for warning in status.warnings:
            self.say(f"warning: {warning}")
        now, step = time.monotonic(), status.last_step
        self._attempt = self._attempt or status.attempt
        if step is not None and (step.attempt, step.generation) != self._group:
            self._group = step.attempt, step.generation
            self._marks.clear()
        if step is not None and (not self._marks or self._marks[-1][1] != step.consumed_tokens):
            self._marks.append((now, step.consumed_tokens))
        text = self._text(status)
        if self._live is not None:
            self._live.update(f"{time.strftime('%H:%M:%S')} {visible(text)}")
        if text != self._last_text and now - self._shown_at >= self._every_s:
            self._shown_at, self._last_text = now, text
            self._log.write(text)
            if self._live is None:
                self._put(text)

    def say(self, text: str) -> None:
        """Shows a separate line."""
        self._log.write(text)
        self._put(text)

    def show_secret(self, text: str) -> None:
        """Shows a line only on the screen, because others may read the log file."""
        if self._live is not None:
            with self._lock:
                self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._put(text)

    def say_at_length(self, text: str) -> None:
        """Shows why a launch ended.

        The full text is shown, also on the screen, unless it quotes a traceback; then the screen shows a
        short form.
        """
        self.note(text)
        self._put(sentences.shortened(text, self._log.path) if _TRACEBACK in text else text)

    def note(self, text: str) -> None:
        """Writes to the log file only."""
        self._log.write(text)

    def named(
        self,
        part: str,
        is_death_of: Callable[[str], bool],
        died: Callable[[int, str, str], None] = lambda pid, host, text: None,
    ) -> None:
        """Reports the death of a part of the launch in our own words from now on.

        `is_death_of` recognizes the messages of other programs about it. `died` is called with its process
        and host (0 and "" if not known) and the message. Ray restarts the part.
        """
        self._parts[part] = is_death_of, died

    def foreign(self, who: str, text: str) -> None:
        """Shows a message of another program: all of it in the log file, one line on the screen."""
        self.note(f"{who}: {text}")
        for part, (is_death_of, died) in self._parts.items():
            if is_death_of(text):
                pid = re.search(r"Worker PID: (\d+)", text)
                host = re.search(r"Worker IP address: (\S+)", text)
                number = int(pid.group(1)) if pid else 0
                self.say(sentences.part_died(part, number, who))
                died(number, host.group(1) if host else "", text)
                return
        self._put(sentences.foreign(who, text, self._log.path))

    def close(self) -> None:
        """Ends the display."""
        if self._live is not None:
            self._live.stop()
        self._log.close()
        self._screen.drain()

    def _put(self, text: str) -> None:
        """Writes to the screen."""
        text = visible(text)
        with self._lock:
            if self._live is not None:
                self._live.console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False)
            else:
                self._screen.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _text(self, status: RunStatus) -> str:
        step, wanted = status.last_step, self._wanted or status.world_size
        if status.attempt == 0 and self._attempt:
            return "waiting for the coordinator, which was restarted"
        left = _workers_left(status)
        trains = left == status.world_size > 0 and status.waiting_since is None
        there = f"{left}/{wanted}" if status.world_size else "meet again"
        waiting = (
            f"  waiting for workers for {status.waiting_since:.0f} s"
            if status.waiting_since is not None
            else ""
        )
        if step is None:
            number = status.world_size or wanted
            workers = f"{number} worker{'s' if number != 1 else ''}"
            if status.loading[1]:
                return f"{workers} read the resume point: {read_of(*status.loading)}"
            if trains:
                return f"{workers} in the first step"
            return f"no step yet  workers {there}{waiting}" if status.world_size else f"starting {workers}"
        of = f"/{self._total}" if self._total is not None else ""
        rate = self._rate() if trains else None
        speed = "" if rate is None else f"  {rate:,.0f} tokens/s"
        return (
            f"step {step.step}{of}  loss {sentences.loss(step.loss)}{speed}  data wait "
            f"{step.data_wait_s * 1000:.0f} ms  "
            f"lr {step.lr:.2e}  workers {there}  last point "
            f"{status.newest_point or 'none'}{waiting}"
        )

    def _rate(self) -> float | None:
        """Tokens per second of the newest group; None while too few of its steps are known."""
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else None


def _workers_left(status: RunStatus) -> int:
    """How many of the newest group are not known to be lost."""
    return max(0, status.world_size - sum(loss.worker.rank is not None for loss in status.lost))


# ----------------------------------------------------------------------------------------------- the log file
FOLDER = "logs"
CLOSE_S = 5.0  # how long the end of a run waits for a storage that hangs


class RunLog:
    """The log file of a launch: all messages with time stamps, and details that are not on the screen.

    It is in the run's storage (`logs/0003-<host>.log`, after the attempt that the launch began with), for
    people: it is never read back, and a failure to write it never stops or delays a run. For a bucket, it
    grows in a local folder, and is published every 60 s and at the end.

    It collects lines until it has a file; from then on a thread writes them. Lines are only appended. An
    error is reported once, and lines that cannot be written are dropped.
    """

    def __init__(self, trouble: Callable[[str], None]) -> None:
        """`trouble` is called once, with the reason why the file cannot be written."""
        self.path = ""  # of the file, once there is one
        self._trouble = trouble
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._local: Path | None = None  # where it grows, if it is to be published
        self._published: PublishedFolder | None = None

    def open(self, storage: Storage, attempt: int) -> None:
        """Opens the file in this run's storage. Earlier lines are written into it, too.

        A later attempt of the same start has its own file.
        """
        if self._writer is not None:
            self._lines.put(None)
            self._writer.join(CLOSE_S)
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        name = f"{FOLDER}/{attempt:04d}-{host}.log"
        folder = storage.folder or self._local
        if folder is None:
            try:
                folder = self._local = Path(tempfile.mkdtemp(prefix="orchestrator-log-"))
            except OSError as error:
                self._trouble(f"warning: there is no log file ({error}); the run continues without it")
                return
            self._published = PublishedFolder(storage, folder, lambda text: self._trouble(f"warning: {text}"))
        path = folder / name
        self.path = f"{storage.root}/{name}"
        self._writer = threading.Thread(target=self._write, args=(path,), name="log", daemon=True)
        self._writer.start()

    def write(self, text: str) -> None:
        """Writes one entry; its further lines are indented. Never blocks."""
        stamp = datetime.now().astimezone().isoformat(sep=" ", timespec="milliseconds")
        first, *others = visible(text.rstrip("\n")).split("\n")
        self._lines.put("\n".join([f"{stamp} {first}", *(f"    {line}" for line in others)]) + "\n")

    def close(self) -> None:
        """Waits until everything is written, unless storage hangs."""
        if self._writer is not None:
            self._lines.put(None)
            self._writer.join(CLOSE_S)
        if self._published is not None and self._local is not None and self._published.close(CLOSE_S):
            shutil.rmtree(self._local, ignore_errors=True)

    def _write(self, path: Path) -> None:
        reported = False
        while (line := self._lines.get()) is not None:
            try:
                path.parent.mkdir(exist_ok=True)  # not the run's own folder, if that is gone
                with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(line)
            except OSError as error:
                if not reported:
                    reported = True
                    self._trouble(
                        f"warning: the log file {path} cannot be written ({error.strerror or error}); the "
                        "run continues without it"
                    )


# ---------------------------------------------------------------------------------------------- the dashboard
DASHBOARD_END_S = 5.0  # how long to wait for its end


@contextmanager
def dashboard_beside(job: JobConfig, run: str, progress: Progress) -> Iterator[None]:
    """Serves the run (its folder, or its URI) inside, if the job asks for it.

    The link is shown only on the screen. If it cannot be served, a line reports that and the run continues.
    """
    process = _start_dashboard(run, progress) if job.monitor.dashboard else None
    try:
        yield
    finally:
        if process is not None:
            _end_dashboard(process)


def _start_dashboard(run: str, progress: Progress) -> subprocess.Popen[str] | None:
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
        progress.say(f"warning: {_why_no_dashboard(str(error))}")
        return None
    threading.Thread(target=_announce_link, args=(process, progress), name="dashboard", daemon=True).start()
    return process


def _announce_link(process: subprocess.Popen[str], progress: Progress) -> None:
    assert process.stdout is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    link = process.stdout.readline().strip()
    if link:
        progress.show_secret(f"dashboard: {link}")
    said = process.stderr.read()  # until it ends
    if not link and process.stdin is not None and not process.stdin.closed:
        progress.say(f"warning: {_why_no_dashboard(said)}")


def _why_no_dashboard(said: str) -> str:
    last = (said.strip().splitlines() or ["it ended without a word"])[-1]
    return (
        f"the dashboard was not started: {last}; the run continues without it. `orchestrator dashboard` "
        "serves it from any machine that sees the storage"
    )


def _end_dashboard(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    try:
        process.wait(DASHBOARD_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
