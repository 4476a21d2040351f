"""The operating system's calls that storage makes, as a protocol that a test replaces by a model disk; how
they are used so that a network file system asks its server; and a file that grows.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

from orchestrator.errors import StorageError

Result = TypeVar("Result")

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # of Linux


class Disk(Protocol):
    """The operating system's calls that storage makes, on absolute paths; each raises `OSError` as the system
    would.

    A test puts a model disk here and so runs the real writers against every power cut.
    """

    def create(self, path: str) -> int:
        """A handle of a new, empty file; FileExistsError if the name is taken."""

    def write(self, handle: int, data: memoryview) -> int:
        """Append `data` or a first part of it; the number of bytes taken."""

    def direct(self, handle: int, on: bool) -> bool:
        """Whether `write` goes past the page cache from here on; then it may refuse (EINVAL) what does not
        begin and end at blocks.
        """

    def fsync(self, handle: int) -> None:
        """The file's content is on disk afterwards (its name need not be)."""

    def close(self, handle: int) -> None:
        """Give the handle back."""

    def open(self, path: str) -> int:
        """A handle for reading from the start."""

    def read(self, handle: int, into: memoryview) -> int:
        """The next bytes, at most as many as `into` holds; how many, 0 at the end."""

    def skip(self, handle: int, num_bytes: int) -> None:
        """The next `read` begins so many bytes after the file's begin."""

    def link(self, old: str, new: str) -> None:
        """A second name for a file; FileExistsError if it is taken."""

    def num_links(self, path: str) -> int:
        """How many names the file has."""

    def unlink(self, path: str) -> None:
        """Take a file's name away."""

    def make_folder(self, path: str) -> None:
        """A new folder; FileExistsError if the name is taken."""

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""

    def fsync_folder(self, path: str) -> None:
        """The folder's names are on disk afterwards."""

    def is_folder(self, path: str) -> bool:
        """Whether the name itself is a folder (a link to one is not)."""

    def is_open_file(self, path: str, handle: int) -> bool:
        """Whether the name leads to the file of this handle; FileNotFoundError if it leads to none."""

    def size(self, path: str) -> int:
        """Bytes of a file; IsADirectoryError for a folder."""

    def list(self, path: str) -> Iterable[str]:
        """The names in a folder, in any order. The real disk reads them in portions, as they are asked
        for.
        """


class OsDisk:
    """`Disk` on the real operating system."""

    def create(self, path: str) -> int:
        """See `Disk`."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, handle: int, data: memoryview) -> int:
        """See `Disk`."""
        return os.write(handle, data)

    def direct(self, handle: int, on: bool) -> bool:
        """See `Disk`."""
        flags = fcntl.fcntl(handle, fcntl.F_GETFL) & ~_O_DIRECT
        if on:
            # Linux refuses O_APPEND together with O_DIRECT on NFS (`nfs_check_flags`). Without O_APPEND a
            # write goes to the handle's own position, which is the end: nobody else writes this file.
            flags = flags & ~os.O_APPEND | _O_DIRECT
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags)
        except OSError:
            return False  # a file system that knows no such writes
        return on and bool(_O_DIRECT)

    def fsync(self, handle: int) -> None:
        """See `Disk`."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """See `Disk`."""
        os.close(handle)

    def open(self, path: str) -> int:
        """See `Disk`."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, handle: int, into: memoryview) -> int:
        """See `Disk`."""
        return os.readv(handle, [into])

    def skip(self, handle: int, num_bytes: int) -> None:
        """See `Disk`."""
        os.lseek(handle, num_bytes, os.SEEK_SET)

    def link(self, old: str, new: str) -> None:
        """See `Disk`."""
        os.link(old, new)

    def num_links(self, path: str) -> int:
        """See `Disk`."""
        return os.stat(path).st_nlink

    def unlink(self, path: str) -> None:
        """See `Disk`."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """See `Disk`."""
        os.mkdir(path)

    def remove_folder(self, path: str) -> None:
        """See `Disk`."""
        os.rmdir(path)

    def fsync_folder(self, path: str) -> None:
        """See `Disk`."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def is_folder(self, path: str) -> bool:
        """See `Disk`."""
        return stat.S_ISDIR(os.lstat(path).st_mode)

    def is_open_file(self, path: str, handle: int) -> bool:
        """See `Disk`."""
        return os.path.samestat(os.stat(path), os.fstat(handle))

    def size(self, path: str) -> int:
        """See `Disk`."""
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return found.st_size

    def list(self, path: str) -> Iterator[str]:
        """See `Disk`."""
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry.name


