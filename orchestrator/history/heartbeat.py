"""The sign of life of one attempt: a file that changes, for other starts to watch (membership rule 12).

It knows nothing of who watches and decides nothing; what the file contains means nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from orchestrator.errors import StorageError
from orchestrator.storage.disk import AppendHandle
from orchestrator.storage.files import Storage

BEAT_LIMIT_S = 6.0  # others watch for 10 s (membership rule 12)
CLOSE_S = 5.0


class Heartbeat(Protocol):
    """`at_once`: how many beats may be under way at a time, in threads."""

    at_once: int

    def beat(self) -> bool:
        """Another content, which others see when this returns; False if storage did not take it (it may have
        waited for that). The caller beats again after its usual time, and need not report it: the journal
        fails with the storage.
        """
        ...

    def close(self) -> None:
        """No more beats come; nothing of it is kept open."""


def heartbeat_of(storage: Storage, path: str) -> Heartbeat:
    """The one for this storage; `path` is the first file's, and nothing is written before the first beat."""
    return GrowingHeartbeat(storage, path) if storage.traits.appends else RenewedHeartbeat(storage, path)


class GrowingHeartbeat:
    """One more byte each time. A file is dead after a failed write (which may take 2 s), so the next beat
    begins another one (`0003.heartbeat-2`) and takes the dead one away: the sign of life returns when the
    storage does.
    """

    at_once = 1

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path, self._next = storage, path, path
        self._files = 0
        self._file: AppendHandle | None = None

    def beat(self) -> bool:
        """See `Heartbeat`."""
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(b".")
            self._file.sync()  # a network file system may keep it for longer than others watch
        except StorageError:
            self._file = None
            return False
        return True

    def close(self) -> None:
        """See `Heartbeat`."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(StorageError):  # what was written had been synced
                file.close()

    def _open(self) -> AppendHandle:
        if self._files:  # else a storage that is full for hours would gather empty files
            self._storage.delete(self._next)
            self._next = f"{self._path}-{self._files + 1}"
        self._files += 1
        return self._storage.append(self._next)


class RenewedHeartbeat:
    """One object, put anew each time, never with a content that it had. A beat that comes late takes the
    place of a newer one: that is another content, too, so that others watch for longer.

    A request that hangs is given up after `BEAT_LIMIT_S`, and the next beats do not wait for it.
    """

    at_once = 4

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage.within(BEAT_LIMIT_S), path
        self._numbers = itertools.count(1)

    def beat(self) -> bool:
        """See `Heartbeat`."""
        number = next(self._numbers)
        try:
            # where a list says no tag, the size shows it
            self._storage.write(self._path, f"{number}".encode() + b"." * (number % 60))
        except StorageError:
            return False
        return True

    def close(self) -> None:
        """See `Heartbeat`: nothing is."""


class Pulse:
    """Beats when it is asked to, and waits for nothing: in threads of its own, so that the sign of life does
    not wait behind a long commit, and another start take the attempt for dead.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._beating: list[threading.Thread] = []
        self._over = False

    def beat(self) -> None:
        """Begins a beat, unless as many are under way as may be: while storage hangs no more queue up."""
        self._beating = [thread for thread in self._beating if thread.is_alive()]
        if len(self._beating) < self._heartbeat.at_once and not self._over:
            thread = threading.Thread(target=self._heartbeat.beat, name="heartbeat", daemon=True)
            thread.start()
            self._beating.append(thread)

    def close(self) -> None:
        """No more beats begin, and those under way have ended, unless storage hangs for longer than 5 s."""
        self._over = True
        until = time.monotonic() + CLOSE_S
        for thread in self._beating:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._beating):
            self._heartbeat.close()


@contextmanager
def beating(heartbeat: Heartbeat, every_s: float) -> Iterator[None]:
    """Beats at once and every so often, from threads, until it is left."""
    over, pulse = threading.Event(), Pulse(heartbeat)

    def beat() -> None:
        while True:
            pulse.beat()
            if over.wait(every_s):
                return

    thread = threading.Thread(target=beat, name="start heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        pulse.close()
