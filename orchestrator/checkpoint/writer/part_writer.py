"""Writes a rank's parts in a separate process (`writer_process`), which is restarted if it dies."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from orchestrator.checkpoint.writer.writer_process import (
    CANCELLED,
    GROWS,
    PartCancelled,
    PartJob,
    PartWritten,
    answer_of,
    job_line,
    perform,
)
from orchestrator.errors import StorageError
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage

# A smaller part takes a thread some milliseconds. A process takes 60 MB, and 0.3 s of CPU to start.
PROCESS_FROM_BYTES = 8 << 20
_MOST_DEATHS = 3
_CLOSE_S = 10.0  # for a piece to end
_WRITER = "orchestrator.checkpoint.writer.writer_process"


class Placed(Protocol):
    """Called when a part is durable on this node's own disk."""

    def __call__(self, point: str, entry: FileEntry, check: Callable[[], None], /) -> tuple[NodePlace, ...]:
        """Has another node keep a copy, if there is one; returns all places of the part, this one first.

        `check` raises `PartCancelled` as soon as the copy is not needed any more. Raises `StorageError` if
        this node's folder cannot be determined. A failing copy is no error.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    number: int
    job: PartJob
    answer: Future[PartWritten] = field(default_factory=Future)


class PartWriter:
    """Writes one part after the other, in a process that starts with the first large one.

    Safe to use from threads. If the process dies or cannot be started, the current save fails, and the next
    one starts another process. After three failures without a part in between, parts are written in a thread
    of this process, which slows training down; `say` is called once. If a rank dies, its process dies too.
    """

    def __init__(
        self,
        storage: Storage,
        say: Callable[[str], None],
        process_from_bytes: int = PROCESS_FROM_BYTES,
        placed: Placed | None = None,
    ) -> None:
        """Parts of at least `process_from_bytes` bytes are written by the process.

        `placed`: `storage` is a folder of this node alone, see `Placed`.
        """
        self._storage, self._say, self._process_from_bytes = storage, say, process_from_bytes
        self._placed = placed
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over the fields below; held only briefly
        self._next = 0
        self._cancelled = -1  # the newest cancelled job
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._cancels: int | None = None  # the pipe that notifies the process of it
        self._deaths = 0
        self._progress = 0
        # The process ends with the thread that started it. That is this thread, which ends with this process.
        self._thread = threading.Thread(target=self._serve, name="part-writer", daemon=True)
        self._thread.start()

    @property
    def process_id(self) -> int | None:
        """The id of the process; None while there is none."""
        process = self._process
        return process.pid if process is not None else None

    @property
    def progress(self) -> int:
        """Grows while a part is written: once for one or more pieces of at most 64 MiB."""
        return self._progress

    def write(self, job: PartJob) -> Future[PartWritten]:
        """Writes a part; the future completes once it is whole and durable.

        The future raises `PartCancelled`, or `StorageError`, also if the process died. Then part of a file
        may be left, and the save must be given up.
        """
        with self._lock:
            assert not self._closed, "a closed writer was given a job"
            task = _Task(number=self._next, job=job)
            self._next += 1
            self._tasks.put(task)
        return task.answer

    def cancel(self) -> None:
        """Cancels all jobs that were passed so far. Does not wait.

        They end within a piece. The answers of those that are not written by then raise `PartCancelled`.
        """
        with self._lock:
            self._cancelled = self._next - 1
            self._tell_cancelled()

    def close(self) -> None:
        """Cancels remaining jobs, and ends the process. A second call does nothing.

        Waits for both, and kills a process that does not end within 10 s (its storage does not answer): its
        job fails.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.cancel()
        self._tasks.put(None)
        self._thread.join(_CLOSE_S)
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join(_CLOSE_S)

    # ---------------------------------------------------------------------- in the thread
    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._check(task.number)
                in_process = task.job.num_bytes >= self._process_from_bytes and self._deaths < _MOST_DEATHS
                written = self._in_process(task) if in_process else self._here(task)
                if self._placed is not None:
                    check = partial(self._check, task.number)
                    nodes = self._placed(task.job.point, written.entry, check)
                    written = replace(written, nodes=nodes)
            except BaseException as error:  # noqa: BLE001  the waiting thread receives it
                task.answer.set_exception(error)
            else:
                task.answer.set_result(written)
        if self._process is not None:
            self._end(self._process)

    def _here(self, task: _Task) -> PartWritten:
        def check() -> None:
            self._progress += 1
            self._check(task.number)

        return perform(self._storage, task.job, check)

    def _check(self, number: int) -> None:
        if number <= self._cancelled:
            raise PartCancelled(CANCELLED)

    def _in_process(self, task: _Task) -> PartWritten:
        process = self._process or self._begun()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):  # a failure to send shows where the answer is read
            process.stdin.write(job_line(task.number, task.job))
            process.stdin.flush()
        line = process.stdout.readline()
        while line == GROWS:
            self._progress += 1
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._died(process)
        self._deaths = 0
        return answer_of(line)

    def _begun(self) -> subprocess.Popen[bytes]:
        try:
            return self._started()
        except OSError as error:
            how = f"could not be started: {error.strerror or error}"
            self._count_death(how)
            raise StorageError(
                f"the process that writes this rank's part of a resume point {how}; the save is given up, "
                "and the next one tries again: see the limits of processes and open files here, and whether "
                "memory runs out",
                code="point.writer_not_started",
            ) from error

    def _started(self) -> subprocess.Popen[bytes]:
        # it imports what this process can import, and from the current folder
        places = [*(path for path in sys.path if path), os.getcwd()]
        theirs, ours = os.pipe()
        os.set_blocking(ours, False)  # cancelling never blocks
        try:
            process = subprocess.Popen(  # noqa: S603  this Python, and a module of ours
                [sys.executable, "-P", "-m", _WRITER, self._storage.root, str(os.getpid()), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(theirs,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
                start_new_session=True,  # Ctrl-C is for the rank, which saves once more
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        with self._lock:
            self._process, self._cancels = process, ours
            self._tell_cancelled()
        return process

    def _tell_cancelled(self) -> None:
        if self._cancels is not None:
            with suppress(OSError):  # it is dead, or stands still with a full pipe, and writes nothing
                os.write(self._cancels, b"%d\n" % self._cancelled)

    def _died(self, process: subprocess.Popen[bytes]) -> StorageError:
        self._end(process)
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._count_death(how)
        return StorageError(
            f"the process {process.pid} that wrote this rank's part of a resume point {how}; the save is "
            "given up, and the next one starts another process: if it happens again, see whether memory runs "
            "out",
            code="point.writer_died",
        )

    def _count_death(self, how: str) -> None:
        self._deaths += 1
        if self._deaths == _MOST_DEATHS:
            self._say(
                f"the process that writes this rank's part of resume points died {_MOST_DEATHS} times in a "
                f"row (the last one {how}); parts are written by a thread from now on, which slows training "
                "during a save: see the worker's log, and whether memory runs out"
            )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            cancels, self._cancels = self._cancels, None
        assert cancels is not None
        os.close(cancels)
        with suppress(OSError):  # the rest of the buffer has no reader
            process.communicate()
        process.wait()
        with self._lock:
            self._process = None
