"""The tasks of an audit, and the processes that execute them.

A task is a pure function of the run's data: its result does not depend on the order or the process in which
it is executed. Results are returned in the order of the tasks. A process that dies, or an error in one, is
raised and never taken for a result. `ProcessPoolExecutor` is not used, because it imports the caller's main
script in each process: a script that calls `Run.audit` without a guard would run again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.lineage import SkipAt
from orchestrator.history.sentences import count
from orchestrator.inspect.audit.epoch_checksum import EpochChecksum, EpochFiles
from orchestrator.inspect.audit.file_checksum import checksum_files
from orchestrator.inspect.audit.history_parts import HistoryPart
from orchestrator.inspect.audit.source_walk import Stretches
from orchestrator.inspect.audit.stream_recheck import PartWalk, StepDifference
from orchestrator.planning.encoders import EncoderChoice

Done = Callable[[int], None]
"""Called after each step, with its positions, or file, with its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsTask:
    """Compares these steps with the stream. `by_reference`: `tokenizers` encodes each document, too."""

    part: HistoryPart
    by_reference: bool = False

    def __str__(self) -> str:
        return f"compared {count(len(self.part.wanted), 'step')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsFound:
    """`difference`: the first one; without one, what the steps took of each source."""

    difference: StepDifference | None
    passed: tuple[SkipAt, ...]
    stretches: Stretches


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesTask:
    """Sums up the documents of these files of the list that an epoch of a source reads, with this encoder."""

    source: str
    epoch: int  # transforms draw anew in each, and it may have a list of its own
    encoder: EncoderChoice
    files: range

    def __str__(self) -> str:
        return f"read {count(len(self.files), 'file')} of source {self.source}"


Task = StepsTask | FilesTask
Found = StepsFound | EpochChecksum


def carry_out(spec: DataSpec, task: Task, done: Done) -> Found:
    """Executes the task. Raises as the stream and its files do."""
    if isinstance(task, FilesTask):
        return checksum_files(spec, task.encoder, task.source, task.epoch, task.files, done)
    walk = PartWalk(spec, task.part, by_reference=task.by_reference)
    difference = next(walk.differences(done), None)
    stretches = walk.stretches() if difference is None else {}
    return StepsFound(difference=difference, passed=tuple(walk.passed), stretches=stretches)


def ends_all(found: Found) -> bool:
    """Whether nothing after it in the audit matters any more."""
    return isinstance(found, StepsFound) and found.difference is not None


def files_tasks(spec: DataSpec, wanted: Sequence[EpochFiles], least_bytes: int) -> list[FilesTask]:
    """Tasks for all files of these epochs' lists, each with its encoder, in runs of at least `least_bytes`
    stored bytes if possible.
    """
    tasks = []
    for source, epoch, encoder in wanted:
        begin = held = 0
        sizes = spec.plan_of(source, epoch).manifest.files.sizes.tolist()
        for number, size in enumerate(sizes):
            held += size
            if held >= least_bytes or number == len(sizes) - 1:
                files = range(begin, number + 1)
                tasks.append(FilesTask(source=source, epoch=epoch, encoder=encoder, files=files))
                begin, held = number + 1, 0
    return tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Progressed:
    """Additional steps or files of the current task, and their positions or bytes."""

    times: int
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFailed:
    """The task raised this. `error` is None if it is none of our classes; `text` is its text."""

    error: OrchestratorError | None
    text: str


Message = Progressed | TaskFailed | Found
"""A message of a process that executes a task; the result comes last."""


WORKER = f"from {__name__} import run_worker; run_worker()"
Advanced = Callable[[int, int, int], None]
"""(number of the task, additional steps or files, their positions or bytes)"""


class AuditProcessError(OrchestratorError):
    """A process of the audit ended before its task. Nothing was shown; try again."""


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class InThisProcess:
    """Executes one task after the other in this process."""

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec

    def run(self, tasks: Sequence[Task], advanced: Advanced) -> list[Found]:
        """The results of the tasks, in order; nothing follows one that `ends_all`."""
        results = list[Found]()
        for number, task in enumerate(tasks):
            results.append(carry_out(self._spec, task, lambda num, at=number: advanced(at, 1, num)))  # type: ignore[misc]
            if ends_all(results[-1]):
                break
        return results


