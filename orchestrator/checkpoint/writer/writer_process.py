"""A process beside each rank that hashes and writes its parts, and the jobs that it gets.

Training thus keeps its interpreter and its memory to itself. Usage: `python -m
orchestrator.checkpoint.writer.writer_process ROOT PARENT CANCELS`.

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
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.checkpoint.files.part_file import PartRows, goes_on, make_part, write_part
from orchestrator.errors import OrchestratorError, StorageError, text_of
from orchestrator.planning.state.state_layout import BufferRows, Layout, StateTensor
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage


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
    name (`memfd_create`). It must not be written to from the job's begin to its answer.
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


# ---------------------------------------------------------------------------------------------------- lines
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
