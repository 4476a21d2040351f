"""A prefix of a bucket as a `Store`: objects of S3, Google Cloud Storage or Azure.

It repeats requests, and handles the effects of lost answers.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from orchestrator.errors import ConfigError, NoConditionalCreateError, StorageError
from orchestrator.storage.buckets import (
    AT_A_TIME,
    CONTENT,
    DOCUMENT,
    BucketRequests,
    Limits,
    NoBucketError,
    facts_in,
    may_create_twice,
    no_bucket,
    no_conditional_create,
    refuses_taken_names,
    split_bucket,
)
from orchestrator.storage.local_store import TEMPORARY
from orchestrator.storage.store import Listed, ObjectFacts, Pieces, Store, Traits, exact
from orchestrator.storage.tries import problem_code, tried

Result = TypeVar("Result")

# A longer object is uploaded in parts of this size; at most this many of them are held at a time.
PART_BYTES = 8 << 20
_PARTS_AT_A_TIME = 4
_MOST_PARTS = 10_000  # S3's limit
_MOST_COPIED_BYTES = 5 << 30  # S3 copies no larger object in one request
_READ_BYTES = 32 << 20  # per request: a longer request could exceed the time limit on every try
_READS_AT_A_TIME = 8  # of one reader: an answer takes tens of milliseconds to begin
_DOCUMENT_BYTES = 1 << 20  # a request with more than that carries content
_NO_BULK = ("status code: 501", "status code: 405")
_NO_CONDITIONS = "status code: 501"
# The folder of objects that are created to test the server. Earlier versions kept other objects in such
# folders, too. It is hidden from lists.
_HIDDEN = f"{TEMPORARY}creates"
_one_by_one = set[str]()  # the buckets whose server reported that it has no bulk deletion
_RIGHTS = "list, read, write and delete in"
# Metadata of an object that was created exclusively: identifies its creator.
TOKEN = "token"  # noqa: S105  not secret: readers compare it


class ObjectStore(Store):
    """A folder of a bucket.

    An unfinished upload is not visible. Its parts may stay, and cost, until a rule of the bucket removes
    them.

    A call gives up after `buckets.DOCUMENT`'s half a minute. One with content, more than 1 MiB of it, gives
    up after `buckets.CONTENT`'s minutes for each part. All calls of a store that is `within` a limit give up
    after that limit.
    """

    traits = Traits(
        refuses_taken=False,
        lists_facts=True,
        appends=False,
        frees_names=False,
        reads_at_a_time=_READS_AT_A_TIME,
        cached_by_machine=False,
    )

    def __init__(
        self, root: str, sleep: Callable[[float], None] = time.sleep, limits: Limits | None = None
    ) -> None:
        """`root`: `s3://bucket/prefix`, or of another scheme. Makes no request yet. `limits`: of all calls.

        Raises `ConfigError` if it is no such URI.
        """
        at = split_bucket(root)
        if at is None:
            raise ConfigError(no_bucket(root), code="config.storage_uri")
        self._bucket_uri, self._prefix = at
        if any(part in ("", ".", "..") for part in self._prefix.split("/")) and self._prefix:
            raise ConfigError(
                f"{root}: an empty part, '.' and '..' are not allowed in a prefix; remove them",
                code="config.storage_uri",
            )
        self.root = f"{self._bucket_uri}/{self._prefix}".rstrip("/")
        self._sleep, self._limits = sleep, limits

    @override
    def beside(self, root: str) -> ObjectStore:
        return ObjectStore(root, self._sleep, self._limits)

    @override
    def within(self, limit_s: float) -> ObjectStore:
        return ObjectStore(self.root, self._sleep, Limits.within(limit_s))

    # ---------------------------------------------------------------------- writing
    @override
    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        """An exclusive object is a document: it is sent in one request.

        If the answer of a create is lost, it is unknown whether it took effect, and a repeated create is
        refused because of the object that the first one made. So each carries a random token, and a refused
        caller compares the token. (The content would not be enough: two launches may write equal claims.)

        An exclusive one raises `NoConditionalCreateError` if the server answers every try with 501. Each
        process tests an S3 server that is not Amazon's once, and raises the same if it overwrites an existing
        name.
        """
        if exclusive:
            with self._told("create", path):
                data = b"".join(exact(pieces, size, self._uri(path)))
                self._require_conditional_create()
                return self._create(path, data)
        with self._told("write", path):
            self._tried(lambda: self._put(path, pieces, size), size)
        return True

    @override
    def sync(self, folder: str) -> None:
        """A bucket's answer means that the change is durable."""

    @override
    def copy(self, source: Store, theirs: str, path: str) -> bool:
        """Done by the server, within one bucket, and for at most 5 GiB."""
        if not isinstance(source, ObjectStore) or source._bucket_uri != self._bucket_uri:
            return False
        size = source.facts(theirs).size
        if size > _MOST_COPIED_BYTES:
            return False
        key, ours = source._key(theirs), self._key(path)
        with source._found("copy", theirs):
            source._ask(theirs, lambda library, bucket: library.copy(bucket, key, ours), size)
        return True

    # ---------------------------------------------------------------------- reading
    @override
    def read(self, path: str, start: int, into: memoryview) -> int:
        """One request for 32 MiB, and another one if the object ends before `start`."""
        if not into:
            self.facts(path)
            return 0
        done = 0
        with self._found("read", path):
            while done < len(into):
                part = into[done : done + _READ_BYTES]
                read = self._requests(len(part)).read
                found = self._tried(partial(read, self._key(path), start + done, part), len(part))
                done += found
                if found < len(part):
                    break
        return done

    @override
    def facts(self, path: str) -> ObjectFacts:
        """One request."""
        with self._found("look at", path):
            return self._tried(lambda: self._requests().facts(self._key(path)))

    @override
    def list(self, folder: str) -> list[Listed]:
        """One request for 1,000 names."""
        prefix = self._key(folder)
        with self._told("list", folder):
            found = self._ask(
                folder, lambda library, bucket: library.list_with_delimiter(bucket, prefix=prefix or None)
            )
        here = len(prefix) + 1 if prefix else 0
        listed = {name[here:].rstrip("/"): None for name in found["common_prefixes"]}
        listed |= {meta["path"][here:]: facts_in(meta) for meta in found["objects"]}
        # a console that makes a folder creates an object with an empty name in it
        for hidden in ("", _HIDDEN):
            listed.pop(hidden, None)
        return [Listed(name=name, facts=facts) for name, facts in sorted(listed.items())]

    # ---------------------------------------------------------------------- deleting
    @override
    def delete(self, paths: Sequence[str]) -> None:
        """One request for 1,000 objects of S3.

        One for each object if a server reports that it has no such request (or `AWS_DISABLE_BULK_DELETE` is
        set).
        """
        self._delete([self._key(path) for path in paths])

    @override
    def delete_folder(self, folder: str) -> None:
        with self._told("delete folder", folder):
            found = self._tried(lambda: [key for key, _ in self._requests().below(self._key(folder))])
        # an object of that name is deleted, too
        self._delete([*found, *([self._key(folder)] if folder else [])])

    # ---------------------------------------------------------------------- requests
    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._prefix, path) if part)

    def _uri(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _ask(self, path: str, request: Callable[[Any, Any], Result], num_bytes: int = 0) -> Result:
        """The library's answer to one request, which may be repeated. It moves `num_bytes` of content."""
        return self._tried(lambda: self._ask_once(path, request, num_bytes), num_bytes)

    def _tried(self, action: Callable[[], Result], num_bytes: int = 0) -> Result:
        return tried(action, self._sleep, self._limits_for(num_bytes).again_s)

    def _limits_for(self, num_bytes: int) -> Limits:
        return self._limits or (CONTENT if num_bytes > _DOCUMENT_BYTES else DOCUMENT)

    def _ask_once(
        self, path: str, request: Callable[[Any, Any], Result], num_bytes: int = 0, in_bulk: bool = True
    ) -> Result:
        return self._requests(num_bytes).ask(self._key(path), request, in_bulk)

    def _requests(self, num_bytes: int = 0) -> BucketRequests:
        return BucketRequests(uri=self._bucket_uri, rights=_RIGHTS, limits=self._limits_for(num_bytes))

    @contextmanager
    def _told(self, what: str, path: str) -> Iterator[None]:
        """Converts the remaining failures of a request to `StorageError`."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot {what} {self._uri(path)}: {error.strerror or error}", code=problem_code(error)
            ) from error

    @contextmanager
    def _found(self, what: str, path: str) -> Iterator[None]:
        """Like `_told`, but raises FileNotFoundError if there is certainly no such object."""
        with self._told(what, path):
            try:
                yield
            except NoBucketError:
                raise
            except FileNotFoundError as error:
                absent = error
            else:
                return
        raise FileNotFoundError(errno.ENOENT, "no such object", self._uri(path)) from absent

    def _put(self, path: str, pieces: Pieces, size: int) -> None:
        content = _Noting(exact(pieces, size, self._uri(path)))

        def request(library: Any, bucket: Any) -> None:
            key = self._key(path)
            if size <= PART_BYTES:
                library.put(bucket, key, b"".join(content), use_multipart=False)
                return
            part_bytes = max(PART_BYTES, -(-size // _MOST_PARTS))
            library.put(
                bucket,
                key,
                content,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=_PARTS_AT_A_TIME,
            )

        try:
            self._ask_once(path, request, size)
        except OSError:
            if content.failure is not None:  # it ended the upload, and aborting that failed, too
                raise content.failure from None
            raise

    def _require_conditional_create(self) -> None:
        if not may_create_twice(self._bucket_uri) or self._bucket_uri in refuses_taken_names:
            return
        path, refused = f"{_HIDDEN}/{secrets.token_hex(8)}", False

        def request(library: Any, bucket: Any) -> None:
            nonlocal refused
            try:
                library.put(bucket, self._key(path), b"", mode="create", use_multipart=False)
            except library.exceptions.AlreadyExistsError:
                refused = True

        try:
            with self._conditional():
                self._ask(path, request)
                if not refused:  # it is refused if the answer to the first request was lost
                    self._ask(path, request)
        finally:
            with suppress(StorageError):
                self._delete([self._key(path)])
        if not refused:
            raise NoConditionalCreateError(no_conditional_create(self.root))
        refuses_taken_names.add(self._bucket_uri)

    @contextmanager
    def _conditional(self) -> Iterator[None]:
        """Raises `NoConditionalCreateError` for a server that does not support the condition of a request
        (501).
        """
        try:
            yield
        except OSError as error:
            if _NO_CONDITIONS not in str(error):
                raise
            raise NoConditionalCreateError(no_conditional_create(self.root)) from error

    def _create(self, path: str, data: bytes) -> bool:
        token, created = secrets.token_hex(16), False

        def request(library: Any, bucket: Any) -> None:
            attributes = {TOKEN: token}
            with suppress(library.exceptions.AlreadyExistsError):
                library.put(
                    bucket, self._key(path), data, mode="create", attributes=attributes, use_multipart=False
                )
                nonlocal created
                created = True

        def once() -> bool:
            unknown: OSError | None = None
            try:
                self._ask_once(path, request)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                unknown = error
            if created:
                return True
            found = self._token(path)
            if found is not None:
                return found == token
            # Refused, but absent: two concurrent creates (S3 answers 409 to both), or one deleted since.
            text = "the server refused the name as taken, but has no such object; try again"
            raise unknown or OSError(errno.EIO, text, self._uri(path))

        with self._conditional():
            return self._tried(once)

    def _token(self, path: str) -> str | None:
        """The token of the existing object, "" if it was not created exclusively, None if there is no
        object.
        """
        options: Any = {"head": True}
        try:
            found = self._ask_once(
                path, lambda library, at: library.get(at, self._key(path), options=options)
            )
        except NoBucketError:
            raise
        except FileNotFoundError:
            return None
        return str(found.attributes.get(TOKEN, ""))

    def _delete(self, keys: Sequence[str]) -> None:
        with self._told("delete in", ""):
            for begin in range(0, len(keys), AT_A_TIME):
                self._delete_some([*keys[begin : begin + AT_A_TIME]])

    def _delete_some(self, keys: Sequence[str]) -> None:
        try:
            self._tried(lambda: self._delete_once(keys))
        except NoBucketError:
            raise
        except FileNotFoundError:
            # the answer of GCS and Azure if one object is absent; the others may still exist
            if len(keys) > 1:
                for key in keys:
                    self._delete_some([key])

    def _delete_once(self, keys: Sequence[str]) -> None:
        def request(library: Any, bucket: Any) -> None:
            library.delete(bucket, keys)

        if self._bucket_uri not in _one_by_one:
            try:
                self._ask_once("", request)
                return
            except OSError as error:
                if not any(answer in str(error) for answer in _NO_BULK):
                    raise
            _one_by_one.add(self._bucket_uri)
        self._ask_once("", request, in_bulk=False)


class _Noting(Iterator[memoryview]):
    """The items of an iterator. `failure`: the error that it raised."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self.failure: Exception | None = None

    def __next__(self) -> memoryview:
        try:
            return next(self._pieces)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise
