"""A bucket in memory for the real writers: what they do to it can be interleaved, lost, repeated late and cut
off, as the requests to a real one can.

What a request may come to is a `Fate`. A request whose sender gave it up (it died, or repeated it) may still
take effect, whole, at any later moment, or never; what a request asked for in parts is seen by nobody. An
answer that was given is true: lists and reads show all that was answered before. (One that was delayed for
longer than a sender waits is refused by the servers for its age, after 15 minutes: what a model lets happen
at any later moment can happen in truth for so long.)
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from weakref import WeakValueDictionary

from blake3 import blake3

from orchestrator.errors import StorageError
from orchestrator.storage.store import Listed, ObjectFacts, Pieces, Store, Traits, exact

ROOT = "s3://model/run"
PUT, CREATE, DELETE, READ, FACTS, LIST = "put", "create", "delete", "read", "facts", "list"
CHANGES = frozenset({PUT, CREATE, DELETE})
Author = tuple[object, ...]  # who wrote it, and at which of its calls: what content is known by in a search


class Fate(Enum):
    """What becomes of one request."""

    ANSWERED = "answered"
    REPEATED = "answered, and the same request comes once more, at any later moment"
    LOST = "carried out, but the sender hears of an error"
    REFUSED = "not carried out, and the sender hears of an error"
    DIED = "the sender dies before it is sent"
    DIED_WAITING = "the sender dies; the request comes at any later moment"


class DiedError(BaseException):
    """The process that called has died: nothing of it goes on."""


@dataclass(frozen=True)
class Stored:
    """An object."""

    data: bytes
    author: Author

    @property
    def facts(self) -> ObjectFacts:
        return ObjectFacts(size=len(self.data), tag=blake3(self.data).hexdigest()[:32])


@dataclass(frozen=True)
class Request:
    """A change of one object. `stored`: None for a deletion."""

    what: str
    key: str
    stored: Stored | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.key}"


Objects = dict[str, Stored]


@dataclass(eq=False)
class ModelBucket:
    """What a bucket holds, what is under way to it, and each change that was made to it so far."""

    objects: Objects = field(default_factory=dict)
    under_way: list[Request] = field(default_factory=list)
    made: list[tuple[Request, Objects]] = field(default_factory=list)  # the request, and what was there after
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        _buckets[self.number] = self

    def __reduce__(self) -> object:
        return _bucket, (self.number,)  # another process means the same bucket

    @classmethod
    def of(cls, contents: Mapping[str, bytes]) -> ModelBucket:
        """A quiet bucket with these objects."""
        return cls({key: Stored(data, ("before", key)) for key, data in contents.items()})

    def copy(self) -> ModelBucket:
        """Another one that holds the same, with the same under way to it."""
        return ModelBucket(dict(self.objects), list(self.under_way))

    def contents(self) -> dict[str, bytes]:
        """The objects' bytes by key."""
        return {key: stored.data for key, stored in self.objects.items()}

    def carry_out(self, request: Request) -> bool:
        """Whether it changed what it asked to: a create finds its name taken."""
        with self.lock:
            done = changed(self.objects, request)
            self.made.append((request, dict(self.objects)))
            return done

    def arrive(self, number: int) -> None:
        """A request that is under way takes effect."""
        self.carry_out(self.under_way.pop(number))

    def crashes(self, late_creates: bool = False) -> Iterator[tuple[int, str, dict[str, bytes]]]:
        """(number of changes before it, the last of them, the objects' bytes), for every moment at which all
        who write may die: as it is then, and with one earlier request that comes once more after it.
        """
        for number, (request, objects) in enumerate(self.made, start=1):
            yield number, str(request), _bytes(objects)
            for earlier, _ in self.made[: number - 1]:
                after = dict(objects)
                if earlier.what != CREATE or late_creates:
                    changed(after, earlier)
                    if after != objects:
                        yield number, f"{request}, then late: {earlier}", _bytes(after)


def changed(objects: Objects, request: Request) -> bool:
    """Makes the change; False where a create finds its name taken."""
    if request.stored is None:
        objects.pop(request.key, None)
    elif request.what == CREATE and request.key in objects:
        return False
    else:
        objects[request.key] = request.stored
    return True


Turn = Callable[[str, str], Fate]


def answered(what: str, key: str) -> Fate:
    """All goes well."""
    return Fate.ANSWERED


