"""Determines whether another launch is active on this run, and keeps its heartbeat (membership rule 12).

A start repeatedly observes the newest attempt and `judge` decides: observations and times are passed in as
values. The heartbeat of an attempt is a file that changes; its content has no meaning.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from orchestrator.errors import StorageError
from orchestrator.storage.disk import AppendHandle
from orchestrator.storage.files import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class RunObservation:
    """One observation of a run.

    `newest`: the newest attempt's number, 0 for a run without any. `over`: it recorded its end, or its
    processes are known to be dead. `signs`: everything that would change if it were alive.
    """

    newest: int
    over: bool
    signs: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Attempt `number` is watched since `since_s` (seconds, any origin) and has not changed. Observe
    again.
    """

    number: int
    signs: bytes
    since_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """No launch is active on attempt `number` (0: there is none). The start may claim exactly the next
    number.

    If another launch has claimed that number meanwhile, it is alive: the claim fails, and the run is busy.
    """

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """Attempt `number` is alive."""

    number: int


def judge(watch: Watch | None, look: RunObservation, now_s: float, watch_s: float) -> Watch | Free | Busy:
    """The verdict from an observation and the watch so far (None: this is the first observation).

    Guarantee: an attempt that is judged free has ended, or showed no change for `watch_s` seconds. A launch
    that shows a change every `watch_s` seconds, from its claim on, is therefore never taken for dead.
    """
    if watch is not None and look.newest > watch.number:
        return Busy(number=look.newest)  # it was claimed just now
    if look.newest == 0 or look.over:
        return Free(number=look.newest)
    if watch is None:
        return Watch(number=look.newest, signs=look.signs, since_s=now_s)
    if look.signs != watch.signs:
        return Busy(number=watch.number)
    if now_s - watch.since_s >= watch_s:
        return Free(number=watch.number)
    return watch


BEAT_LIMIT_S = 6.0  # others watch for 10 s (membership rule 12)
CLOSE_S = 5.0


class Heartbeat(Protocol):
    """`at_once`: the maximum number of concurrent beats, in threads."""

    at_once: int

    def beat(self) -> bool:
        """Changes the content, which is visible to others when this returns.

        Returns False if storage did not accept it (perhaps after a wait). The caller beats again after its
        usual interval and need not report it: the journal fails with the storage.
        """
        ...

    def close(self) -> None:
        """Ends the heartbeat and closes its file."""


def heartbeat_of(storage: Storage, path: str) -> Heartbeat:
    """The heartbeat for this storage. `path` is the first file's. Writes nothing before the first beat."""
    return GrowingHeartbeat(storage, path) if storage.traits.appends else RenewedHeartbeat(storage, path)


class GrowingHeartbeat(Heartbeat):
    """Appends one byte each time.

    A file is dead after a failed write (which may take 2 s), so the next beat begins another one
    (`0003.heartbeat-2`) and deletes the dead one. The heartbeat returns when the storage does.
    """

    at_once = 1

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path, self._next = storage, path, path
        self._files = 0
        self._file: AppendHandle | None = None

    @override
    def beat(self) -> bool:
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(b".")
            self._file.sync()  # a network file system may buffer it for longer than others watch
        except StorageError:
            self._file = None
            return False
        return True

    @override
    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(StorageError):  # everything written was already synced
                file.close()

    def _open(self) -> AppendHandle:
        if self._files:  # else a storage that is full for hours would collect empty files
            self._storage.delete(self._next)
            self._next = f"{self._path}-{self._files + 1}"
        self._files += 1
        return self._storage.append(self._next)


class RenewedHeartbeat(Heartbeat):
    """Rewrites one object each time, always with new content.

    A late beat may replace a newer one: that is new content, too, so that others watch for longer. A request
    that hangs is given up after `BEAT_LIMIT_S`, and the next beats do not wait for it.
    """

    at_once = 4

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage.within(BEAT_LIMIT_S), path
        self._numbers = itertools.count(1)

    @override
    def beat(self) -> bool:
        number = next(self._numbers)
        try:
            # if a list has no tags, the size shows the change
            self._storage.write(self._path, f"{number}".encode() + b"." * (number % 60))
        except StorageError:
            return False
        return True

    @override
    def close(self) -> None:
        """Nothing is open."""


class Pulse:
    """Starts beats on request without waiting, in its own threads.

    The heartbeat therefore does not wait behind a long commit, after which another start would take the
    attempt for dead.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._beating: list[threading.Thread] = []
        self._over = False

    def beat(self) -> None:
        """Starts a beat, unless the maximum number is running: they do not queue up while storage hangs."""
        self._beating = [thread for thread in self._beating if thread.is_alive()]
        if len(self._beating) < self._heartbeat.at_once and not self._over:
            thread = threading.Thread(target=self._heartbeat.beat, name="heartbeat", daemon=True)
            thread.start()
            self._beating.append(thread)

    def close(self) -> None:
        """Stops starting beats, and waits for the running ones, for at most 5 s."""
        self._over = True
        until = time.monotonic() + CLOSE_S
        for thread in self._beating:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._beating):
            self._heartbeat.close()


@contextmanager
def beating(heartbeat: Heartbeat, every_s: float) -> Iterator[None]:
    """Beats at once and then every `every_s` seconds, from threads, until the context exits."""
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
