"""The system calls of storage as a protocol, which a test replaces by a model disk.

Also the ways to use them so that a network file system asks its server, and a file that grows.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

from typing_extensions import override

from orchestrator.errors import StorageError
from orchestrator.storage.tries import problem_code

Result = TypeVar("Result")

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux only


class Disk(Protocol):
    """The system calls of storage, on absolute paths. Each raises `OSError` as the system would.

    A test uses a model disk here to run the real writers against every power failure.
    """

    def create(self, path: str) -> int:
        """A handle of a new, empty file. Raises FileExistsError if the name is taken."""

    def write(self, handle: int, data: memoryview) -> int:
        """Appends `data` or a first part of it. Returns the number of bytes written."""

    def direct(self, handle: int, on: bool) -> bool:
        """Switches direct writes on or off. Returns whether `write` bypasses the page cache from here on.

        It may then refuse (EINVAL) data that do not begin and end at blocks.
        """

    def fsync(self, handle: int) -> None:
        """Makes the file's content durable (not necessarily its name)."""

    def close(self, handle: int) -> None:
        """Closes the handle."""

    def open(self, path: str) -> int:
        """A handle for reading from the start."""

    def read(self, handle: int, into: memoryview) -> int:
        """Reads the next bytes, at most as many as `into` holds. Returns their number, 0 at the end."""

    def skip(self, handle: int, num_bytes: int) -> None:
        """Lets the next `read` begin `num_bytes` bytes after the file's beginning."""

    def link(self, old: str, new: str) -> None:
        """Adds a second name for a file. Raises FileExistsError if it is taken."""

    def num_links(self, path: str) -> int:
        """The number of names of the file."""

    def unlink(self, path: str) -> None:
        """Removes a file's name."""

    def make_folder(self, path: str) -> None:
        """Makes a new folder. Raises FileExistsError if the name is taken."""

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder."""

    def fsync_folder(self, path: str) -> None:
        """Makes the folder's names durable."""

    def is_folder(self, path: str) -> bool:
        """Whether the name itself is a folder (a link to one is not)."""

    def is_open_file(self, path: str, handle: int) -> bool:
        """Whether the name leads to the file of this handle. Raises FileNotFoundError if it leads to none."""

    def size(self, path: str) -> int:
        """Bytes of a file. Raises IsADirectoryError for a folder."""

    def list(self, path: str) -> Iterable[str]:
        """The names in a folder, in any order. The real disk reads them in portions, on demand."""


