"""What a run needs of the place that keeps it, whatever that is: a folder, or a prefix of a bucket.

It knows names, whole objects and their bytes. It knows nothing of points, claims or journals, nor of what
a caller may name: `Storage` stands above every store, and lets no path through that leads out of the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.storage.disk import AppendHandle

# The content of an object from its begin on, in pieces, each of which stays as it is until `put` returns.
# Called anew for every try.
Pieces = Callable[[], Iterable[bytes | bytearray | memoryview]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What one kind of store can do and another cannot.

    `refuses_taken`: a `put` of a name that is taken raises, exclusive or not. `lists_facts`: `list` says
    sizes and tags, where another store would have to ask for each name. `appends`: files can grow.
    `frees_names`: what is created under a name that was deleted is there to stay; elsewhere a delayed repeat
    of the deletion may take it away. `reads_at_a_time`: so many reads together are faster than one after the
    other, because each waits for an answer from afar. `cached_by_machine`: what a process has read, others
    on its machine read from memory.
    """

    refuses_taken: bool
    lists_facts: bool
    appends: bool
    frees_names: bool
    reads_at_a_time: int
    cached_by_machine: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectFacts:
    """What a store says of an object without giving its content: `size` in bytes, and a `tag` that is another
    one whenever the content is (empty where the store has none).
    """

    size: int
    tag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A name in a folder. `facts`: None for a folder, and where lists do not say them (see `Traits`)."""

    name: str
    facts: ObjectFacts | None


class Readable(Protocol):
    """The two of a `Store` by which objects are read."""

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Store`."""
        ...

    def facts(self, path: str) -> ObjectFacts:
        """See `Store`."""
        ...


class Store(Protocol):
    """Whole objects below one root. Paths are relative, with `/`, without `..`; "" is the root itself.
    Folders are there as soon as something lies in them, and may be there empty.

    A call is repeated by the store where that can help and cannot harm, which it alone knows; what then is
    left of its failures is a `StorageError`, and `FileNotFoundError` if an object is *surely* absent.
    Pickles; safe to use from threads.
    """

    @property
    def root(self) -> str:
        """The absolute path, or the URI, for messages."""
        ...

    @property
    def traits(self) -> Traits:
        """See `Traits`."""
        ...

    def beside(self, root: str) -> Store:
        """Another root, reached in the same way."""
        ...

    def within(self, limit_s: float) -> Store:
        """The same root, of which every call comes to an end within `limit_s` seconds where the store has a
        hand in that (a disk that hangs, hangs): a sign of life that comes late is none.
        """
        ...

    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        """Publish an object of `size` bytes, whole or not at all, whatever is raised, by `pieces` too.

        Exclusive: of all who ever try the name, in any process, exactly one gets True, and it is durable;
        False: it is taken. Not exclusive: the caller owns the name for good; what happens where it is taken
        all the same is the store's (`Traits.refuses_taken`), but never a mixture of both; durable after
        `sync` of its folder. Raises `StorageError` if `pieces` have another number of bytes, and where it
        cannot be found out what became of it: then the name may be taken, by nobody who knows it. Exclusive:
        raises `NoConditionalCreateError` where the store cannot refuse a taken name (membership rule 9).
        """
        ...

    def sync(self, folder: str) -> None:
        """What was put into `folder`, or taken away there, is durable afterwards, and so are the folders from
        the root down to it.
        """
        ...

    def read(self, path: str, start: int, into: memoryview) -> int:
        """Fill `into` with an object's bytes from `start` on; fewer than it holds only where the object ends.
        Returns how many.
        """
        ...

    def facts(self, path: str) -> ObjectFacts:
        """Of one object, asked for by its name: this, and no list, says that it is absent."""
        ...

    def list(self, folder: str) -> list[Listed]:
        """What lies in a folder, sorted by name; empty if there is none."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Take objects away; durable after `sync` of their folders. Absent is fine."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Take a folder and all below it away; links are removed, not followed. Absent is fine, and a file
        goes as a folder would.
        """
        ...

    def copy(self, source: Store, theirs: str, path: str) -> bool:
        """An object of another root under a new name here, without its bytes passing through this process;
        durable after `sync`, as a `put`. False: this cannot be done between these two, read and put it.
        """
        ...


@runtime_checkable
class AppendingStore(Store, Protocol):
    """A store whose files can grow."""

    def beside(self, root: str) -> AppendingStore:
        """See `Store`."""
        ...

    def within(self, limit_s: float) -> AppendingStore:
        """See `Store`."""
        ...

    def append(self, path: str) -> AppendHandle:
        """A new file that grows. Raises `StorageError` if the name is taken or cannot be created."""
        ...
