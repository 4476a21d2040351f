"""Writes a rank's parts in a separate process, which also hashes them. It is restarted if it dies.

Training thus keeps its interpreter and its memory to itself. Usage: `python -m
orchestrator.checkpoint.files.part_writer ROOT PARENT CANCELS`.

The process reads jobs (`job_line`) as lines of JSON from its input and answers each with a line. Buffers are
identified by the name under which another process opens them. Before the answer it writes lines that report
progress. A line with a number from the pipe CANCELS ends all jobs up to that one within a piece. The process
ends when its input does, and with the thread that started it, however that ends (Linux: PR_SET_PDEATHSIG). It
loads neither torch nor Ray.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import orjson

from orchestrator.checkpoint.files.part_file import PartRows, goes_on, make_part, write_part
from orchestrator.errors import OrchestratorError, StorageError, text_of
from orchestrator.planning.state.state_layout import BufferRows, Layout, StateTensor
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage

# A smaller part takes a thread some milliseconds. A process takes 60 MB, and 0.3 s of CPU to start.
PROCESS_FROM_BYTES = 8 << 20
_MOST_DEATHS = 3
_CLOSE_S = 10.0  # for a piece to end
_WRITER = "orchestrator.checkpoint.files.part_writer"


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


# ------------------------------------------------------------------------------------------------------- jobs
class PartCancelled(OrchestratorError):
    """The part is no longer wanted. No file of it is left."""

    code = "point.part_cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWritten:
    """A part that is whole and durable.

    `sums`: for each group the sum of its rows in it. `nodes`: those on whose disks it is (see `Vote`).
    """

    entry: FileEntry
    sums: dict[str, int]
    nodes: tuple[NodePlace, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPart:
    """Rows that are to be written: their place in the job's buffer, and torch's name of their type."""

    place: BufferRows
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PartJob:
    """A request to write the part of `rank` into the folder of `point`.

    `buffer` is a file that processes share: a path, or `/proc/<pid>/fd/<number>` of an open file without a
    name (`memfd_create`). It must not be written to from the beginning of the job to its answer.
    """

    point: str
    layout: Layout
    rank: int
    parts: tuple[JobPart, ...]
    buffer: str

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all rows."""
        return sum(part.place.num_bytes for part in self.parts)


def shared_path(handle: int) -> str:
    """Returns the name under which other processes of this user open a file that this one has open."""
    return f"/proc/{os.getpid()}/fd/{handle}"


class MappedBuffer:
    """Keeps the newest buffer mapped until a job uses another one, or one that has grown.

    Mapping a GB takes 0.1 s of CPU.
    """

    def __init__(self) -> None:
        self._key, self._memory = (0, 0, 0), memoryview(b"")

    def of(self, path: str) -> memoryview:
        """Returns the bytes of the file. Raises `StorageError`."""
        try:
            facts = os.stat(path)
        except OSError as error:
            raise _unreachable(path, error) from error
        key = (facts.st_dev, facts.st_ino, facts.st_size)
        if key != self._key:
            self._memory = memoryview(b"")  # not two at a time
            self._key, self._memory = key, _mapped(path)
        return self._memory


def perform(
    storage: Storage,
    job: PartJob,
    check: Callable[[], None] = goes_on,
    kept: MappedBuffer | None = None,
) -> PartWritten:
    """Hashes and writes the part.

    `check` is called between pieces. `kept` has the mapping of a process that writes one part after the
    other. Raises `StorageError`, also if the buffer cannot be opened or ends too early, and what `check`
    raises.
    """
    buffer, rows = (kept or MappedBuffer()).of(job.buffer), []
    for part in job.parts:
        place = part.place
        data = buffer[place.offset : place.offset + place.num_bytes]
        if len(data) != place.num_bytes:
            raise StorageError(
                f"the buffer {job.buffer} has {len(buffer)} bytes, but {place.tensor.group}/"
                f"{place.tensor.name} needs {place.num_bytes} bytes at {place.offset}; stop the run, and "
                "report this bug",
                code="internal.short_buffer",
            )
        rows.append(PartRows(tensor=place.tensor, dtype=part.dtype, rows=place.rows, data=data))
    made = make_part(job.point, job.layout, job.rank, rows, check)
    return PartWritten(entry=write_part(storage, job.point, made, check), sums=made.sums)


