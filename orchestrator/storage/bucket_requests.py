"""Requests to the objects of a bucket: the one way in which a run's storage and its data reach one.

`ObjectStore` keeps a run in a bucket. `orchestrator.data.sources.access` reads a user's files from one.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.storage.buckets import CONTENT, READING, Limits, bucket_of, explained
from orchestrator.storage.store import ObjectFacts

Result = TypeVar("Result")

AT_A_TIME = 1000  # the maximum number of objects that one request lists or deletes
_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRequests:
    """Requests to one bucket, each made once. Thread-safe. Pickles.

    `uri` is the bucket's own URI. `rights` are those that the caller needs there, for messages.

    Each request raises an `OSError` with an explanation, `NoBucketError` if there is no such bucket, and as
    `bucket_of`. `tries.tried` repeats a request.
    """

    uri: str
    rights: str = READING
    limits: Limits = CONTENT

    def ask(self, key: str, request: Callable[[Any, Any], Result], in_bulk: bool = True) -> Result:
        """The result of `request`, which is called with the library and its store of the bucket.

        `key` is for messages.
        """
        bucket = bucket_of(self.uri, self.limits, in_bulk)  # raises if the library is not installed
        import obstore

        with explained(self.uri_of(key), self.rights):
            return request(obstore, bucket)

    def uri_of(self, key: str) -> str:
        """The URI of an object or folder."""
        return f"{self.uri}/{key}" if key else self.uri

    def facts(self, key: str) -> ObjectFacts:
        """The metadata of one object. Raises `FileNotFoundError` if there is none."""
        return facts_in(self.ask(key, lambda library, bucket: library.head(bucket, key)))

    def below(self, folder: str) -> Iterator[tuple[str, ObjectFacts]]:
        """(key, metadata) of every object below a folder. One request for 1,000 objects.

        A console that makes a folder creates an object whose key is the folder's, with a `/` at its end.
        """
        pages = iter(
            self.ask(
                folder,
                lambda library, bucket: library.list(bucket, prefix=folder or None, chunk_size=AT_A_TIME),
            )
        )
        while (page := self.ask(folder, lambda *_: next(pages, None))) is not None:
            yield from ((meta["path"], facts_in(meta)) for meta in page)

    def read(self, key: str, start: int, into: memoryview, tag: str = "") -> int:
        """Fills `into`, which is not empty, with an object's bytes from `start` on, fewer if the object ends.

        Returns the number of bytes. `tag` is that of the object's `facts`. Raises `OSError` (ESTALE) if the
        object has another one by now. Without a tag, makes a second request if the object ends before
        `start`.
        """
        at = 0

        def request(library: Any, bucket: Any) -> int:
            nonlocal at
            options: dict[str, Any] = {"range": (start, start + len(into))}
            if tag:
                options["if_match"] = f'"{tag}"'
            answer = library.get(bucket, key, options=options)
            for piece in answer.stream():
                into[at : at + len(piece)] = memoryview(piece)
                at += len(piece)
            size: int = answer.meta["size"]
            return min(len(into), size - start)

        try:
            expected = self.ask(key, request)
        except OSError as error:
            # a range that begins at the end, or after it, is an error, with another message on each server
            if not tag and error.errno == errno.EIO and at == 0 and self.facts(key).size <= start:
                return 0
            raise
        if at != expected:
            raise OSError(errno.EIO, f"{at} of {expected} bytes from {start} on arrived", self.uri_of(key))
        return at


def facts_in(meta: Any) -> ObjectFacts:
    """The metadata of an object from the library's."""
    at = meta["last_modified"]
    return ObjectFacts(
        size=meta["size"],
        # Azure's list returns it without the quotes of its other answers
        tag=(meta["e_tag"] or "").strip('"'),
        mtime_ns=int(at.replace(microsecond=0).timestamp()) * _NS + at.microsecond * 1000,
    )
