"""Standard output and error of a command whose reader is slow, has stopped, or is gone.

A launch must never wait for the reader of its messages: a terminal after Ctrl-S, a pager, a `tee` whose disk
hangs, a stuck log collector. `Screen` queues each message, and one thread per file descriptor writes the
queue. Messages that the reader does not take are lost on the screen, but the log file of the run has all of
them. The result of a command (`ResultStream`) is different: a pager may take its time, and a result that
cannot be written is an error.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import select
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

from orchestrator.errors import OrchestratorError
from orchestrator.text import visible

_GONE = (OSError, ValueError)  # a closed file raises the latter
MOST_WAITING = 5_000  # messages that wait for a reader; later ones are dropped and counted
LET_GO_S = 5.0  # how long the end of a command waits for the reader of its messages


class OutputError(OrchestratorError):
    """The result of a command cannot be written to standard output."""

    code = "output.not_written"


class _Outlet:
    """Writes to one file descriptor from its own thread.

    It uses no Python file object, because a blocked write would hold its lock while the interpreter ends.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._dropped = 0
        self._error: OSError | None = None  # of the newest write
        self._stands_still = False  # nothing was written since a `drain` timed out
        threading.Thread(target=self._write_all, name="screen", daemon=True).start()

    def put(self, data: bytes) -> None:
        """Queues data and returns at once. Safe in a signal handler."""
        if self._queue.qsize() < MOST_WAITING:
            self._put_number_of_dropped()
            self._queue.put(data)
        else:
            self._dropped += 1

    def _put_number_of_dropped(self) -> None:
        """Queues the notice in place of the dropped messages."""
        if self._dropped:
            lost, self._dropped = self._dropped, 0
            self._queue.put(b"[%d messages are missing here: nothing read this output]\n" % lost)

    def drain(self, limit_s: float) -> str:
        """Waits until all queued data are written. Returns why they are not; empty if they are.

        If the reader has taken nothing since an earlier call timed out, this one does not wait again.
        """
        reached = threading.Event()
        self._put_number_of_dropped()
        self._queue.put(reached)
        if self._stands_still or not reached.wait(limit_s):
            self._stands_still = True
            return "its reader takes nothing"
        return "" if self._error is None else self._error.strerror or str(self._error)

    def _write_all(self) -> None:
        while True:
            data = self._queue.get()
            if isinstance(data, threading.Event):
                data.set()
                continue
            try:
                self._write(data)
                self._error, self._stands_still = None, False
            except OSError as error:
                self._error = error

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._handle, left) :]
            except BlockingIOError:  # another program made the descriptor non-blocking
                select.select([], [self._handle], [])


_outlets: dict[int, _Outlet] = {}
_making = threading.RLock()  # a signal handler may write while its thread makes an outlet
os.register_at_fork(after_in_child=_outlets.clear)  # a child has none of the threads


def _outlet_of(stream: TextIO | None) -> _Outlet | None:
    """The outlet of a stream's file descriptor; None for a stream that has none, such as a text in memory."""
    if stream is None:
        return None
    try:
        handle = stream.fileno()
    except _GONE:
        return None
    with _making:
        if handle not in _outlets:
            _outlets[handle] = _Outlet(handle)
        return _outlets[handle]


class Screen(io.TextIOBase):
    """A text stream for messages over another one (None: the process was started without it).

    A write returns at once and raises no error of the stream. A stream that recovers shows what is written
    then.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._outlet = stream, _outlet_of(stream)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Returns the length of `text`, whether it is shown or not."""
        if self._outlet is not None:
            self._outlet.put(text.encode(self.encoding, "backslashreplace"))
        elif self._stream is not None:
            with suppress(*_GONE):
                self._stream.write(text)
        return len(text)

    def say(self, text: str) -> None:
        """Writes a line of text, which may contain texts of a run."""
        self.write(visible(text) + "\n")

    def drain(self, limit_s: float = LET_GO_S) -> str:
        """Waits at most `limit_s` seconds until everything is written. Returns why it is not; empty if it
        is.
        """
        if self._outlet is not None:
            return self._outlet.drain(limit_s)
        return "it is closed" if self._stream is None or self._stream.closed else ""

    def isatty(self) -> bool:
        """Whether it is a terminal now."""
        if self._stream is not None:
            with suppress(*_GONE):
                return self._stream.isatty()
        return False

    def fileno(self) -> int:
        """The stream's."""
        if self._stream is None:
            raise io.UnsupportedOperation("the process was started without this stream")
        return self._stream.fileno()


class ResultStream(io.TextIOBase):
    """Standard output of a command that prints a result: each write waits for the reader.

    Raises `OutputError` if the result cannot be written. A reader that has left (`| head`) raises
    `BrokenPipeError`, as any stream does.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Writes all of `text`."""
        if self._stream is None:
            raise _not_written("it is closed")
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except _GONE as error:
            raise _not_written(getattr(error, "strerror", None) or str(error)) from error

    def flush(self) -> None:
        """Passes everything to the operating system."""
        if self._stream is None:
            return
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except _GONE as error:
            raise _not_written(getattr(error, "strerror", None) or str(error)) from error

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """The stream's."""
        if self._stream is None:
            raise io.UnsupportedOperation("the process was started without this stream")
        return self._stream.fileno()


@contextmanager
def output_never_waits() -> Iterator[None]:
    """While a launch runs, output of libraries does not wait for a reader either."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Screen(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def write_result(stream: TextIO, text: str) -> None:
    """Writes the result of a launch that has ended. Waits `LET_GO_S` seconds for a reader that has stopped.

    Raises `OutputError`.
    """
    screen = Screen(stream)
    screen.write(text)
    if reason := screen.drain():
        raise _not_written(reason)


def _not_written(reason: str) -> OutputError:
    return OutputError(
        f"the result cannot be written to standard output: {reason}. What the command did is done; give it "
        "an output that can be written to see the result"
    )


class _Visible(logging.Formatter):
    """Formats log records as lines."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def show_faults_as_data() -> None:
    """Makes warnings and thread errors `visible` on this process's stderr.

    These are warnings that are logged while no program has set up logging, and errors that end a thread.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    threading.excepthook = _say_fault


def _say_fault(fault: threading.ExceptHookArgs) -> None:
    if fault.exc_value is not None and not isinstance(fault.exc_value, SystemExit):
        who = fault.thread.name if fault.thread is not None else "a thread"
        trace = "".join(traceback.format_exception(fault.exc_value)).rstrip()
        Screen(sys.stderr).say(f"Exception in thread {who}:\n{trace}")


def let_go(stream: TextIO | None) -> None:
    """Flushes a standard stream for the last time.

    Data that cannot be written are dropped, so that the interpreter's own flush at its exit changes no exit
    code.
    """
    if stream is None:
        return
    with suppress(*_GONE):
        if stream.fileno() in _outlets:
            Screen(stream).drain()
    try:
        stream.flush()
    except _GONE:
        with suppress(*_GONE):  # no file is behind it, or it is closed
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
