"""A local or shared folder as a `Store`.

It implements the steps that make a file durable, and the retries of those that can be repeated. Single system
calls go through `Disk`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from typing_extensions import override

from orchestrator.errors import ConfigError
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.disk import (
    AppendHandle,
    Disk,
    OsDisk,
    opened,
    retry_absent,
    storage_error,
    write_all,
)
from orchestrator.storage.home import expanded
from orchestrator.storage.store import AppendingStore, Listed, ObjectFacts, Pieces, Store, Traits, exact
from orchestrator.storage.tries import tried

# ---------------------------------------------------------------------------------------------- direct writes
# Large files are written past the page cache (O_DIRECT). A saved file is not read again soon. A copy of it in
# the cache would cost more CPU time than all other work of a save, and would evict the training data.
# FastPersist (arXiv 2406.13768) writes checkpoints in the same way. `LocalStore` decides which files are
# written this way.
_BLOCK_BYTES = 4096  # memory, position and length must be multiples of this; of less on some systems
_BUFFER_BYTES = 8 << 20  # stays in the CPU's cache between filling and writing


def write_direct(disk: Disk, handle: int, views: Iterable[memoryview]) -> None:
    """Appends all of `views` to a new file, whole blocks of it past the cache.

    The rest after the last block is written normally, and so is everything if the file system does not
    support direct writes. Nothing is durable before `Disk.fsync`.
    """
    direct = disk.direct(handle, on=True)
    for chunk in _regrouped(views, memoryview(mmap.mmap(-1, _BUFFER_BYTES))):
        at = 0
        while at < len(chunk):
            blocks = (len(chunk) - at) // _BLOCK_BYTES
            if direct and not blocks:  # the end
                direct = disk.direct(handle, on=False)
            stop = at + blocks * _BLOCK_BYTES if direct else len(chunk)
            try:
                at += disk.write(handle, chunk[at:stop])
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = disk.direct(handle, on=False)  # its blocks are larger, or it took half a block


def _regrouped(views: Iterable[memoryview], buffer: memoryview) -> Iterator[memoryview]:
    """The same bytes in `buffer`, which is full each time except the last."""
    filled = 0
    for view in views:
        at = 0
        while at < len(view):
            size = min(len(view) - at, len(buffer) - filled)
            buffer[filled : filled + size] = view[at : at + size]
            at += size
            filled += size
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


Result = TypeVar("Result")

TEMPORARY = (
    ".tmp-"  # part of the name of a file that is not there yet; no reader of a folder takes it for anything
)
_DIRECT_FROM_BYTES = 8 << 20  # smaller files are often read again soon
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def require_local(path: str, called: str = "") -> None:
    """Raises `ConfigError` for a URI. `called`: its name in the message, if not the URI itself."""
    if is_uri(path):
        raise ConfigError(
            f"{called or path} is a URI; this version stores runs in local or shared folders only: mount the "
            "storage, and give a path, e.g. ./runs",
            code="config.storage_uri",
        )


class LocalStore(AppendingStore):
    """A folder of a file system.

    A system call that fails for a temporary reason is tried 4 times within about 2 seconds.

    An existing file is never written again. Folders are made as needed. On a network file system, "no such
    file" and a file's size come from the server, not from this machine's cache: see `retry_absent` and
    `opened`.
    """

    traits = Traits(
        refuses_taken=True,
        lists_facts=False,
        appends=True,
        frees_names=True,
        reads_at_a_time=1,
        cached_by_machine=True,
    )

    def __init__(
        self, root: str, disk: Disk | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`root` is a local path, which need not exist.

        It is made absolute here, so that it means the same in a process with another current folder. Raises
        `ConfigError` for a URI, and for an empty text.
        """
        require_local(root)
        if not root:
            raise ConfigError(
                "the path of a run's storage is empty; give a folder, e.g. ./runs", code="config.empty_path"
            )
        self.root = os.path.abspath(expanded(root))
        self.disk = disk or OsDisk()
        self._sleep = sleep

    @override
    def beside(self, root: str) -> LocalStore:
        """Another folder of the same disk."""
        return LocalStore(root, self.disk, self._sleep)

    @override
    def within(self, limit_s: float) -> LocalStore:
        """A system call cannot be aborted."""
        return self

    # ---------------------------------------------------------------------- writing
    @override
    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        """A failure leaves no part of a file, unless even removing it failed.

        Exclusive: the file is written under another name, and then linked. On a file system without hard
        links the name itself is taken first, and a reader may find it torn: then it counts as taken.
        """
        full = self._full(path)
        self._make_folders(os.path.dirname(full))
        if exclusive:
            return self._create(path, full, pieces, size)
        self._try("write", full, lambda: self._write_new(full, pieces, size))
        return True

    @override
    def sync(self, folder: str) -> None:
        full = self._full(folder)
        while True:
            fsync = partial(self.disk.fsync_folder, full)
            self._try("sync folder", full, partial(retry_absent, self.disk, full, fsync))
            if full == self.root:
                return
            full = os.path.dirname(full)

    @override
    def append(self, path: str) -> AppendHandle:
        full = self._full(path)
        self._make_folders(os.path.dirname(full))
        folder = path.rpartition("/")[0]
        return self._try("create", full, lambda: AppendHandle(self.disk, full, lambda: self.sync(folder)))

    @override
    def copy(self, source: Store, theirs: str, path: str) -> bool:
        """A second name for the same bytes (a hard link): no file is ever written again."""
        if not isinstance(source, LocalStore):
            return False
        full, other = self._full(path), source._full(theirs)
        self._make_folders(os.path.dirname(full))
        link = partial(self._second_name, other, full)
        return self._or_absent("link", full, lambda: retry_absent(self.disk, other, link))

    # ---------------------------------------------------------------------- reading
    @override
    def read(self, path: str, start: int, into: memoryview) -> int:
        if not into:  # opening would succeed for a folder, too
            self.facts(path)
            return 0
        full = self._full(path)
        return self._find("read", full, lambda: self._read(full, start, into))

    @override
    def facts(self, path: str) -> ObjectFacts:
        full = self._full(path)
        return ObjectFacts(size=self._find("look at", full, lambda: self._size(full)), tag="")

    @override
    def list(self, folder: str) -> list[Listed]:
        full = self._full(folder)
        try:
            names = self._find("list", full, lambda: sorted(self.disk.list(full)))
        except FileNotFoundError:
            return []
        return [Listed(name=name, facts=None) for name in names]

    # ---------------------------------------------------------------------- deleting
    @override
    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            full = self._full(path)
            self._try("delete", full, partial(self._unlink, full))

    @override
    def delete_folder(self, folder: str) -> None:
        full = self._full(folder)
        self._try("delete folder", full, lambda: self._delete_tree(full))

    # ---------------------------------------------------------------------- tries
    def _full(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def _try(self, what: str, full: str, action: Callable[[], Result]) -> Result:
        """Runs `action` again while it fails for a temporary reason. Remaining failures become
        `StorageError`.
        """
        try:
            return tried(action, self._sleep)
        except OSError as error:
            raise storage_error(what, full, error) from error

    def _find(self, what: str, full: str, action: Callable[[], Result]) -> Result:
        """Like `_try`, but raises FileNotFoundError if there is certainly no such file.

        A folder is no file, and there is none below a file.
        """
        return self._or_absent(what, full, lambda: retry_absent(self.disk, full, action))

    def _or_absent(self, what: str, full: str, action: Callable[[], Result]) -> Result:
        """Like `_find`, but accepts the first answer of `action`."""
        try:
            return tried(action, self._sleep)
        except _ABSENT as error:
            raise FileNotFoundError(errno.ENOENT, "no such file", full) from error
        except OSError as error:
            raise storage_error(what, full, error) from error

    # ---------------------------------------------------------------------- steps
    def _create(self, path: str, full: str, pieces: Pieces, size: int) -> bool:
        temporary = f"{full}{TEMPORARY}{secrets.token_hex(8)}"
        self._try("write", temporary, lambda: self._write_new(temporary, pieces, size))
        try:
            created = self._try("create", full, lambda: self._link(temporary, full))
            if created is None:
                created = self._create_in_place(full, pieces, size)
        finally:
            self._try("remove", temporary, lambda: self._unlink(temporary))
        if created:
            self.sync(path.rpartition("/")[0])
        return created

    def _write_new(self, full: str, pieces: Pieces, size: int) -> None:
        handle = self.disk.create(full)
        try:
            self._fill(handle, full, pieces, size)
        except Exception:
            # No other process uses the name. The next try needs a fresh file, because a failed fsync cannot
            # be repeated. If the file cannot be removed either, the next try finds the name taken and reports
            # that.
            with contextlib.suppress(OSError):
                self.disk.unlink(full)
            raise

    def _fill(self, handle: int, full: str, pieces: Pieces, size: int) -> None:
        try:
            views = exact(pieces, size, full)
            if size >= _DIRECT_FROM_BYTES:
                write_direct(self.disk, handle, views)
            else:
                for view in views:
                    write_all(self.disk, handle, view)
            self.disk.fsync(handle)
        finally:
            self.disk.close(handle)

    def _second_name(self, source: str, full: str) -> bool:
        try:
            self.disk.link(source, full)
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                return False
            raise
        return True

    def _link(self, temporary: str, full: str) -> bool | None:
        try:
            self.disk.link(temporary, full)
        except FileExistsError:
            # A network file system that repeats a request may report its own link as taken.
            with opened(self.disk, temporary):
                return self.disk.num_links(temporary) > 1
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                return None
            raise
        return True

    def _create_in_place(self, full: str, pieces: Pieces, size: int) -> bool:
        try:
            handle = self.disk.create(full)
        except FileExistsError:
            return False
        try:
            self._fill(handle, full, pieces, size)
        except OSError as error:
            raise storage_error("write", full, error) from error
        return True

    def _make_folders(self, full: str) -> None:
        """Makes `full` and missing folders above it.

        Folders above the root are made durable here, those below it by `sync`.
        """
        missing = []
        while True:
            try:
                # a request to make a folder is answered by the server
                self._or_absent("make folder", full, partial(self._make_folder, full))
                break
            except FileNotFoundError:
                missing.append(full)
                full = os.path.dirname(full)
        for folder in reversed(missing):
            self._try("make folder", folder, partial(self._make_folder, folder))

    def _make_folder(self, full: str) -> None:
        try:
            self.disk.make_folder(full)
        except FileExistsError:
            return
        if self.root.startswith(full):
            self.disk.fsync_folder(os.path.dirname(full))

    def _read(self, full: str, start: int, into: memoryview) -> int:
        found = 0
        with opened(self.disk, full) as handle:
            if start:
                self.disk.skip(handle, start)
            while found < len(into) and (num_bytes := self.disk.read(handle, into[found:])):
                found += num_bytes
        return found

    def _size(self, full: str) -> int:
        with opened(self.disk, full):
            return self.disk.size(full)

    def _unlink(self, full: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            retry_absent(self.disk, full, partial(self.disk.unlink, full))

    def _delete_tree(self, full: str) -> None:
        try:
            if not retry_absent(self.disk, full, partial(self.disk.is_folder, full)):
                self.disk.unlink(full)
                return
            for name in tuple(self.disk.list(full)):
                self._delete_tree(os.path.join(full, name))
            self.disk.remove_folder(full)
        except FileNotFoundError:
            return
