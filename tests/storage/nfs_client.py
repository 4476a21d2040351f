"""A model of what an NFS client answers from its cache, before any other disk, for the real stores.

It has the default mount options of Linux (nfs(5): `lookupcache=all`, close-to-open), and is a bit
pessimistic: nothing in the cache expires by time.
- A name that was absent stays absent, with all below it, until this client opens the folder in which it was
  missed, or changes something there.
- What was answered about a file (size, links, kind) stays as it was until this client opens the file, or
  changes it.
- A new file, a new folder and a link are asked of the server.

    server = ModelDisk()
    here, there = NfsClient(server), NfsClient(server)  # two machines
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from orchestrator.storage import local_store
from orchestrator.storage.disk import AppendHandle, Disk, OsDisk
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.store import Listed, ObjectFacts, Pieces, Store

Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class Cache:
    """What a client believes: names that are absent, and answers about paths, by call and path."""

    absent: frozenset[str] = frozenset()
    answers: frozenset[tuple[str, str, Any]] = frozenset()

    def __repr__(self) -> str:
        return (
            f"Cache({sorted(self.absent)}, {sorted(self.answers, key=repr)})"  # equal ones have equal texts
        )

    def without(self, path: str) -> Cache:
        """Nothing is known of this name any more."""
        answers = frozenset(each for each in self.answers if each[1] != path)
        return Cache(self.absent - {path}, answers)

    def anew(self, folder: str) -> Cache:
        """No name in this folder counts as absent any more."""
        return replace(self, absent=frozenset(p for p in self.absent if os.path.dirname(p) != folder))


@dataclass
class NfsClient:
    """`Disk` of one machine; all machines share `server`. A pickled one is another machine's."""

    server: Disk
    cache: Cache = field(default_factory=Cache)
    paths: dict[int, str] = field(default_factory=dict)  # by handle

    # ------------------------------------------------------------ answered from the cache
    def size(self, path: str) -> int:
        return self._answered("size", path)

    def num_links(self, path: str) -> int:
        return self._answered("num_links", path)

    def is_folder(self, path: str) -> bool:
        return self._answered("is_folder", path)

    def is_open_file(self, path: str, handle: int) -> bool:
        return self._answered("is_open_file", path, handle)

    def unlink(self, path: str) -> None:
        self._found(path, self.server.unlink)
        self._changed(path)

    def remove_folder(self, path: str) -> None:
        self._found(path, self.server.remove_folder)
        self._changed(path)

    # ------------------------------------------------------------ asked of the server
    def open(self, path: str) -> int:
        handle = self._found(path, self.server.open)
        self.cache = self.cache.without(path)
        self.paths[handle] = path
        return handle

    def list(self, path: str) -> Iterable[str]:
        names = self._found(path, lambda path: tuple(self.server.list(path)))
        self.cache = self.cache.anew(path)
        return names

    def fsync_folder(self, path: str) -> None:
        self._found(path, self.server.fsync_folder)
        self.cache = self.cache.anew(path)

    def create(self, path: str) -> int:
        handle = self._made(path, self.server.create)
        self.paths[handle] = path
        return handle

    def make_folder(self, path: str) -> None:
        self._made(path, self.server.make_folder)

    def link(self, old: str, new: str) -> None:
        self._found(old, lambda old: self._made(new, lambda new: self.server.link(old, new)))
        self.cache = self.cache.without(old)

    def write(self, handle: int, data: memoryview) -> int:
        self.cache = self.cache.without(self.paths[handle])
        return self.server.write(handle, data)

    def close(self, handle: int) -> None:
        self.paths.pop(handle, None)
        self.server.close(handle)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "server":  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.server, name)

    # ------------------------------------------------------------ inside
    def _answered(self, call: str, path: str, *more: Any) -> Any:
        for known, of, answer in self.cache.answers:
            if (known, of) == (call, path):
                return answer
        answer = self._found(path, lambda path: getattr(self.server, call)(path, *more))
        self.cache = replace(self.cache, answers=self.cache.answers | {(call, path, answer)})
        return answer

    def _found(self, path: str, call: Callable[[str], Result]) -> Result:
        """What the server answers, unless this name, or that of a folder above it, counts as absent."""
        names = [path]
        while (above := os.path.dirname(names[-1])) != names[-1]:
            names.append(above)
        if not self.cache.absent.isdisjoint(names):
            raise FileNotFoundError(2, "absent, says the cache", path)
        try:
            return call(path)
        except FileNotFoundError:
            absent = [name for name in names if not self._is_there(name)]
            self.cache = replace(self.cache, absent=self.cache.absent | set(absent[-1:]))
            raise

    def _is_there(self, path: str) -> bool:
        try:
            self.server.is_folder(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _made(self, path: str, call: Callable[[str], Result]) -> Result:
        """A new name. The server decides whether it is free, the cache whether its folder exists."""

        def make(_: str) -> Result:
            self.cache = self.cache.without(path)
            return call(path)

        made = self._found(os.path.dirname(path), make)
        self._changed(path)
        return made

    def _changed(self, path: str) -> None:
        """The answer to a change tells this client whether others have changed the folder, too."""
        self.cache = self.cache.without(path).anew(os.path.dirname(path))


class FromTwoMachines(LocalStore):
    """A store that is written on one machine, and read and emptied on another. Both ask for a name just
    before it is written, so that their caches have the worst answers about it.
    """

    def __init__(
        self, root: str, disk: Disk | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.server = disk or OsDisk()
        super().__init__(root, NfsClient(self.server), sleep)
        self.other = LocalStore(root, NfsClient(self.server), sleep)

    def beside(self, root: str) -> FromTwoMachines:
        return type(self)(root, self.server)

    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        self._looked_at(path)
        return super().put(path, pieces, size, exclusive=exclusive)

    def append(self, path: str) -> AppendHandle:
        self._looked_at(path)
        return super().append(path)

    def copy(self, source: Store, theirs: str, path: str) -> bool:
        self._looked_at(path)
        return super().copy(source, theirs, path)

    def read(self, path: str, start: int, into: memoryview) -> int:
        return self.other.read(path, start, into)

    def facts(self, path: str) -> ObjectFacts:
        return self.other.facts(path)

    def list(self, folder: str) -> list[Listed]:
        return self.other.list(folder)

    def delete(self, paths: Sequence[str]) -> None:
        self.other.delete(paths)

    def delete_folder(self, folder: str) -> None:
        self.other.delete_folder(folder)

    def _looked_at(self, path: str) -> None:
        for store in (self, self.other):
            for look in (store.disk.size, store.disk.is_folder):
                with suppress(OSError):
                    look(os.path.join(self.root, path))


# ------------------------------------------------------------ planted mistakes
def trusts_the_miss(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: a store takes the first "no such file" for an answer."""
    patch.setattr(local_store, "retry_absent", lambda disk, path, action: action())


def trusts_the_stat(patch: pytest.MonkeyPatch) -> None:
    """Planted mistake: a store asks for a size without opening the file."""
    patch.setattr(LocalStore, "_size", lambda store, full: store.disk.size(full))


@dataclass
class NoctoClient(NfsClient):
    """A client of a mount with `nocto`: an open asks the server for no size."""

    def open(self, path: str) -> int:
        handle = self._found(path, self.server.open)
        self.paths[handle] = path
        return handle