class AuditProcesses:
    """Executes tasks in child processes, which end with it."""

    def __init__(self, spec: DataSpec, num_processes: int) -> None:
        self._spec, self._num = spec, num_processes
        self._workers: list[_Worker] = []

    def __enter__(self) -> AuditProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()

    @property
    def process_ids(self) -> list[int]:
        """The ids of the started processes."""
        return [worker.process_id for worker in self._workers]

    def run(self, tasks: Sequence[Task], advanced: Advanced) -> list[Found]:
        """Runs tasks as `InThisProcess.run`, but in parallel.

        An error is raised when all tasks before its own have ended without one, so that it is the one that a
        single process would have met.
        """
        ended = dict[int, Found | TaskFailed]()
        busy: dict[Any, _Worker] = {}
        while len(self._workers) < min(self._num, len(tasks)):
            self._workers.append(_Worker(self._spec))
        idle, num_given = list(self._workers), 0
        while (reached := _reached(ended)) < len(tasks):
            if reached and _decides(ended[reached - 1]):
                break
            while idle and num_given < len(tasks):
                worker = idle.pop(0)
                worker.give(num_given, tasks[num_given])
                busy[worker.answers], num_given = worker, num_given + 1
            for ready in wait(list(busy)):
                worker = busy[ready]
                message = worker.hear()
                if isinstance(message, Progressed):
                    advanced(worker.task_number, message.times, message.num)
                    continue
                ended[worker.task_number] = message
                idle.append(busy.pop(worker.answers))
        for worker in busy.values():  # their results no longer matter
            worker.end()
            self._workers.remove(worker)
        return [_found(ended[number]) for number in range(_reached(ended))]


def _reached(ended: dict[int, Found | TaskFailed]) -> int:
    """The number of tasks from the first on that have ended, up to one after which no other matters."""
    number = 0
    while number in ended:
        number += 1
        if _decides(ended[number - 1]):
            break
    return number


def _decides(found: Found | TaskFailed) -> bool:
    return isinstance(found, TaskFailed) or ends_all(found)


def _found(message: Found | TaskFailed) -> Found:
    if not isinstance(message, TaskFailed):
        return message
    if message.error is not None:
        raise message.error
    raise AuditProcessError(
        f"a process of the audit failed, so nothing was shown:\n{message.text}", code="internal.audit_process"
    )


class _Worker:
    """A process, and the pipes to it."""

    def __init__(self, spec: DataSpec) -> None:
        their_tasks, our_tasks = os.pipe()
        our_answers, their_answers = os.pipe()
        # the child searches this process's path and the current folder
        places = [*(path for path in sys.path if path), os.getcwd()]
        self._process = subprocess.Popen(  # noqa: S603  this Python, and a module of ours
            [sys.executable, "-P", "-c", WORKER, str(their_tasks), str(their_answers)],
            stdin=subprocess.DEVNULL,
            pass_fds=(their_tasks, their_answers),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        os.close(their_tasks)
        os.close(their_answers)
        self._tasks = Connection(our_tasks, readable=False)
        self.answers = Connection(our_answers, writable=False)
        self.task_number, self._task = -1, ""
        with suppress(BrokenPipeError):  # `hear` reports that it has ended
            self._tasks.send(spec)

    @property
    def process_id(self) -> int:
        """The process id of the operating system."""
        return self._process.pid

    def give(self, number: int, task: Task) -> None:
        """Sends a task."""
        self.task_number, self._task = number, str(task)
        with suppress(BrokenPipeError):
            self._tasks.send(task)

    def hear(self) -> Any:
        """Receives the next message. Raises `AuditProcessError` if the process has ended."""
        try:
            return self.answers.recv()
        except (EOFError, ConnectionResetError):
            raise AuditProcessError(
                f"process {self._process.pid} of the audit {_how_it_ended(self._process.wait())} while it "
                f"{self._task}, so nothing was shown; audit again, with fewer --processes if memory ran out",
                code="audit.process_died",
            ) from None

    def end(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
        self._tasks.close()
        self.answers.close()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed ({signal.Signals(-code).name})"


TELL_EVERY_S = 0.2


class _Teller:
    """Reports progress, not too often."""

    def __init__(self, out: Connection[Any, Any]) -> None:
        self._out, self._told = out, time.monotonic()
        self._times = self._num = 0

    def done(self, num: int) -> None:
        self._times, self._num = self._times + 1, self._num + num
        if time.monotonic() - self._told >= TELL_EVERY_S:
            self.tell()

    def tell(self) -> None:
        if self._times:
            self._out.send(Progressed(times=self._times, num=self._num))
        self._times, self._num, self._told = 0, 0, time.monotonic()


def _answer(spec: DataSpec, task: Task, out: Connection[Any, Any]) -> None:
    teller = _Teller(out)
    try:
        found: Message = carry_out(spec, task, teller.done)
    except OrchestratorError as error:
        found = TaskFailed(error=error, text=str(error))
    except Exception:  # noqa: BLE001  the parent reports it
        found = TaskFailed(error=None, text=traceback.format_exc())
    teller.tell()
    out.send(found)


def _listen(asked: Connection[Any, Any], queue: SimpleQueue[Any]) -> None:
    """Ends the process when the task pipe is closed."""
    try:
        while True:
            queue.put(asked.recv())
    except EOFError:
        os._exit(0)


def run_worker() -> None:
    """Runs a process of an audit; `sys.argv` has two inherited file descriptors.

    It reads the run's data and then tasks from one pipe, and writes the results into the other. It ends when
    the task pipe is closed, even in the middle of a task: then its parent is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of a terminal; the parent decides
    asked, out = (Connection(int(number)) for number in sys.argv[1:3])
    queue: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_listen, args=(asked, queue), daemon=True).start()
    spec = queue.get()
    while True:
        _answer(spec, queue.get(), out)
