"""A run's storage: the few durable file operations that everything else in this package is built from.

It knows paths, bytes and digests; it knows nothing of points, claims or journals, and what a kind of storage
needs to keep its word is its store's (`orchestrator.storage.store`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from blake3 import blake3

from orchestrator.errors import StorageError
from orchestrator.records.points import FileEntry
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.disk import AppendHandle, Disk
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.store import AppendingStore, Listed, Pieces, Readable, Store, Traits
from orchestrator.storage.store_kinds import store_at

READ_BYTES = 8 << 20
_FIRST_BYTES = 64 << 10  # most files are documents that fit, and memory for 8 MiB takes longer than they do


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
        self._store: Store = LocalStore(root, disk, sleep)

    @classmethod
    def on(cls, store: Store) -> Storage:
        """The storage that a store keeps."""
        storage = cls.__new__(cls)
        storage._store = store
        return storage

    @property
    def root(self) -> str:
        """The folder's absolute path, or the URI, without a slash at its end."""
        return self._store.root

    @property
    def folder(self) -> Path | None:
        """The folder, where this is one; None in a bucket, of which this machine has no files."""
        return Path(self.root) if isinstance(self._store, LocalStore) else None

    @property
    def traits(self) -> Traits:
        """What this kind of storage can do."""
        return self._store.traits

    def __repr__(self) -> str:
        return f"Storage({self.root!r})"

    # ---------------------------------------------------------------------- writing
    def write(self, path: str, data: bytes | memoryview) -> FileEntry:
        """Write a new file and fsync its content; its name is sure only after `sync` of its folder. Folders
        are made as needed.

        Returns `path` as given, the size and the blake3 digest. Raises `StorageError` if the name is taken or
        the disk fails; then no part of the file is left, unless even taking it away failed.
        """
        view = memoryview(data).cast("B")
        self._store.put(self._inside(path), lambda: (view,), len(view))
        return FileEntry(path=path, bytes=len(view), digest=blake3(view).hexdigest())

    def replace(self, path: str, data: bytes) -> None:
        """A file in the place of one on which nobody relies any more, if there is one; durable and whole, as
        by `create`. On a disk whoever else creates the name meanwhile keeps it. Raises `StorageError`.
        """
        if self._store.traits.refuses_taken:
            self.delete(path)
            self.create(path, data)
        else:  # taken away first, a delayed repeat of that might take the new one away
            self.write(path, data)

    def put(self, path: str, pieces: Pieces, size: int) -> None:
        """Write a new file of `size` bytes from pieces of any length in bounded memory, fsync its content;
        its name is sure only after `sync` of its folder.

        `pieces` is called anew for every try; what it gave stays as it is until this returns. Raises as
        `write`, and whatever `pieces` raises: then no part of the file is left, unless even taking it away
        failed.
        """
        self._store.put(self._inside(path), pieces, size)

    def beside(self, root: str) -> Storage:
        """Another folder of the same disk, or prefix of a bucket: reached in the same way, or, where the one
        is a folder and the other lies in a bucket, as `open_storage` does. Raises as that.
        """
        if is_uri(root) == is_uri(self.root):
            return Storage.on(self._store.beside(root))
        return Storage.on(store_at(root, time.sleep))

    def within(self, limit_s: float) -> Storage:
        """The same storage, of which a call gives up after `limit_s` seconds where it would ask longer (in a
        bucket; half a minute for a document, minutes for content): a sign of life that comes late is none.
        """
        return Storage.on(self._store.within(limit_s))

    def take(self, other: Storage, theirs: str, path: str) -> bool:
        """A file of another folder under a new name here: a second name for the same bytes (a hard link; no
        file is ever written again), or a copy where the file system cannot: then False. Sure after `sync`, as
        a `write`.

        Raises `FileNotFoundError` if there is no such file, `StorageError` if the name is taken or the disk
        fails.
        """
        theirs, path = other._inside(theirs), self._inside(path)
        source = other._holding(theirs)
        if source is other._store and self._store.copy(other._store, theirs, path):
            return True
        size = source.facts(theirs).size
        # a copy of each, for the pieces that are read share their memory
        self._store.put(path, lambda: map(bytes, other._pieces(theirs)), size)
        return False

    def sync(self, folder: str) -> None:
        """The names in `folder`, and those of the folders above it down from the root, are on disk
        afterwards.
        """
        self._store.sync(self._folder(folder))

    def create(self, path: str, data: bytes) -> bool:
        """Create a file exclusively, durably and whole: of all who ever try a name, in any process, exactly
        one gets True.

        A reader sees all of it or nothing (it is written under another name and then linked). On a file
        system without hard links the name itself is taken first, and a reader may find it torn: then it
        counts as taken. False: the name is taken. Raises `StorageError`.
        """
        return self._store.put(self._inside(path), lambda: (data,), len(data), exclusive=True)

    def append(self, path: str) -> AppendHandle:
        """A new file that grows. Raises `StorageError` if the name is taken or cannot be created, and where
        files do not grow (in a bucket).
        """
        if not isinstance(self._store, AppendingStore):
            raise StorageError(f"cannot create {self.root}/{path} as a file that grows: a bucket has none")
        return self._store.append(self._inside(path))

    # ---------------------------------------------------------------------- reading
    def read(self, path: str, start: int = 0) -> bytes:
        """A file's bytes from `start` on. Raises `FileNotFoundError` if it is surely absent, `StorageError`
        if that cannot be determined.
        """
        pieces = [bytes(piece) for piece in self._pieces(self._inside(path), start)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def entry(self, path: str) -> FileEntry:
        """Size and digest of a file, read piece by piece (8 MiB of memory). Raises as `read`."""
        hasher, num_bytes = blake3(), 0
        for piece in self._pieces(self._inside(path)):
            hasher.update(piece)
            num_bytes += len(piece)
        return FileEntry(path=path, bytes=num_bytes, digest=hasher.hexdigest())

    def read_part(self, path: str, start: int, num_bytes: int) -> bytearray:
        """`num_bytes` bytes of a file from `start` on; fewer, where it ends before. Raises as `read`."""
        path = self._inside(path)
        if num_bytes > READ_BYTES:  # a length that a damaged file names must not take the memory
            num_bytes = min(num_bytes, max(0, self._holding(path).facts(path).size - start))
        part = bytearray(num_bytes)
        with memoryview(part) as view:
            found = self._holding(path).read(path, start, view)
        del part[found:]
        return part

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        """Fill `into` (any item format, C-contiguous, writable) with a file's bytes from `start` on, without
        another copy of them in memory. Returns how many bytes: fewer than it holds only where the file ends
        before. Raises as `read`; then `into` may hold anything.
        """
        path = self._inside(path)
        return self._holding(path).read(path, start, into.cast("B"))

    def exists(self, path: str) -> bool:
        """Whether there is a file of this name. Raises `StorageError` if that cannot be determined."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: str) -> int:
        """A file's size in bytes. Raises as `read`."""
        path = self._inside(path)
        return self._holding(path).facts(path).size

    def tag(self, path: str) -> str | None:
        """What tells this content of a file from any other that it ever has; "" in a folder, where nothing
        does, None if there is no such file. Raises `StorageError` if that cannot be determined.
        """
        try:
            return self._store.facts(self._inside(path)).tag
        except FileNotFoundError:
            return None

    def away(self, path: str) -> str:
        """Why a file cannot be read from here although nothing says that it is gone; empty if it can, and
        where all files lie in one place. Raises `StorageError`.
        """
        return ""

    def on_nodes(self, path: str) -> bool:
        """Whether a file lies on disks of nodes, maybe on several. Raises `StorageError`."""
        return False

    def elsewhere(self, path: str) -> bool:
        """A reader found wrong bytes in a file: whether there is another copy of it, from which it is read
        from now on. None where all files lie in one place.
        """
        return False

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if there is none. May raise `StorageError`."""
        return [found.name for found in self.listed(folder)]

    def listed(self, folder: str) -> Sequence[Listed]:
        """What lies in a folder, sorted by name, with sizes and tags where lists say them (see `Traits`)."""
        return self._store.list(self._folder(folder))

    # ---------------------------------------------------------------------- deleting
    def delete(self, path: str) -> None:
        """Take a file away; durable after `sync` of its folder. Absent is fine."""
        self._store.delete((self._inside(path),))

    def delete_all(self, paths: Sequence[str]) -> None:
        """As `delete`, in few requests where a store has such."""
        self._store.delete([self._inside(path) for path in paths])

    def delete_folder(self, folder: str) -> None:
        """Take a folder and all below it away; links are removed, not followed. Absent is fine."""
        self._store.delete_folder(self._inside(folder))

    # ---------------------------------------------------------------------- inside
    def _holding(self, path: str) -> Readable:
        """Where the content of a file is read."""
        return self._store

    def _inside(self, path: str) -> str:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise StorageError(
                f"{path!r} is no path inside the run's folder {self.root}; use a relative path without '..'"
            )
        return "/".join(parts)

    def _folder(self, path: str) -> str:
        return self._inside(path) if path else ""

    def _pieces(self, path: str, start: int = 0) -> Iterator[memoryview]:
        """From `start` to the end; each piece is overwritten by the next one."""
        buffer, source = memoryview(bytearray(_FIRST_BYTES)), self._holding(path)
        while (found := source.read(path, start, buffer)) == len(buffer):
            yield buffer
            start += found
            if found < READ_BYTES:
                buffer = memoryview(bytearray(READ_BYTES))
        yield buffer[:found]
