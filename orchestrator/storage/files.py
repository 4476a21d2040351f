"""A run's storage: the few durable file operations that everything else in this package is built from.

It knows paths, bytes and the difference between "surely absent" and "not known"; it knows nothing of
points, claims or journals.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

from blake3 import blake3

from orchestrator.errors import ConfigError, StorageError
from orchestrator.records import FileEntry
from orchestrator.storage.disk import AppendHandle, Disk, OsDisk, storage_error, write_all

Result = TypeVar("Result")

READ_BYTES = 8 << 20
TRIES = 4
FIRST_WAIT_S = 0.2  # before the second try; each later wait is twice as long
TEMPORARY = (
    ".tmp-"  # part of the name of a file that is not there yet; no reader of a folder takes it for anything
)
# Asking again cannot help: the answer is about the name or the rights, not about the moment.
_LASTING = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENOTEMPTY,
    }
)
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def require_local(path: str, called: str = "") -> None:
    """Raises `ConfigError` for a URI. `called`: how the message names it, if not by itself."""
    if "://" in path:
        raise ConfigError(
            f"{called or path} is a URI; this version stores runs in local or shared folders only: mount the "
            "storage, and give a path, e.g. ./runs"
        )


class Storage:
    """The folder of one run. Paths are relative to it, with `/`; nothing outside can be reached. Pickles;
    safe to use from threads.

    An operation that fails for a reason that may pass is tried 4 times within about 2 seconds, then raises
    `StorageError`. A name that holds a file is never written again: there is no call that overwrites or
    renames.
    """

    def __init__(
        self, root: str, disk: Disk | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`root` is a local path (made absolute here, so that a process with another current folder means the
        same); it need not exist.

        Raises `ConfigError` for a URI, and for an empty text.
        """
        require_local(root)
        if not root:
            raise ConfigError("the path of a run's storage is empty; give a folder, e.g. ./runs")
        self.root = os.path.abspath(os.path.expanduser(root))
        self._disk = disk or OsDisk()
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"Storage({self.root!r})"

    # ---------------------------------------------------------------------- writing
    def write(self, path: str, data: bytes | memoryview) -> FileEntry:
        """Write a new file and fsync its content; its name is sure only after `sync` of its folder. Folders
        are made as needed.

        Returns `path` as given, the size and the blake3 digest. Raises `StorageError` if the name is taken or
        the disk fails; then no part of the file is left, unless even taking it away failed.
        """
        full, view = self._full(path), memoryview(data).cast("B")
        self._make_folders(os.path.dirname(full))
        self._try("write", full, lambda: self._write_new(full, view))
        return FileEntry(path=path, bytes=len(view), digest=blake3(view).hexdigest())

    def beside(self, root: str) -> Storage:
        """Another folder of the same disk."""
        return Storage(root, self._disk, self._sleep)

    def take(self, other: Storage, theirs: str, path: str) -> bool:
        """A file of another folder under a new name here: a second name for the same bytes (a hard link; no
        file is ever written again), or a copy where the file system cannot: then False. Sure after `sync`, as
        a `write`.

        Raises `FileNotFoundError` if there is no such file, `StorageError` if the name is taken or the disk
        fails.
        """
        full, source = self._full(path), other._full(theirs)
        self._make_folders(os.path.dirname(full))
        linked = self._find("link", full, lambda: self._second_name(source, full))
        if not linked:
            self._find("copy", full, lambda: self._copy_new(source, full))
        return linked

    def sync(self, folder: str) -> None:
        """The names in `folder`, and those of the folders above it down from the root, are on disk
        afterwards.
        """
        full = self._full(folder) if folder else self.root
        while True:
            self._try("sync folder", full, partial(self._disk.fsync_folder, full))
            if full == self.root:
                return
            full = os.path.dirname(full)

    def create(self, path: str, data: bytes) -> bool:
        """Create a file exclusively, durably and whole: of all who ever try a name, in any process, exactly
        one gets True.

        A reader sees all of it or nothing (it is written under another name and then linked). On a file
        system without hard links the name itself is taken first, and a reader may find it torn: then it
        counts as taken. False: the name is taken. Raises `StorageError`.
        """
        full = self._full(path)
        self._make_folders(os.path.dirname(full))
        temporary = f"{full}{TEMPORARY}{secrets.token_hex(8)}"
        self._try("write", temporary, lambda: self._write_new(temporary, memoryview(data)))
        try:
            created = self._try("create", full, lambda: self._link(temporary, full))
            if created is None:
                created = self._create_in_place(full, memoryview(data))
        finally:
            self._try("remove", temporary, lambda: self._unlink(temporary))
        if created:
            self.sync(path.rpartition("/")[0])
        return created

    def append(self, path: str) -> AppendHandle:
        """A new file that grows. Raises `StorageError` if the name is taken or cannot be created."""
        full = self._full(path)
        self._make_folders(os.path.dirname(full))
        folder = path.rpartition("/")[0]
        return self._try("create", full, lambda: AppendHandle(self._disk, full, lambda: self.sync(folder)))

    # ---------------------------------------------------------------------- reading
    def read(self, path: str, start: int = 0) -> bytes:
        """A file's bytes from `start` on. Raises `FileNotFoundError` if it is surely absent, `StorageError`
        if that cannot be determined.
        """
        pieces: list[bytes] = []
        self._each_piece(path, pieces.append, pieces.clear, start)
        return b"".join(pieces)

    def entry(self, path: str) -> FileEntry:
        """Size and digest of a file, read piece by piece (8 MiB of memory). Raises as `read`."""
        hasher, num_bytes = blake3(), 0

        def take(piece: bytes) -> None:
            nonlocal num_bytes
            hasher.update(piece)
            num_bytes += len(piece)

        def reset() -> None:
            nonlocal num_bytes
            hasher.reset()
            num_bytes = 0

        self._each_piece(path, take, reset)
        return FileEntry(path=path, bytes=num_bytes, digest=hasher.hexdigest())

    def read_part(self, path: str, start: int, num_bytes: int) -> bytearray:
        """`num_bytes` bytes of a file from `start` on; fewer, where it ends before. Raises as `read`."""
        full, part = self._full(path), bytearray()

        def whole() -> None:
            part.clear()
            handle = self._disk.open(full)
            try:
                self._disk.skip(handle, start)
                while piece := self._disk.read(handle, min(READ_BYTES, num_bytes - len(part))):
                    part.extend(piece)
            finally:
                self._disk.close(handle)

        self._find("read", full, whole)
        return part

    def exists(self, path: str) -> bool:
        """Whether there is a file of this name. Raises `StorageError` if that cannot be determined."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: str) -> int:
        """A file's size in bytes. Raises as `read`."""
        full = self._full(path)
        return self._find("look at", full, lambda: self._disk.size(full))

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if there is none. May raise `StorageError`."""
        full = self._full(folder) if folder else self.root
        try:
            return sorted(self._find("list", full, lambda: self._disk.list(full)))
        except FileNotFoundError:
            return []

    def local_path(self, path: str) -> str:
        """The absolute path of a file, for a reader that must map it into memory."""
        return self._full(path)

    # ---------------------------------------------------------------------- deleting
    def delete(self, path: str) -> None:
        """Take a file away; durable after `sync` of its folder. Absent is fine."""
        full = self._full(path)
        self._try("delete", full, lambda: self._unlink(full))

    def delete_folder(self, folder: str) -> None:
        """Take a folder and all below it away; links are removed, not followed. Absent is fine."""
        full = self._full(folder)
        self._try("delete folder", full, lambda: self._delete_tree(full))

    # ---------------------------------------------------------------------- inside
    def _full(self, path: str) -> str:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise StorageError(
                f"{path!r} is no path inside the run's folder {self.root}; use a relative path without '..'"
            )
        return os.path.join(self.root, *parts)

    def _try(self, what: str, full: str, action: Callable[[], Result]) -> Result:
        """Run `action` again while it fails for a passing reason; what is left of its failures is a
        `StorageError`.
        """
        try:
            return self._retry(action)
        except OSError as error:
            raise storage_error(what, full, error) from error

    def _find(self, what: str, full: str, action: Callable[[], Result]) -> Result:
        """As `_try`, but FileNotFoundError where there is surely no such file (a folder is none, and there is
        none below a file).
        """
        try:
            return self._retry(action)
        except _ABSENT as error:
            raise FileNotFoundError(errno.ENOENT, "no such file", full) from error
        except OSError as error:
            raise storage_error(what, full, error) from error

    def _retry(self, action: Callable[[], Result]) -> Result:
        try:
            return action()  # as nearly always; what retries costs more than most calls
        except OSError as error:
            if error.errno in _LASTING:
                raise
        import tenacity

        self._sleep(FIRST_WAIT_S)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, OSError) and e.errno not in _LASTING),
            stop=tenacity.stop_after_attempt(TRIES - 1),
            wait=tenacity.wait_exponential(multiplier=2 * FIRST_WAIT_S, max=2.0),
            sleep=self._sleep,
            reraise=True,
        )
        return retrying(action)

    def _write_new(self, full: str, view: memoryview) -> None:
        handle = self._disk.create(full)
        try:
            try:
                write_all(self._disk, handle, view)
                self._disk.fsync(handle)
            finally:
                self._disk.close(handle)
        except OSError:
            # The name is ours alone; the next try needs a fresh file, for a failed fsync cannot be repeated.
            # If it cannot be taken away either, the next try finds it taken and says so.
            with contextlib.suppress(OSError):
                self._disk.unlink(full)
            raise

    def _second_name(self, source: str, full: str) -> bool:
        try:
            self._disk.link(source, full)
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                return False
            raise
        return True

    def _copy_new(self, source: str, full: str) -> None:
        reading = self._disk.open(source)
        try:
            handle = self._disk.create(full)
            try:
                while piece := self._disk.read(reading, READ_BYTES):
                    write_all(self._disk, handle, memoryview(piece))
                self._disk.fsync(handle)
            except OSError:
                with contextlib.suppress(OSError):  # the name is ours alone
                    self._disk.unlink(full)
                raise
            finally:
                self._disk.close(handle)
        finally:
            self._disk.close(reading)

    def _link(self, temporary: str, full: str) -> bool | None:
        try:
            self._disk.link(temporary, full)
        except FileExistsError:
            # A network file system may report a link that it made itself, in a request it repeated, as taken.
            return self._disk.num_links(temporary) > 1
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                return None
            raise
        return True

    def _create_in_place(self, full: str, view: memoryview) -> bool:
        try:
            handle = self._disk.create(full)
        except FileExistsError:
            return False
        try:
            try:
                write_all(self._disk, handle, view)
                self._disk.fsync(handle)
            finally:
                self._disk.close(handle)
        except OSError as error:
            raise storage_error("write", full, error) from error
        return True

    def _make_folders(self, full: str) -> None:
        """Make `full` and what is missing above it. Folders above the root are made durable here, those below
        it by `sync`.
        """
        missing = []
        while True:
            try:
                self._find("make folder", full, partial(self._make_folder, full))
                break
            except FileNotFoundError:
                missing.append(full)
                full = os.path.dirname(full)
        for folder in reversed(missing):
            self._try("make folder", folder, partial(self._make_folder, folder))

    def _make_folder(self, full: str) -> None:
        try:
            self._disk.make_folder(full)
        except FileExistsError:
            return
        if self.root.startswith(full):
            self._disk.fsync_folder(os.path.dirname(full))

    def _unlink(self, full: str) -> None:
        try:
            self._disk.unlink(full)
        except (FileNotFoundError, NotADirectoryError):
            return

    def _delete_tree(self, full: str) -> None:
        try:
            if not self._disk.is_folder(full):
                self._disk.unlink(full)
                return
            for name in self._disk.list(full):
                self._delete_tree(os.path.join(full, name))
            self._disk.remove_folder(full)
        except FileNotFoundError:
            return

    def _each_piece(
        self, path: str, take: Callable[[bytes], None], reset: Callable[[], None], start: int = 0
    ) -> None:
        full = self._full(path)

        def whole() -> None:
            reset()
            handle = self._disk.open(full)
            try:
                if start:
                    self._disk.skip(handle, start)
                while piece := self._disk.read(handle, READ_BYTES):
                    take(piece)
            finally:
                self._disk.close(handle)

        self._find("read", full, whole)
