"""The sign of life of one attempt: a file that grows, for other starts to watch (membership rule 12).

It knows nothing of who watches and decides nothing; what the file contains means nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from orchestrator.errors import StorageError
from orchestrator.storage.disk import AppendHandle
from orchestrator.storage.files import Storage


class Heartbeat:
    """For one thread. A file is dead after a failed write, so the next beat begins another one
    (`0003.heartbeat-2`) and takes the dead one away: the sign of life returns when the storage does.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        """`path` is the first file's; nothing is written before the first beat."""
        self._storage, self._path, self._next = storage, path, path
        self._files = 0
        self._file: AppendHandle | None = None

    def beat(self) -> bool:
        """One more byte, which others see when this returns; False if storage did not take it (it may have
        waited about 2 s for that). The caller beats again after its usual time, and need not report it: the
        journal fails with the storage.
        """
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(b".")
            self._file.sync()  # a network file system may keep it for longer than others watch
        except StorageError:
            self._file = None
            return False
        return True

    def _open(self) -> AppendHandle:
        if self._files:  # else a storage that is full for hours would gather empty files
            self._storage.delete(self._next)
            self._next = f"{self._path}-{self._files + 1}"
        self._files += 1
        return self._storage.append(self._next)


@contextmanager
def beating(heartbeat: Heartbeat, every_s: float) -> Iterator[None]:
    """Beats at once and every so often, from a thread, until it is left."""
    over = threading.Event()

    def beat() -> None:
        while True:
            heartbeat.beat()
            if over.wait(every_s):
                return

    thread = threading.Thread(target=beat, name="start heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Pulse:
    """Beats when it is asked to, and waits for nothing: in a thread of its own, so that the sign of life does
    not wait behind a long commit, and another start take the attempt for dead.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heartbeat")
        self._beating: Future[bool] | None = None

    def beat(self) -> None:
        """Begins a beat, if none is under way: while storage hangs none queue up."""
        if self._beating is None or self._beating.done():
            self._beating = self._thread.submit(self._heartbeat.beat)
