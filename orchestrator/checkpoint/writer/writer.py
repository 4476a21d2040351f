"""A process beside each rank that hashes and writes its parts.

Training thus keeps its interpreter and its memory to itself. Usage: `python -m
orchestrator.checkpoint.writer.writer ROOT PARENT CANCELS`.

The process reads jobs (`part_job`) as lines from its input and answers each with a line. Before the answer it
writes lines that report progress. A line with a number from the pipe CANCELS ends all jobs up to that one
within a piece. The process ends when its input does, and with the thread that started it, however that ends
(Linux: PR_SET_PDEATHSIG). It loads neither torch nor Ray.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import orjson

from orchestrator.checkpoint.writer.part_job import (
    MappedBuffer,
    PartCancelled,
    failed_line,
    job_of,
    perform,
    written_line,
)
from orchestrator.errors import OrchestratorError, text_of
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage

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
