"""A process of an audit: `python -m orchestrator.inspect.audit.audit_worker IN OUT`.

It reads the run's data and then tasks from one pipe (inherited file descriptors), and writes the results into
the other. It ends when the task pipe is closed, even in the middle of a task: then its parent is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError
from orchestrator.inspect.audit.audit_tasks import Failed, Message, Progressed, Task, carry_out

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
        found = Failed(error=error, text=str(error))
    except Exception:  # noqa: BLE001  the parent reports it
        found = Failed(error=None, text=traceback.format_exc())
    teller.tell()
    out.send(found)


def _listen(asked: Connection[Any, Any], queue: SimpleQueue[Any]) -> None:
    """Ends the process when the task pipe is closed."""
    try:
        while True:
            queue.put(asked.recv())
    except EOFError:
        os._exit(0)


def main() -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of a terminal; the parent decides
    asked, out = (Connection(int(number)) for number in sys.argv[1:3])
    queue: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_listen, args=(asked, queue), daemon=True).start()
    spec = queue.get()
    while True:
        _answer(spec, queue.get(), out)


if __name__ == "__main__":
    main()
