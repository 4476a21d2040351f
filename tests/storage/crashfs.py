"""A model disk for the real writers: runs their calls, then yields every disk a power cut could leave.

The model is what POSIX allows, a bit pessimistic (as in ALICE and CrashMonkey). Until a file is synced, any
prefix of its unsynced blocks may be there, or zeros. Until a folder is synced, any subset of its changes
may be there (any prefix, where there are many). What was synced is sure.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

Call = TypeVar("Call", bound=Callable[..., Any])

MANY = 6  # more unsynced names than this: prefixes of the changes instead of all subsets
FEW = 3  # blocks of which every subset is lost; of more each one, and all
FOLDER = None


@dataclass
class Inode:
    data: bytes = b""
    safe: bytes = b""  # what is sure to be on disk
    number: int = field(default_factory=itertools.count().__next__)  # Python reuses an `id`


def atomic(call: Call) -> Call:
    """Runs a call of the disk alone: a journal and a heartbeat write from threads of their own."""

    @functools.wraps(call)
    def alone(self: ModelDisk, *args: Any) -> Any:
        with self.lock:
            return call(self, *args)

    return alone  # type: ignore[return-value]


Names = dict[str, Inode | None]  # path: a file, or FOLDER
Files = dict[str, bytes | None]
Contents = list[bytes]


@dataclass
class Moment:
    """All that decides what a power cut right here could leave."""

    what: str
    durable: Names
    pending: list[tuple[str, str, Inode | None]]
    content: dict[int, tuple[bytes, bytes]]  # (data, safe) by `Inode.number`


@dataclass
class ModelDisk:
    """`orchestrator.storage.disk.Disk` in memory. With `block` > 0 every call is remembered for `crashes`."""

    block: int = 0
    live: Names = field(default_factory=lambda: {"/": FOLDER})
    durable: Names = field(default_factory=lambda: {"/": FOLDER})
    pending: list[tuple[str, str, Inode | None]] = field(default_factory=list)
    history: list[Moment] = field(default_factory=list)
    handles: dict[int, tuple[Inode, int]] = field(default_factory=dict)
    next_handle: int = 3
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @classmethod
    def of(cls, files: Files) -> ModelDisk:
        """A quiet disk with these files (None: a folder); what lies in no folder is left out."""
        disk = cls()
        for path, data in sorted(files.items()):
            if os.path.dirname(path) in disk.live:
                disk.live[path] = FOLDER if data is None else Inode(data, data)
        return disk

    @atomic
    def files(self) -> Files:
        """What a running process sees."""
        return {path: None if node is FOLDER else node.data for path, node in self.live.items()}

    # ------------------------------------------------------------ the calls
    @atomic
    def create(self, path: str) -> int:
        self._need_folder(path)
        if path in self.live:
            raise _error(FileExistsError, errno.EEXIST, path)
        self.live[path] = node = Inode()
        self._change("link", path, node)
        return self._open(node)

    @atomic
    def write(self, handle: int, data: memoryview) -> int:
        node, _ = self.handles[handle]
        piece = bytes(data[: self.block or len(data)])
        node.data += piece
        self._mark("write")
        return len(piece)

    def direct(self, handle: int, on: bool) -> bool:
        return on

    @atomic
    def fsync(self, handle: int) -> None:
        node, _ = self.handles[handle]
        node.safe = node.data
        self._mark("fsync")

    @atomic
    def close(self, handle: int) -> None:
        del self.handles[handle]

    @atomic
    def open(self, path: str) -> int:
        return self._open(self._file(path))

    @atomic
    def read(self, handle: int, into: memoryview) -> int:
        node, offset = self.handles[handle]
        piece = node.data[offset : offset + len(into)]
        into[: len(piece)] = piece
        self.handles[handle] = (node, offset + len(piece))
        return len(piece)

    @atomic
    def skip(self, handle: int, num_bytes: int) -> None:
        self.handles[handle] = (self.handles[handle][0], num_bytes)

    @atomic
    def link(self, old: str, new: str) -> None:
        node = self._file(old)
        self._need_folder(new)
        if new in self.live:
            raise _error(FileExistsError, errno.EEXIST, new)
        self.live[new] = node
        self._change("link", new, node)

    @atomic
    def num_links(self, path: str) -> int:
        return sum(node is self._file(path) for node in self.live.values())

    @atomic
    def unlink(self, path: str) -> None:
        self._file(path)
        del self.live[path]
        self._change("unlink", path, None)

    @atomic
    def make_folder(self, path: str) -> None:
        self._need_folder(path)
        if path in self.live:
            raise _error(FileExistsError, errno.EEXIST, path)
        self.live[path] = FOLDER
        self._change("link", path, FOLDER)

    @atomic
    def remove_folder(self, path: str) -> None:
        if self.list(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        del self.live[path]
        self._change("unlink", path, None)

    @atomic
    def fsync_folder(self, path: str) -> None:
        self.list(path)
        others = []
        for change in self.pending:
            if os.path.dirname(change[1]) == path:
                _apply(self.durable, change)
            else:
                others.append(change)
        self.pending = others
        self._mark(f"fsync {path}")

    @atomic
    def is_folder(self, path: str) -> bool:
        if path not in self.live:
            raise _error(FileNotFoundError, errno.ENOENT, path)
        return self.live[path] is FOLDER

    @atomic
    def is_open_file(self, path: str, handle: int) -> bool:
        return self._file(path) is self.handles[handle][0]

    @atomic
    def size(self, path: str) -> int:
        return len(self._file(path).data)

    @atomic
    def list(self, path: str) -> list[str]:
        if not self.is_folder(path):
            raise _error(NotADirectoryError, errno.ENOTDIR, path)
        start = path.rstrip("/") + "/"
        inside = [p[len(start) :] for p in list(self.live) if p.startswith(start)]
        return [name for name in inside if name and "/" not in name]

    # ------------------------------------------------------------ power cuts
    def crashes(self) -> Iterator[tuple[int, str, Files]]:
        """(number of calls before it, the last of them, the files left), for each different disk."""
        for number, moment in enumerate(list(self.history), start=1):
            seen = set()
            for names in self._surviving_names(moment):
                files = {path: node for path, node in names.items() if node is not FOLDER}
                options = [self._surviving_contents(*moment.content[node.number]) for node in files.values()]
                for contents in itertools.product(*options):
                    left: Files = {path: None for path, node in names.items() if node is FOLDER}
                    left.update(zip(files, contents, strict=True))
                    key = frozenset(left.items())
                    if key not in seen:
                        seen.add(key)
                        yield number, moment.what, left

    def _surviving_names(self, moment: Moment) -> Iterator[Names]:
        changes = moment.pending
        subsets = (
            itertools.chain.from_iterable(itertools.combinations(changes, n) for n in range(len(changes) + 1))
            if len(changes) <= MANY
            else (tuple(changes[:n]) for n in range(len(changes) + 1))
        )
        for subset in subsets:
            names = dict(moment.durable)
            for change in subset:
                _apply(names, change)
            yield names

    def _surviving_contents(self, data: bytes, safe: bytes) -> Contents:
        if data == safe:
            return [data]
        prefixes = [data[:n] for n in range(len(safe), len(data), self.block)]
        return [*prefixes, data, *self._with_holes(data, len(safe))]

    def _with_holes(self, data: bytes, safe: int) -> Iterator[bytes]:
        """The size is on the disk, and of the blocks that were not synced some are not: any, of a few."""
        first = safe // self.block * self.block
        blocks = [
            (max(safe, at), min(at + self.block, len(data))) for at in range(first, len(data), self.block)
        ]
        sizes = range(1, len(blocks) + 1) if len(blocks) <= FEW else (1, len(blocks))
        for size in sizes:
            for lost in itertools.combinations(blocks, size):
                left = bytearray(data)
                for begin, end in lost:
                    left[begin:end] = bytes(end - begin)
                yield bytes(left)

    # ------------------------------------------------------------ inside
    def _open(self, node: Inode) -> int:
        self.next_handle += 1
        self.handles[self.next_handle] = (node, 0)
        return self.next_handle

    def _file(self, path: str) -> Inode:
        if path not in self.live:
            raise _error(FileNotFoundError, errno.ENOENT, path)
        node = self.live[path]
        if node is FOLDER:
            raise _error(IsADirectoryError, errno.EISDIR, path)
        return node

    def _need_folder(self, path: str) -> None:
        if self.live.get(os.path.dirname(path), Inode()) is not FOLDER:
            raise _error(FileNotFoundError, errno.ENOENT, path)

    def _change(self, kind: str, path: str, node: Inode | None) -> None:
        self.pending.append((kind, path, node))
        self._mark(f"{kind} {path}")

    def _mark(self, what: str) -> None:
        if not self.block:
            return
        nodes = [*self.live.values(), *self.durable.values(), *(node for _, _, node in self.pending)]
        content = {node.number: (node.data, node.safe) for node in nodes if node is not FOLDER}
        self.history.append(Moment(what, dict(self.durable), list(self.pending), content))


def _apply(names: Names, change: tuple[str, str, Inode | None]) -> None:
    kind, path, node = change
    if kind == "link":
        names[path] = node
    else:
        names.pop(path, None)


def _error(kind: type[OSError], number: int, path: str) -> OSError:
    return kind(number, os.strerror(number), path)
