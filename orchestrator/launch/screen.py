"""Standard output and error of a launch, which may go away while it runs: a pipe whose reader has ended, a
terminal that was closed, a full disk. What they do not take is lost, and nothing else.

It knows nothing of what is written.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

_GONE = (OSError, ValueError)  # a closed file raises the latter


class Screen:
    """A text stream for people over another one (None: the process was started without it). Each write is
    tried, so a stream that recovers shows what comes then; none raises for what the stream does.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """The stream's."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Returns the length of `text`, whether it was taken or not."""
        if self._stream is not None:
            with suppress(*_GONE):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """What was written is on its way, or lost."""
        if self._stream is not None:
            with suppress(*_GONE):
                self._stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal, now."""
        if self._stream is not None:
            with suppress(*_GONE):
                return self._stream.isatty()
        return False


def let_go(stream: TextIO | None) -> None:
    """The last use of a standard stream: what it still holds is written or, if it cannot be, lost for good,
    so that the interpreter's own flush at its exit changes no exit code.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except _GONE:
        with suppress(*_GONE):  # no file stands behind it, or it is closed
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