class OsDisk(Disk):
    """`Disk` on the real operating system."""

    @override
    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @override
    def write(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data)

    @override
    def direct(self, handle: int, on: bool) -> bool:
        flags = fcntl.fcntl(handle, fcntl.F_GETFL) & ~_O_DIRECT
        if on:
            # Linux refuses O_APPEND together with O_DIRECT on NFS (`nfs_check_flags`). Without O_APPEND a
            # write goes to the handle's own position, which is the end: no other process writes this file.
            flags = flags & ~os.O_APPEND | _O_DIRECT
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags)
        except OSError:
            return False  # the file system does not support direct writes
        return on and bool(_O_DIRECT)

    @override
    def fsync(self, handle: int) -> None:
        os.fsync(handle)

    @override
    def close(self, handle: int) -> None:
        os.close(handle)

    @override
    def open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @override
    def read(self, handle: int, into: memoryview) -> int:
        return os.readv(handle, [into])

    @override
    def skip(self, handle: int, num_bytes: int) -> None:
        os.lseek(handle, num_bytes, os.SEEK_SET)

    @override
    def link(self, old: str, new: str) -> None:
        os.link(old, new)

    @override
    def num_links(self, path: str) -> int:
        return os.stat(path).st_nlink

    @override
    def unlink(self, path: str) -> None:
        os.unlink(path)

    @override
    def make_folder(self, path: str) -> None:
        os.mkdir(path)

    @override
    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    @override
    def fsync_folder(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    @override
    def is_folder(self, path: str) -> bool:
        return stat.S_ISDIR(os.lstat(path).st_mode)

    @override
    def is_open_file(self, path: str, handle: int) -> bool:
        return os.path.samestat(os.stat(path), os.fstat(handle))

    @override
    def size(self, path: str) -> int:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return found.st_size

    @override
    def list(self, path: str) -> Iterator[str]:
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry.name


class AppendHandle:
    """A file that only grows, written by one process. Data are durable only after `sync`; a power failure
    before that may tear them.

    A failed `write`, `sync` or `close` raises `StorageError` and leaves the handle unusable. After a failed
    fsync the system may have forgotten which bytes were not written, so that a second, successful one would
    prove nothing.
    """

    def __init__(self, disk: Disk, path: str, folders: Callable[[], None]) -> None:
        self._disk, self._path, self._sync_folders = disk, path, folders
        self._handle: int | None = disk.create(path)
        self._named = False
        self.num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends all of `data`."""
        self._guarded("write to", lambda handle: write_all(self._disk, handle, memoryview(data)))
        self.num_bytes += len(data)

    def sync(self) -> None:
        """Makes everything written so far, and the file's name, durable."""
        self._guarded("sync", self._disk.fsync)
        if not self._named:
            self._sync_folders()
            self._named = True

    def why_lost(self) -> str:
        """Why the file is no longer the one at its path, or was written by another process; empty if all is
        well.

        For a closed file, only its existence is checked. Raises `StorageError` if that cannot be determined.
        """
        try:
            found, same = retry_absent(self._disk, self._path, self._look)
        except (FileNotFoundError, NotADirectoryError):
            return f"{self._path} is gone"
        except OSError as error:
            if error.errno == errno.ESTALE:  # the error of a network file system for a deleted file
                return f"{self._path} is gone"
            raise storage_error("look at", self._path, error) from error
        if not same:
            return f"{self._path} is another file now"
        if self._handle is not None and found != self.num_bytes:
            return f"{self._path} has {found} bytes, written were {self.num_bytes}"
        return ""

    def _look(self) -> tuple[int, bool]:
        """The size of the file at the path, and whether it is this one."""
        with opened(self._disk, self._path):
            same = self._handle is None or self._disk.is_open_file(self._path, self._handle)
            return self._disk.size(self._path), same

    def close(self) -> None:
        """Closes without syncing. A second call does nothing.

        Raises `StorageError` if the file system reports a failed write only now (NFS, FUSE): unsynced data
        may be lost.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            self._disk.close(handle)
        except OSError as error:
            raise storage_error("close", self._path, error) from error

    def _guarded(self, what: str, action: Callable[[int], None]) -> None:
        if self._handle is None:
            raise StorageError(
                f"cannot {what} {self._path}: it is closed, or an earlier write failed; open a new file",
                code="storage.closed_file",
            )
        try:
            action(self._handle)
        except OSError as error:
            with suppress(StorageError):  # the first failure is reported
                self.close()
            raise storage_error(what, self._path, error) from error


def retry_absent(disk: Disk, path: str, action: Callable[[], Result]) -> Result:
    """Runs `action`. If it finds `path` absent, opens and lists the folder of `path`, then runs `action`
    again.

    An NFS client answers "no such file" from its cache until the attributes of the folder expire, after up to
    60 s (nfs(5): `lookupcache`, `acdirmax`). Opening the folder makes the client fetch these attributes from
    the server, and a folder that has changed makes it look up every absent name again (close-to-open; in
    Linux `nfs_lookup_verify_inode` and `nfs_neg_need_reval` of fs/nfs/dir.c). Linux does this before it
    checks rights, so this works for a folder that may not be read, too. Only the first portion of the list is
    read: it is for clients that refresh names by READDIR, and costs the same in a folder of any size. The
    mount option `nocto` switches this off.

    A folder that is absent is checked in the same way, in the folder above it. Raises `FileNotFoundError` if
    the name is absent on the server, and what `action` and `disk` raise.
    """
    try:
        return action()
    except FileNotFoundError:
        folder = os.path.dirname(path)
        if folder == path:
            raise
        with suppress(PermissionError):
            retry_absent(disk, folder, lambda: next(iter(disk.list(folder)), None))
    return action()


@contextmanager
def opened(disk: Disk, path: str) -> Iterator[int]:
    """A handle of the file, closed at the end.

    An NFS client answers a bare stat from its cache for 3 to 60 s (nfs(5): `acregmin`, `acregmax`). It
    fetches size and links from the server when it opens the file (close-to-open), so query them while this is
    open.
    """
    handle = disk.open(path)
    try:
        yield handle
    finally:
        disk.close(handle)


def write_all(disk: Disk, handle: int, view: memoryview) -> None:
    """Appends all of `view`, in as many calls as the system needs."""
    while view:
        view = view[disk.write(handle, view) :]


def storage_error(what: str, full: str, error: OSError) -> StorageError:
    """The error for a system call that failed."""
    reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
    if error.errno == errno.EEXIST:
        return StorageError(
            f"cannot {what} {full}: a file of this name exists ({reason}), and files are never overwritten. "
            "Another process writes in this folder, or it has files of an earlier run: end that process or "
            "move those files away, then run again",
            code=problem_code(error),
        )
    return StorageError(
        f"cannot {what} {full}: {error.strerror or error} ({reason}); "
        "check that the path is mounted, writable and has room",
        code=problem_code(error),
    )
