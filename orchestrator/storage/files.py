"""A run's storage: the durable file operations that the rest of the package uses, and the store behind them.

The store implements them for a kind of storage (`orchestrator.storage.store`): a disk, a bucket, or what an
installed package adds. An installed package adds a scheme by an entry point of the group
`orchestrator.storage`: its name is the scheme, and its object is called with a URI and a function that
sleeps, and returns a `Store`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path, PurePosixPath

from blake3 import blake3

from orchestrator.errors import ConfigError, OrchestratorError, StorageError
from orchestrator.records.points import FileEntry
from orchestrator.storage.buckets import AZURE, SCHEMES, is_uri
from orchestrator.storage.disk import AppendHandle, Disk
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.store import AppendingStore, Listed, Pieces, Readable, Store, Traits

READ_BYTES = 8 << 20
_NOT_PLAIN = frozenset(("", ".", ".."))  # parts of paths that are not written in their shortest form
_FIRST_BYTES = 64 << 10  # most files are documents that fit, and memory for 8 MiB takes longer than they do


class Storage:
    """The folder of one run. Paths are relative to it, with `/`; paths outside are refused. Pickles.
    Thread-safe.

    An operation that fails for a temporary reason is tried 4 times within about 2 seconds, then raises
    `StorageError`. An existing file is never written again: no call overwrites or renames.
    """

    def __init__(
        self, root: str, disk: Disk | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`root` is a local path, which need not exist.

        It is made absolute here, so that it means the same in a process with another current folder. Raises
        `ConfigError` for a URI, and for an empty text.
        """
        self._store: Store = LocalStore(root, disk, sleep)

    @classmethod
    def on(cls, store: Store) -> Storage:
        """The storage on a store."""
        storage = cls.__new__(cls)
        storage._store = store
        return storage

    @property
    def root(self) -> str:
        """The folder's absolute path, or the URI, without a trailing slash."""
        return self._store.root

    @property
    def folder(self) -> Path | None:
        """The folder, if this is one; None for a bucket, which has no files on this machine."""
        return Path(self.root) if isinstance(self._store, LocalStore) else None

    @property
    def traits(self) -> Traits:
        """The capabilities of this kind of storage."""
        return self._store.traits

    def __repr__(self) -> str:
        return f"Storage({self.root!r})"

    # ---------------------------------------------------------------------- writing
    def write(self, path: str, data: bytes | memoryview) -> FileEntry:
        """Writes a new file and syncs its content. Its name is durable only after `sync` of its folder.

        Folders are made as needed. Returns `path` as passed, the size and the blake3 digest. Raises
        `StorageError` if the name is taken or the disk fails; then no part of the file is left, unless even
        removing it failed.
        """
        view = memoryview(data).cast("B")
        self._store.put(self._inside(path), lambda: (view,), len(view))
        return FileEntry(path=path, bytes=len(view), digest=blake3(view).hexdigest())

    def replace(self, path: str, data: bytes) -> None:
        """Replaces a file that is no longer needed, or creates it, durably and whole, as `create` does.

        On a disk, another process that creates the name meanwhile keeps it. Raises `StorageError`.
        """
        if self._store.traits.refuses_taken:
            self.delete(path)
            self.create(path, data)
        else:  # if it were deleted first, a delayed repeat of the deletion could delete the new one
            self.write(path, data)

    def put(self, path: str, pieces: Pieces, size: int) -> None:
        """Writes a new file of `size` bytes from pieces of any length in bounded memory, and syncs its
        content.

        Its name is durable only after `sync` of its folder. `pieces` is called again for every try; its
        pieces must not change until this returns. Raises as `write`, and whatever `pieces` raises: then no
        part of the file is left, unless even removing it failed.
        """
        self._store.put(self._inside(path), pieces, size)

    def beside(self, root: str) -> Storage:
        """Another folder of the same disk, or prefix of a bucket, accessed in the same way.

        If it is of another kind than this one, it is opened as by `open_storage`. Raises as that.
        """
        if _scheme(root) == _scheme(self.root):
            return Storage.on(self._store.beside(root))
        return Storage.on(store_at(root, time.sleep))

    def within(self, limit_s: float) -> Storage:
        """The same storage, whose calls give up after `limit_s` seconds.

        Otherwise a call to a bucket may take half a minute for a document, and minutes for content. A
        heartbeat must not come late.
        """
        return Storage.on(self._store.within(limit_s))

    def take(self, other: Storage, theirs: str, path: str) -> bool:
        """Adds a file of another folder under a new name here.

        It is a second name for the same bytes (a hard link; no file is ever written again), or a copy if the
        file system cannot do that: then it returns False. Durable after `sync`, as a `write`. Raises
        `FileNotFoundError` if there is no such file, `StorageError` if the name is taken or the disk fails.
        """
        theirs, path = other._inside(theirs), self._inside(path)
        source = other._holding(theirs)
        if source is other._store and self._store.copy(other._store, theirs, path):
            return True
        size = source.facts(theirs).size
        # copies each piece, because they share their memory
        self._store.put(path, lambda: map(bytes, other._pieces(theirs)), size)
        return False

    def sync(self, folder: str) -> None:
        """Makes the names in `folder`, and in the folders above it down from the root, durable."""
        self._store.sync(self._folder(folder))

    def create(self, path: str, data: bytes) -> bool:
        """Creates a file exclusively, durably and whole.

        Of all callers that ever try a name, in any process, exactly one gets True. A reader sees all of it or
        nothing (it is written under another name and then linked). On a file system without hard links the
        name itself is taken first, and a reader may find it torn: then it counts as taken. False: the name is
        taken. Raises `StorageError`.
        """
        return self._store.put(self._inside(path), lambda: (data,), len(data), exclusive=True)

    def append(self, path: str) -> AppendHandle:
        """A new file that grows.

        Raises `StorageError` if the name is taken or cannot be created, and in a bucket, where files cannot
        grow.
        """
        if not isinstance(self._store, AppendingStore):
            raise StorageError(
                f"cannot create {self.root}/{path} as a file that grows: files in a bucket cannot grow",
                code="storage.no_append",
            )
        return self._store.append(self._inside(path))

    # ---------------------------------------------------------------------- reading
    def read(self, path: str, start: int = 0) -> bytes:
        """A file's bytes from `start` on.

        Raises `FileNotFoundError` if it is certainly absent, `StorageError` if that cannot be determined.
        """
        pieces = [bytes(piece) for piece in self._pieces(self._inside(path), start)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def entry(self, path: str) -> FileEntry:
        """Size and digest of a file, read in pieces (8 MiB of memory). Raises as `read`."""
        hasher, num_bytes = blake3(), 0
        for piece in self._pieces(self._inside(path)):
            hasher.update(piece)
            num_bytes += len(piece)
        return FileEntry(path=path, bytes=num_bytes, digest=hasher.hexdigest())

    def read_part(self, path: str, start: int, num_bytes: int) -> bytearray:
        """`num_bytes` bytes of a file from `start` on, or fewer if it ends before. Raises as `read`."""
        path = self._inside(path)
        if num_bytes > READ_BYTES:  # a length in a damaged file must not exhaust the memory
            num_bytes = min(num_bytes, max(0, self._holding(path).facts(path).size - start))
        part = bytearray(num_bytes)
        with memoryview(part) as view:
            found = self._holding(path).read(path, start, view)
        del part[found:]
        return part

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        """Fills `into` (any item format, C-contiguous, writable) with a file's bytes from `start` on.

        Makes no other copy of them in memory. Returns the number of bytes, which is less than it holds only
        if the file ends before. Raises as `read`; then the content of `into` is undefined.
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
        """A tag that distinguishes this content of a file from any other that it ever has.

        "" in a folder, which has no tags, None if there is no such file. Raises `StorageError` if that cannot
        be determined.
        """
        try:
            return self._store.facts(self._inside(path)).tag
        except FileNotFoundError:
            return None

    def away(self, path: str) -> str:
        """Why a file cannot be read from here although it is not known to be missing; empty if it can.

        Always empty if all files are in one place. Raises `StorageError`.
        """
        return ""

    def on_nodes(self, path: str) -> bool:
        """Whether a file is on disks of nodes, perhaps on several. Raises `StorageError`."""
        return False

    def elsewhere(self, path: str) -> bool:
        """Reports wrong bytes in a file. Returns whether there is another copy, from which it is read from
        now on.

        There is none if all files are in one place.
        """
        return False

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty if there is no such folder. May raise `StorageError`."""
        return [found.name for found in self.listed(folder)]

    def listed(self, folder: str) -> Sequence[Listed]:
        """The content of a folder, sorted by name, with sizes and tags if lists have them (see `Traits`)."""
        return self._store.list(self._folder(folder))

    # ---------------------------------------------------------------------- deleting
    def delete(self, path: str) -> None:
        """Deletes a file; durable after `sync` of its folder. The file may be absent."""
        self._store.delete((self._inside(path),))

    def delete_all(self, paths: Sequence[str]) -> None:
        """Like `delete`, in few requests if the store supports that."""
        self._store.delete([self._inside(path) for path in paths])

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder and everything below it. Links are removed, not followed. The folder may be
        absent.
        """
        self._store.delete_folder(self._inside(folder))

    # ---------------------------------------------------------------------- inside
    def _holding(self, path: str) -> Readable:
        """The store that holds the content of a file."""
        return self._store

    def _inside(self, path: str) -> str:
        if _NOT_PLAIN.isdisjoint(path.split("/")) and "\0" not in path:
            return path
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise StorageError(
                f"{path!r} is no path inside the run's folder {self.root}; use a relative path without '..'",
                code="storage.outside_path",
            )
        return "/".join(parts)

    def _folder(self, path: str) -> str:
        return self._inside(path) if path else ""

    def _pieces(self, path: str, start: int = 0) -> Iterator[memoryview]:
        """Yields the bytes from `start` to the end. Each piece is overwritten by the next one."""
        buffer, source = memoryview(bytearray(_FIRST_BYTES)), self._holding(path)
        while (found := source.read(path, start, buffer)) == len(buffer):
            yield buffer
            start += found
            if found < READ_BYTES:
                buffer = memoryview(bytearray(READ_BYTES))
        yield buffer[:found]


# ---------------------------------------------------------------------------------------- the kind of a store
GROUP = "orchestrator.storage"
_NEEDED = (
    *("root", "traits", "beside", "within", "put", "sync", "read", "facts", "list", "delete"),
    "delete_folder",
)
_QUERY = re.compile(r"\?[^/=]*=")


def store_at(location: str, sleep: Callable[[float], None]) -> Store:
    """The store of a folder's path or of a bucket's URI. Makes no request yet; `sleep` waits between tries.

    Raises `ConfigError` as `open_storage`.
    """
    if not is_uri(location):
        return LocalStore(location, None, sleep)
    if (installed := installed_scheme(location)) is not None:
        return _installed(installed, location, sleep)
    require_plain(location)
    from orchestrator.storage.object_store import ObjectStore

    return ObjectStore(location, sleep)


def installed_scheme(location: str) -> EntryPoint | None:
    """The entry point of a location's scheme; None if no installed package adds it. Imports nothing."""
    scheme, separator, _ = location.partition("://")
    if not separator or scheme in SCHEMES:
        return None
    return next((entry for entry in entry_points(group=GROUP) if entry.name == scheme), None)


def _scheme(location: str) -> str:
    """What kind of store a location has; the buckets' schemes are one kind."""
    if not is_uri(location):
        return ""
    scheme = location.partition("://")[0]
    return "bucket" if installed_scheme(location) is None else scheme


def _installed(entry: EntryPoint, location: str, sleep: Callable[[float], None]) -> Store:
    try:
        store: Store = entry.load()(location, sleep)
    except OrchestratorError:
        raise
    except Exception as error:  # another package's code may raise anything
        raise ConfigError(
            f"the storage {entry.name}:// ({entry.value}) cannot be opened: {type(error).__name__}: {error}; "
            "correct or uninstall the package that adds it",
            code="user_code.storage_failed",
        ) from error
    if lacking := [name for name in _NEEDED if not hasattr(store, name)]:
        raise ConfigError(
            f"the storage {entry.name}:// ({entry.value}) is no orchestrator.storage.store.Store: it has no "
            f"{', '.join(lacking)}",
            code="user_code.no_storage",
        )
    return store


def require_plain(uri: str, *, pattern: bool = False) -> None:
    """Raises `ConfigError` for a URI of another kind than a bucket's, and for one with credentials or
    options.

    The error does not repeat text after the scheme that may be a secret. `pattern`: for names of objects, in
    which `?` and `#` are plain characters, unless they begin a query.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        scheme, _, rest = uri.partition(":")
        rest = rest.lstrip("/")
    elif scheme not in SCHEMES:
        raise ConfigError(
            f"{scheme}:// is not a supported storage; give a folder, e.g. ./runs, or the URI of a bucket "
            "(s3://, gs:// or az://) with a prefix in it",
            code="config.storage_uri",
        )
    before, at, _ = rest.partition("/")[0].partition("@")
    options = _QUERY.search(rest) if pattern else re.search("[?#]", rest)
    # Azure's container@account contains no secret
    if (at and (scheme not in AZURE or ":" in before)) or options:
        raise ConfigError(
            f"the {scheme}:// URI has more than a bucket and a prefix in it ('@', '?' or '#'), which may be "
            "a secret. Write only those two, and set credentials in the environment of each machine "
            "(docs/storage.md)",
            code="config.uri_with_secret",
        )
