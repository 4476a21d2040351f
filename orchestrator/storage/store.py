"""The protocol of a run's store: a folder, or a prefix of a bucket.

A store handles names and whole objects. `Storage` is above every store, and rejects paths that lead out of
the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from typing_extensions import override

from orchestrator.errors import StorageError
from orchestrator.storage.disk import AppendHandle

# The content of an object from its beginning, in pieces. A piece must not change until `put` returns. Called
# again for every try.
Pieces = Callable[[], Iterable[bytes | bytearray | memoryview]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The capabilities of a kind of store.

    `refuses_taken`: a `put` of a name that is taken raises, exclusive or not. `lists_facts`: `list` has sizes
    and tags, which another store would have to request for each name. `appends`: files can grow.
    `frees_names`: an object created under a deleted name stays; otherwise a delayed repeat of the deletion
    may remove it. `reads_at_a_time`: this many parallel reads are faster than sequential ones, because each
    waits for a remote answer. `cached_by_machine`: other processes on the machine read from memory what one
    process has read.
    """

    refuses_taken: bool
    lists_facts: bool
    appends: bool
    frees_names: bool
    reads_at_a_time: int
    cached_by_machine: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectFacts:
    """The metadata of an object.

    `size` is in bytes. `tag` changes whenever the content does (empty if the store has none). `mtime_ns` is
    the modification time since 1970 (0 if the store does not report it). Objects are compared without it: a
    list may have it more exactly than a request for one object.
    """

    size: int
    tag: str
    mtime_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A name in a folder. `facts`: None for a folder, and if lists do not have them (see `Traits`)."""

    name: str
    facts: ObjectFacts | None


class Readable(Protocol):
    """The two methods of a `Store` that read objects."""

    def read(self, path: str, start: int, into: memoryview) -> int:
        """Reads into the buffer, as `Store.read`."""
        ...

    def facts(self, path: str) -> ObjectFacts:
        """Returns size and tag, as `Store.facts`."""
        ...


class Store(Protocol):
    """Whole objects below one root. Paths are relative, with `/`, without `..`; "" is the root itself.

    A folder exists as soon as it has content, and may exist empty. The store repeats a call if that can help
    and cannot harm. Remaining failures are a `StorageError`, or `FileNotFoundError` if an object is
    *certainly* absent. Pickles. Thread-safe.
    """

    root: str
    """The absolute path, or the URI, for messages."""

    @property
    def traits(self) -> Traits:
        """What this kind of storage can do."""
        ...

    def beside(self, root: str) -> Store:
        """Another root, accessed in the same way."""
        ...

    def within(self, limit_s: float) -> Store:
        """The same root, whose calls end within `limit_s` seconds, as far as the store can control that.

        A disk that hangs cannot be interrupted. A heartbeat must not come late.
        """
        ...

    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        """Publishes an object of `size` bytes, whole or not at all, whatever is raised, also by `pieces`.

        Exclusive: of all callers that ever try the name, in any process, exactly one gets True, and the
        object is durable. False: the name is taken. Not exclusive: the caller owns the name for good. If it
        is taken nevertheless, the result depends on the store (`Traits.refuses_taken`), but is never a
        mixture of both. Durable after `sync` of its folder. Raises `StorageError` if `pieces` have another
        number of bytes, and if the result cannot be determined: the name may then be taken without an owner.
        Exclusive: raises `NoConditionalCreateError` if the store cannot refuse a taken name (membership rule
        9).
        """
        ...

    def sync(self, folder: str) -> None:
        """Makes changes in `folder` durable: puts, deletions, and the folders from the root down to it."""
        ...

    def read(self, path: str, start: int, into: memoryview) -> int:
        """Fills `into` with an object's bytes from `start` on, fewer only if the object ends. Returns the
        number of bytes.
        """
        ...

    def facts(self, path: str) -> ObjectFacts:
        """The metadata of one object, requested by name. Only this, not a list, proves that it is absent."""
        ...

    def list(self, folder: str) -> list[Listed]:
        """The content of a folder, sorted by name; empty if there is none."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes objects; durable after `sync` of their folders. They may be absent."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder and everything below it. Links are removed, not followed.

        The folder may be absent. A file of that name is deleted, too.
        """
        ...

    def copy(self, source: Store, theirs: str, path: str) -> bool:
        """Copies an object of another root to a new name here, without passing its bytes through this
        process.

        Durable after `sync`, as a `put`. False: not possible between these two stores; use `read` and `put`.
        """
        ...


@runtime_checkable
class AppendingStore(Store, Protocol):
    """A store whose files can grow."""

    @override
    def beside(self, root: str) -> AppendingStore:
        ...

    @override
    def within(self, limit_s: float) -> AppendingStore:
        ...

    def append(self, path: str) -> AppendHandle:
        """A new file that grows. Raises `StorageError` if the name is taken or cannot be created."""
        ...


def exact(pieces: Pieces, size: int, name: str) -> Iterator[memoryview]:
    """The pieces, as bytes.

    Raises `StorageError` before the end if they are more or fewer than `size`. The caller must not publish
    what it has written so far.
    """
    found = 0
    for piece in pieces():
        view = memoryview(piece).cast("B")
        found += len(view)
        if found > size:
            break
        yield view
    if found != size:
        raise StorageError(
            f"cannot write {name}: expected {size} bytes, its content has "
            f"{'more' if found > size else found}, because its source changed meanwhile. Nothing was "
            "published; end the process that writes the source, and run again",
            code="storage.changed_while_read",
        )
