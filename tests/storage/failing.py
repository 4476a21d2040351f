"""A store before another one, of any kind, that fails at its n-th call: it raises, before or after the
effect, breaks off in the middle of the content, is full, is slow, or ends the process.

    store = FailingStore(LocalStore(folder), Failure(nth=7, how=How.TORN))
What the store below does about content that breaks off is its own code. Counted are the calls of all threads,
and of all roots beside.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from blake3 import blake3

from orchestrator.storage.disk import AppendHandle, OsDisk, storage_error
from orchestrator.storage.store import AppendingStore, Listed, ObjectFacts, Pieces, Store, Traits

Result = TypeVar("Result")
LIMIT_S = 60.0


class How(Enum):
    """What a call comes to. Where a call has no content, `TORN` and `FULL` come before its effect."""

    RAISES = "raises, without an effect"
    RAISES_AFTER = "raises, after the effect"
    TORN = "the content breaks off in the middle"
    FULL = "there is no room for the second half of the content"
    SLOW = "waits for `Failure.go`"
    KILLS = "the process ends before the effect"
    KILLS_TORN = "the process ends in the middle of the content"
    KILLS_AFTER = "the process ends after the effect, before the answer"


@dataclass
class Failure:
    """At the `nth` call (from 1; 0: never) it happens, and with `lasting` at all later ones, too.

    `struck`: the first call that it happened to. `calls`: all so far. `stands`: a slow call waits.
    """

    nth: int
    how: How = How.RAISES
    lasting: bool = False
    calls: list[str] = field(default_factory=list)
    struck: str = ""
    stands: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strikes(self, call: str) -> bool:
        """Notes a call; whether it happens to it."""
        with self._lock:
            self.calls.append(call)
            number = len(self.calls)
            hit = self.nth and (number == self.nth or (self.lasting and number > self.nth))
            if hit:
                self.struck = self.struck or call
            return bool(hit)

    def do(
        self, what: str, name: str, effect: Callable[[], Result], torn: Callable[[int], Result] | None = None
    ) -> Result:
        """One call. `torn`: what it is when its content ends early with this error; it may return."""
        if not self.strikes(f"{what} {name}"):
            return effect()
        match self.how:
            case How.SLOW:
                self.stands.set()
                assert self.go.wait(LIMIT_S), "nobody lets the slow call go on"
                return effect()
            case How.KILLS:
                _kill()
            case How.RAISES_AFTER | How.KILLS_AFTER:
                with suppress(FileNotFoundError):  # the answer that nobody hears
                    effect()
                if self.how is How.KILLS_AFTER:
                    _kill()
        number = errno.ENOSPC if self.how is How.FULL else errno.EIO
        if torn is not None and self.how in (How.TORN, How.FULL, How.KILLS_TORN):
            return torn(0 if self.how is How.KILLS_TORN else number)
        if self.how is How.KILLS_TORN:
            _kill()
        raise storage_error(what, name, OSError(number, os.strerror(number)))


Noted = Callable[[str, str], None]


class FailingStore:
    """See `Store`. `noted` hears of every path that is put, before it is, with the digest of its content."""

    def __init__(self, store: Store, failure: Failure, noted: Noted = lambda path, digest: None) -> None:
        self.store, self.failure, self.noted = store, failure, noted

    @property
    def root(self) -> str:
        return self.store.root

    @property
    def traits(self) -> Traits:
        return self.store.traits

    def beside(self, root: str) -> FailingStore:
        return type(self)(self.store.beside(root), self.failure, self.noted)

    def within(self, limit_s: float) -> FailingStore:
        return type(self)(self.store.within(limit_s), self.failure, self.noted)

    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        hasher = blake3()
        for piece in pieces():
            hasher.update(memoryview(piece).cast("B"))
        self.noted(path, hasher.hexdigest())

        def effect(content: Pieces) -> bool:
            return self.store.put(path, content, size, exclusive=exclusive)

        return self._do(
            "create" if exclusive else "write",
            path,
            lambda: effect(pieces),
            lambda number: effect(lambda: _half(pieces, size, number)),
        )

    def sync(self, folder: str) -> None:
        self._do("sync folder", folder, lambda: self.store.sync(folder))

    def read(self, path: str, start: int, into: memoryview) -> int:
        return self._do("read", path, lambda: self.store.read(path, start, into))

    def facts(self, path: str) -> ObjectFacts:
        return self._do("look at", path, lambda: self.store.facts(path))

    def list(self, folder: str) -> list[Listed]:
        return self._do("list", folder, lambda: self.store.list(folder))

    def delete(self, paths: Sequence[str]) -> None:
        self._do("delete", " ".join(paths), lambda: self.store.delete(paths))

    def delete_folder(self, folder: str) -> None:
        self._do("delete folder", folder, lambda: self.store.delete_folder(folder))

    def copy(self, source: Store, theirs: str, path: str) -> bool:
        other = source.store if isinstance(source, FailingStore) else source
        return self._do("copy", path, lambda: self.store.copy(other, theirs, path))

    def _do(
        self, what: str, path: str, effect: Callable[[], Result], torn: Callable[[int], Result] | None = None
    ) -> Result:
        return self.failure.do(what, f"{self.root}/{path}", effect, torn)


class FailingAppendingStore(FailingStore):
    """One whose files grow."""

    store: AppendingStore

    def append(self, path: str) -> AppendHandle:
        handle = self._do("create", path, lambda: self.store.append(path))
        return _FailingHandle(handle, partial(self._do, path=path))  # type: ignore[return-value]


class _FailingHandle:
    """An `AppendHandle` whose writes and syncs are calls, too; after one that failed it is unusable."""

    def __init__(self, handle: AppendHandle, do: Callable[..., None]) -> None:
        self._handle, self._do = handle, do

    @property
    def num_bytes(self) -> int:
        return self._handle.num_bytes

    def write(self, data: bytes) -> None:
        def torn(number: int) -> None:
            self._handle.write(data[: len(data) // 2])
            if not number:
                _kill()
            raise storage_error("write to", "the file", OSError(number, os.strerror(number)))

        self._ended_by(lambda: self._do("write to", effect=lambda: self._handle.write(data), torn=torn))

    def sync(self) -> None:
        self._ended_by(lambda: self._do("sync", effect=self._handle.sync))

    def why_lost(self) -> str:
        return self._handle.why_lost()

    def close(self) -> None:
        self._handle.close()

    def _ended_by(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException:
            self._handle.close()
            raise


def _half(pieces: Pieces, size: int, number: int) -> Iterator[memoryview]:
    """The first half of the content, and then this error; 0: then the process ends."""
    left = size // 2
    for piece in pieces():
        view = memoryview(piece).cast("B")[:left]
        left -= len(view)
        yield view
        if not left:
            break
    if not number:
        _kill()
    raise OSError(number, os.strerror(number))


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class FailingDisk(OsDisk):
    """The real disk, but a call named `call` fails `times` times with `number`."""

    def __init__(self, call: str, number: int, times: int = 10**9) -> None:
        self.call, self.number, self.times = call, number, times
        self.seen = 0

    def __getattribute__(self, name: str) -> Any:
        if name != object.__getattribute__(self, "call"):
            return object.__getattribute__(self, name)

        def fail(*arguments: Any) -> Any:
            self.seen += 1
            if self.seen <= self.times:
                raise OSError(self.number, os.strerror(self.number))
            return object.__getattribute__(self, name)(*arguments)

        return fail