def _mapped(path: str) -> memoryview:
    """Maps a file's bytes without a copy, as long as there is a view of them."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if not size:
                return memoryview(b"")
            # MAP_POPULATE: all pages at once instead of a fault for every few
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return memoryview(mmap.mmap(handle, size, flags, mmap.PROT_READ))
        finally:
            os.close(handle)
    except OSError as error:
        raise _unreachable(path, error) from error


def _unreachable(path: str, error: OSError) -> StorageError:
    return StorageError(
        f"cannot open the buffer {path} of a save ({error.strerror or error}); memory that is shared "
        "between processes is needed: check that /proc is mounted, and the limits of the container",
        code="machine.no_shared_memory",
    )


# -------------------------------------------------------------------------- the lines of a job and its answer
def job_line(number: int, job: PartJob) -> bytes:
    """Encodes a job as a line of JSON."""
    parts = [
        [
            part.place.tensor.group,
            part.place.tensor.name,
            part.place.tensor.shape,
            part.place.tensor.itemsize,
            part.place.tensor.sharded,
            part.dtype,
            part.place.rows.start,
            part.place.rows.stop,
            part.place.offset,
        ]
        for part in job.parts
    ]
    layout = [job.layout.num_shards, job.layout.num_replicas]
    content = {
        "job": number,
        "point": job.point,
        "layout": layout,
        "rank": job.rank,
        "buffer": job.buffer,
        "parts": parts,
    }
    return orjson.dumps(content) + b"\n"


def job_of(content: dict[str, Any]) -> PartJob:
    """Decodes the content of a `job_line`."""
    num_shards, num_replicas = content["layout"]
    return PartJob(
        point=content["point"],
        layout=Layout(num_shards=num_shards, num_replicas=num_replicas),
        rank=content["rank"],
        parts=tuple(
            JobPart(
                place=BufferRows(
                    tensor=StateTensor(
                        group=group, name=name, shape=tuple(shape), itemsize=itemsize, sharded=sharded
                    ),
                    rows=range(first, last),
                    offset=offset,
                ),
                dtype=dtype,
            )
            for group, name, shape, itemsize, sharded, dtype, first, last, offset in content["parts"]
        ),
        buffer=content["buffer"],
    )


def written_line(number: int, written: PartWritten) -> bytes:
    """Encodes an answer as a line of JSON."""
    entry = written.entry
    sums = {group: f"{total:032x}" for group, total in written.sums.items()}
    content = {
        "job": number,
        "path": entry.path,
        "bytes": entry.bytes,
        "digest": entry.digest,
        "sums": sums,
    }
    return orjson.dumps(content) + b"\n"


def failed_line(number: int, reason: str, code: str | None, cancelled: bool) -> bytes:
    """Encodes a failure, with nothing written, as a line of JSON."""
    content = {"job": number, "failed": reason, "code": code, "cancelled": cancelled}
    return orjson.dumps(content) + b"\n"


def answer_of(line: bytes) -> PartWritten:
    """Decodes an answer. Raises `PartCancelled`, and `StorageError` with the reason of a failure."""
    content = orjson.loads(line)
    if "failed" in content:
        kind = PartCancelled if content["cancelled"] else StorageError
        raise kind(content["failed"], code=content["code"])
    entry = FileEntry(path=content["path"], bytes=content["bytes"], digest=content["digest"])
    sums = {group: int(text, 16) for group, text in content["sums"].items()}
    return PartWritten(entry=entry, sums=sums)


# ------------------------------------------------------------------------------------------------ the process
_PR_SET_PDEATHSIG = 1
_PIPE_BYTES = 64 << 10
_NICE = 5  # a save may wait, a step may not
GROWS = b"grows\n"  # reported for the current job, at most once a second
_GROWS_EVERY_S = 1.0
CANCELLED = "the save is not wanted any more; its part is cancelled"


class _Cancelled:
    """The newest cancelled job, read from the pipe at each check.

    A job that was cancelled before it was taken up is never begun.
    """

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._rest, self._up_to = pipe, b"", -1

    def check(self, number: int) -> None:
        """Raises `PartCancelled` if this job is cancelled. All are once the pipe has ended."""
        while self._up_to < sys.maxsize:
            try:
                said = os.read(self._pipe, _PIPE_BYTES)
            except BlockingIOError:
                break
            *lines, self._rest = (self._rest + said).split(b"\n")
            self._up_to = max([self._up_to, *map(int, lines)]) if said else sys.maxsize
        if number <= self._up_to:
            raise PartCancelled(CANCELLED)


def main(root: str, parent: int, cancels: int) -> None:
    """Serves until the input ends."""
    _end_with(parent)
    # The rank decides when to stop, and a save in progress is part of its stopping.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    storage, cancelled, kept = open_storage(root), _Cancelled(cancels), MappedBuffer()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_answer(storage, orjson.loads(line), cancelled, kept))
        sys.stdout.buffer.flush()


def _answer(storage: Storage, content: dict[str, Any], cancelled: _Cancelled, kept: MappedBuffer) -> bytes:
    number, said_at = content["job"], time.monotonic()

    def check() -> None:
        nonlocal said_at
        cancelled.check(number)
        if time.monotonic() - said_at > _GROWS_EVERY_S:
            said_at = time.monotonic()
            sys.stdout.buffer.write(GROWS)
            sys.stdout.buffer.flush()

    try:
        written = perform(storage, job_of(content), check, kept)
    except OrchestratorError as error:
        return failed_line(number, text_of(error), error.code, isinstance(error, PartCancelled))
    return written_line(number, written)


def _end_with(parent: int) -> None:
    """Makes this process end with the process that started it, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"the process {parent} that wanted a writer of points has ended")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
