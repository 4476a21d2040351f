"""The log file of a launch: all messages, with time stamps, and details that are not on the screen.

It is in the run's storage (`logs/0003-<host>.log`, after the attempt that the launch began with), for people:
it is never read back, and a failure to write it never stops or delays a run. For a bucket, it grows in a
local folder, and is published every 60 s and at the end.
"""

from __future__ import annotations

import queue
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from orchestrator.history.metrics.published_folder import PublishedFolder
from orchestrator.storage.files import Storage
from orchestrator.terminal_text import visible

FOLDER = "logs"
CLOSE_S = 5.0  # how long the end of a run waits for a storage that hangs


class RunLog:
    """Collects lines until it has a file; from then on a thread writes them.

    Lines are only appended. An error is reported once, and lines that cannot be written are dropped.
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