class AppendHandle:
    """A file that only grows, written by one process. What was written is sure only after `sync`; a power cut
    before may tear it.

    A failed `write`, `sync` or `close` raises `StorageError` and leaves the handle unusable: after a failed
    fsync the system may have forgotten which bytes were not written, so that a second, successful one would
    prove nothing.
    """

    def __init__(self, disk: Disk, path: str, folders: Callable[[], None]) -> None:
        self._disk, self._path, self._sync_folders = disk, path, folders
        self._handle: int | None = disk.create(path)
        self._named = False
        self.num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`."""
        self._guarded("write to", lambda handle: write_all(self._disk, handle, memoryview(data)))
        self.num_bytes += len(data)

    def sync(self) -> None:
        """Everything written so far, and the file's name, is on disk afterwards."""
        self._guarded("sync", self._disk.fsync)
        if not self._named:
            self._sync_folders()
            self._named = True

    def why_lost(self) -> str:
        """How it shows that the path leads to another file, or to none, or that somebody else has written
        into this one; empty if all is as it should be (of a closed one: if it is there). Raises
        `StorageError` if that cannot be determined.
        """
        try:
            found, same = retry_absent(self._disk, self._path, self._look)
        except (FileNotFoundError, NotADirectoryError):
            return f"{self._path} is gone"
        except OSError as error:
            if error.errno == errno.ESTALE:  # what a network file system says of a deleted file
                return f"{self._path} is gone"
            raise storage_error("look at", self._path, error) from error
        if not same:
            return f"{self._path} is another file now"
        if self._handle is not None and found != self.num_bytes:
            return f"{self._path} has {found} bytes, written were {self.num_bytes}"
        return ""

    def _look(self) -> tuple[int, bool]:
        """The size of the file that has the path, and whether it is this one."""
        with opened(self._disk, self._path):
            same = self._handle is None or self._disk.is_open_file(self._path, self._handle)
            return self._disk.size(self._path), same

    def close(self) -> None:
        """Close without syncing; a second call does nothing. Raises `StorageError` where the file system says
        only now that a write failed (NFS, FUSE): what was not synced may be lost.
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
                f"cannot {what} {self._path}: it is closed, or an earlier write failed; open a new file"
            )
        try:
            action(self._handle)
        except OSError as error:
            with suppress(StorageError):  # the first failure is the one to tell
                self.close()
            raise storage_error(what, self._path, error) from error


def retry_absent(disk: Disk, path: str, action: Callable[[], Result]) -> Result:
    """Run `action`. If it finds `path` absent, open and list the folder of `path`, then run `action` again.

    An NFS client answers "no such file" from its cache until the attributes of the folder expire, after up to
    60 s (nfs(5): `lookupcache`, `acdirmax`). Opening the folder makes the client fetch these attributes from
    the server, and a folder that has changed makes it look up every absent name again (close-to-open; in
    Linux `nfs_lookup_verify_inode` and `nfs_neg_need_reval` of fs/nfs/dir.c). Linux does this before it
    checks rights, so a folder that may not be read has been asked about, too. Of a list only the first
    portion is read: it is for clients that refresh names by READDIR, and costs the same in a folder of any
    size. The mount option `nocto` switches this off.

    A folder that is absent is asked about in the same way, in the folder above it. Raises
    `FileNotFoundError` if the name is absent on the server, and what `action` and `disk` raise.
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
    fetches size and links from the server when it opens the file (close-to-open), so ask for them while this
    is open.
    """
    handle = disk.open(path)
    try:
        yield handle
    finally:
        disk.close(handle)


def write_all(disk: Disk, handle: int, view: memoryview) -> None:
    """Append all of `view`, in as many calls as the system takes."""
    while view:
        view = view[disk.write(handle, view) :]


def storage_error(what: str, full: str, error: OSError) -> StorageError:
    """What to report of a system call that failed."""
    reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
    if error.errno == errno.EEXIST:
        return StorageError(
            f"cannot {what} {full}: there is a file of this name ({reason}), and no name is written twice; "
            "another process works in this folder, or it holds what is left of an earlier run: end that "
            "process or move those files away, then run again"
        )
    return StorageError(
        f"cannot {what} {full}: {error.strerror or error} ({reason}); "
        "check that the path is mounted, writable and has room"
    )