class ModelStore:
    """`orchestrator.storage.store.Store` of a prefix of a `ModelBucket`, as one process has it.

    `turn` is asked before each request (what, key) and says its fate; it may wait, or raise. `seen`: what the
    process asked and was answered; it, and nothing else, decides what the process does next. So one request
    is under way at a time (`reads_at_a_time`), where a bucket takes several.
    """

    traits = Traits(
        refuses_taken=False,
        lists_facts=True,
        appends=False,
        frees_names=False,
        reads_at_a_time=1,
        cached_by_machine=False,
    )

    def __init__(
        self,
        bucket: ModelBucket,
        root: str = ROOT,
        turn: Turn = answered,
        name: object = "",
        seen: list[object] | None = None,
    ) -> None:
        self.bucket, self.root, self._turn, self._name = bucket, root, turn, name
        self.seen: list[object] = [] if seen is None else seen
        self._prefix = root.partition("://")[2].partition("/")[2]

    def beside(self, root: str) -> ModelStore:
        return ModelStore(self.bucket, root, self._turn, self._name, self.seen)

    def within(self, limit_s: float) -> ModelStore:
        return self

    # ------------------------------------------------------------ the calls
    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        try:
            data = b"".join(exact(pieces, size, f"{self.root}/{path}"))
        except OSError as error:
            raise self._error(PUT, path) from error
        return self._change(CREATE if exclusive else PUT, path, Stored(data, (self._name, len(self.seen))))

    def sync(self, folder: str) -> None:
        pass

    def read(self, path: str, start: int, into: memoryview) -> int:
        found = self._find(READ, path)
        part = found.data[start : start + len(into)]
        into[: len(part)] = part
        return len(part)

    def facts(self, path: str) -> ObjectFacts:
        return self._find(FACTS, path).facts

    def list(self, folder: str) -> list[Listed]:
        self._ask(LIST, folder)
        prefix = self._key(folder)
        start = f"{prefix}/" if prefix else ""
        with self.bucket.lock:
            below = {
                key[len(start) :]: at for key, at in self.bucket.objects.items() if key.startswith(start)
            }
        found = {name: stored for name, stored in below.items() if "/" not in name}
        folders = {name.partition("/")[0] for name in below if "/" in name} - found.keys()
        listed = [Listed(name=name, facts=stored.facts) for name, stored in found.items()]
        listed += [Listed(name=name, facts=None) for name in folders]
        self._saw(
            LIST,
            folder,
            sorted((name, found[name].author if name in found else None) for name in (*found, *folders)),
        )
        return sorted(listed, key=lambda one: one.name)

    def delete(self, paths: Sequence[str]) -> None:
        self._delete(paths)

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:  # a request for many is carried out one by one, for all to see
            self._change(DELETE, path, None)

    def delete_folder(self, folder: str) -> None:
        self._ask(LIST, folder)
        prefix = self._key(folder)
        with self.bucket.lock:
            keys = [
                key
                for key in self.bucket.objects
                if key == prefix or key.startswith(f"{prefix}/" if prefix else "")
            ]
        self._saw(LIST, folder, sorted(keys))
        self._delete([key[len(self._prefix) + 1 if self._prefix else 0 :] for key in sorted(keys)])

    def copy(self, source: Store, theirs: str, path: str) -> bool:
        if not isinstance(source, ModelStore) or source.bucket is not self.bucket:
            return False
        return self._change(PUT, path, source._find(READ, theirs))

    # ------------------------------------------------------------ inside
    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._prefix, path) if part)

    def _saw(self, what: str, path: str, answer: object) -> None:
        self.seen.append((what, self._key(path), str(answer)))

    def _ask(self, what: str, path: str) -> Fate:
        fate = self._turn(what, self._key(path))
        if fate is Fate.DIED:
            raise DiedError
        if fate is Fate.REFUSED:
            raise self._error(what, path)
        return fate

    def _error(self, what: str, path: str) -> StorageError:
        self._saw(what, path, "error")
        return StorageError(
            f"cannot {what} {self.root}/{path}: the storage failed (model); run again", code="storage.failed"
        )

    def _find(self, what: str, path: str) -> Stored:
        self._ask(what, path)
        with self.bucket.lock:
            found = self.bucket.objects.get(self._key(path))
        self._saw(what, path, found and found.author)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.root}/{path}")
        return found

    def _change(self, what: str, path: str, stored: Stored | None) -> bool:
        request = Request(what, self._key(path), stored)
        fate = self._ask(what, path)
        if fate is Fate.DIED_WAITING:
            self.bucket.under_way.append(request)
            raise DiedError
        done = self.bucket.carry_out(request)
        if fate is Fate.LOST:
            raise self._error(what, path)
        if fate is Fate.REPEATED:
            self.bucket.under_way.append(request)
        self._saw(what, path, done)
        return done


class FarModelStore(ModelStore):
    """One that is asked by several threads of its process at a time, as a bucket is."""

    traits = replace(ModelStore.traits, reads_at_a_time=2)


class OverwritingModelStore(ModelStore):
    """One of a bucket that overwrites a name that is taken, whatever condition the request has."""

    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        return super().put(path, pieces, size)


def _bytes(objects: Objects) -> dict[str, bytes]:
    return {key: stored.data for key, stored in objects.items()}


_buckets: WeakValueDictionary[int, ModelBucket] = WeakValueDictionary()


def _bucket(number: int) -> ModelBucket:
    return _buckets[number]
