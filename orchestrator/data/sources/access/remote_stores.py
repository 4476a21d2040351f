"""Remote storages of source files behind one interface: buckets, and datasets of the Hugging Face hub.

`orchestrator.storage.buckets` reads buckets, for a run's storage as well. `storage.buckets` documents
the credentials.

A dataset of the hub is named `hf://datasets/ORG/NAME[@REVISION][/PATH]`, as in pyarrow, DuckDB and Polars. A
revision may mean another commit tomorrow; a commit's files never change. So a revision is resolved to its
commit when a source is listed. The base of the frozen list contains the commit, and every file is identified
by the hash of its content (the etag). The library `huggingface_hub` handles the token (`HF_TOKEN`, or
`hf auth login`), `HF_ENDPOINT`, proxies and the hub's rate limits. Files are read by byte ranges; nothing is
put into its cache.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from typing_extensions import override

from orchestrator.config.redaction import redacted_text
from orchestrator.errors import ConfigError
from orchestrator.storage.buckets import SCHEMES, BucketRequests, called_so, is_uri, split_bucket
from orchestrator.storage.files import require_plain
from orchestrator.storage.store import ObjectFacts
from orchestrator.storage.tries import Backoff, is_server_failure, tried

Result = TypeVar("Result")
# Of data, which are read again after an answer that is interrupted, too short, or refused for the moment.
_BACKOFF = Backoff(first_s=1.0, most_s=5.0)


class RemoteStore(Protocol):
    """A bucket, or a dataset of the hub at one commit. Keys are relative to it.

    It raises `OSError` with an explanation. One that `is_server_failure` may be temporary.
    """

    @property
    def uri(self) -> str:
        """Its own URI."""
        ...

    def facts(self, key: str) -> ObjectFacts:
        """The metadata of one object; the tag is its etag. Raises `FileNotFoundError` if there is none."""
        ...

    def below(self, folder: str) -> Iterator[tuple[str, ObjectFacts]]:
        """(key, metadata) of every object below a folder; "" is the whole store."""
        ...

    def read(self, key: str, start: int, into: memoryview, tag: str) -> int:
        """Fills `into`, which is not empty, with an object's bytes from `start` on.

        Returns the number of bytes. Raises `OSError` if the object no longer has this tag.
        """
        ...


def repeated(request: Callable[[], Result]) -> Result:
    """The result of a request to a remote store, which is repeated if its server fails."""
    return tried(request, time.sleep, backoff=_BACKOFF, repeat=is_server_failure)


def is_remote(path: str) -> bool:
    """Whether a path is a URI, or is probably meant as one."""
    return is_uri(path) or path.startswith("hf:")


def split_uri(uri: str) -> tuple[str, str]:
    """(the bucket's own URI, the key in it); for the hub, that of the dataset at its revision.

    Raises `ConfigError` if it is no bucket of a known kind, and as `require_plain`.
    """
    if is_hub(uri):
        hub = split_hub(uri)
        return hub.root, hub.key
    at = split_bucket(uri)
    if at is None:
        shown = redacted_text(uri)
        raise ConfigError(
            f"{shown}: the URI is not supported; files are read from local paths, from a bucket "
            f"({', '.join(f'{s}://' for s in SCHEMES)} with its name) and from hf://datasets/. Mount the "
            f"storage, or give such a URI{called_so(shown)}",
            code="config.storage_uri",
        )
    require_plain(uri, pattern=True)
    return at


def remote_store(uri: str) -> tuple[RemoteStore, str]:
    """(the store that a URI names, the key in it). Raises as `split_uri`."""
    root, key = split_uri(uri)
    return (HubDataset(root) if is_hub(uri) else BucketRequests(uri=root)), key


# ---------------------------------------------------------------------------------------- datasets of the hub
_FORM = "hf://datasets/ORG/NAME[@REVISION][/PATH]"
_URI = re.compile(r"hf://datasets/([^/@\s]+/[^/@\s]+)(?:@((?:refs/(?:convert|pr)/)?[^/@]+))?(?:/(.*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"
_TIMEOUT_S = 30.0
_SHOWN = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPath:
    """A path in a dataset, as in its URI. `revision` is `main` if the URI has none."""

    repo: str
    revision: str
    key: str

    @property
    def root(self) -> str:
        """The URI of the whole dataset at this revision."""
        return f"hf://datasets/{self.repo}@{self.revision}"

    @property
    def uri(self) -> str:
        """The URI."""
        return f"{self.root}/{self.key}".rstrip("/")


def is_hub(path: str) -> bool:
    """Whether a path is a URI of the hub."""
    return path.startswith("hf://")


def split_hub(uri: str) -> HubPath:
    """The parts of a URI. Raises `ConfigError` if it names no dataset."""
    found = _URI.fullmatch(uri)
    if found is None:
        raise ConfigError(
            f"{uri}: it names no dataset of the hub; write {_FORM}, where PATH is a file, a folder or a "
            "glob. Models and spaces are not supported",
            code="config.storage_uri",
        )
    repo, revision, key = found.groups()
    return HubPath(repo=repo, revision=_revision(revision), key=(key or "").strip("/"))


def _revision(given: str | None) -> str:
    """The hub's name of a revision: DuckDB writes `~parquet` for the branch of files that the hub converts
    itself.
    """
    if given is None:
        return _MAIN
    return f"refs/convert/{given[1:]}" if given.startswith("~") else unquote(given)


def pinned(paths: Sequence[str], base: str = "") -> list[str]:
    """The URIs with their revisions replaced by commits.

    Each revision is resolved once, so that all paths of a source use one commit. For the dataset of which
    `base` names a commit, that commit is used and none is resolved. Raises `OSError` with an explanation.
    """
    known = dict[tuple[str, str], str]()
    found = []
    for each in map(split_hub, paths):
        if is_hub(base) and split_hub(base).repo == each.repo:
            commit = split_hub(base).revision
        elif (commit := known.get((each.repo, each.revision), "")) == "":
            commit = known[each.repo, each.revision] = commit_of(each)
        found.append(replace(each, revision=commit).uri)
    return found


def same_revisions(paths: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the URIs name the same revisions of the same datasets, with any paths in them."""
    mine, theirs = ({split_hub(p).root for p in each if is_hub(p)} for each in (paths, others))
    return mine == theirs


def commit_of(path: HubPath) -> str:
    """The current commit of a revision. Raises `OSError` with an explanation."""
    if _COMMIT.fullmatch(path.revision):
        return path.revision

    def ask() -> str:
        from huggingface_hub import HfApi

        info = HfApi().dataset_info(path.repo, revision=path.revision, timeout=_TIMEOUT_S)
        return str(info.sha)

    return _asked(path.root, ask)


class HubDataset(RemoteStore):
    """A dataset of the hub at one commit."""

    def __init__(self, uri: str) -> None:
        """`uri` is that of the whole dataset (`HubPath.root`)."""
        self._uri = uri

    @property
    @override
    def uri(self) -> str:
        return self._uri

    @override
    def facts(self, key: str) -> ObjectFacts:
        # those of a file at a commit are queried once per process
        found = _facts(f"{self.uri}/{key}")
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", f"{self.uri}/{key}")
        return found

    @override
    def below(self, folder: str) -> Iterator[tuple[str, ObjectFacts]]:
        """Yields all files below a folder, with one request for 1,000 of them."""
        at = split_hub(f"{self.uri}/{folder}")

        def ask() -> list[Any]:
            from huggingface_hub import HfApi
            from huggingface_hub.errors import EntryNotFoundError

            try:
                tree = HfApi().list_repo_tree(
                    at.repo, at.key or None, recursive=True, revision=at.revision, repo_type="dataset"
                )
                return list(tree)
            except EntryNotFoundError:
                return []

        for found in _asked(at.uri, ask):
            if hasattr(found, "blob_id"):  # a folder has none
                etag = found.lfs.sha256 if found.lfs else found.blob_id
                yield found.path, ObjectFacts(size=found.size, tag=etag)

    @override
    def read(self, key: str, start: int, into: memoryview, tag: str) -> int:
        del tag  # a commit's file is always the same
        from huggingface_hub import utils

        client: Any = utils
        uri = f"{self.uri}/{key}"
        headers = {
            **client.build_hf_headers(),
            "Range": f"bytes={start}-{start + len(into) - 1}",
            "Accept-Encoding": "identity",
        }
        with hub_errors(uri):
            answer = client.http_backoff("GET", _url(uri), headers=headers, timeout=_TIMEOUT_S)
            client.hf_raise_for_status(answer)
            data = bytes(answer.content)
        into[: len(data)] = data[: len(into)]
        return len(data)


# cached: a file that is read in fragments needs them at each opening
@lru_cache(maxsize=1 << 16)
def _facts(uri: str) -> ObjectFacts | None:
    def ask() -> ObjectFacts | None:
        from huggingface_hub import get_hf_file_metadata
        from huggingface_hub.errors import EntryNotFoundError

        try:
            found = get_hf_file_metadata(_url(uri), timeout=_TIMEOUT_S)
        except EntryNotFoundError:
            return None
        if found.size is None or not found.etag:
            raise OSError(errno.EPROTO, "the hub says neither size nor etag of this file", uri)
        return ObjectFacts(size=found.size, tag=found.etag)

    return _asked(uri, ask)


def _url(uri: str) -> str:
    from huggingface_hub import hf_hub_url

    at = split_hub(uri)
    return hf_hub_url(at.repo, at.key, repo_type="dataset", revision=at.revision)


# ---------------------------------------------------------------------------------------- errors
def _asked(uri: str, ask: Callable[[], Result]) -> Result:
    """A request with retries, for calls that the library itself does not retry."""

    def request() -> Result:
        with hub_errors(uri):
            return ask()

    return repeated(request)


@contextmanager
def hub_errors(uri: str) -> Iterator[None]:
    """Converts the library's errors about `uri` to the `OSError` that a local file would raise.

    Its text has the problem and a remedy.
    """
    try:
        yield
    except Exception as error:  # two dozen classes of the library and of its dependencies
        if type(error) is OSError:
            raise
        raise _in_words(uri, error) from error


def _in_words(uri: str, error: Exception) -> OSError:
    from huggingface_hub import constants, errors

    at, shown = split_hub(uri), " ".join(str(error).split())[:_SHOWN]
    where = f"https://huggingface.co/datasets/{at.repo}"
    sign = "log in by `hf auth login`, or set HF_TOKEN, on every machine"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return OSError(errno.ENETDOWN, "HF_HUB_OFFLINE is set, so the hub is not asked; unset it", uri)
    if isinstance(error, errors.GatedRepoError):
        what = f"the dataset is gated: ask for access at {where}, and {sign}"
        return PermissionError(errno.EACCES, what, uri)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        what = f"{constants.ENDPOINT} has no dataset {at.repo}, or it is private: fix its name, or {sign}"
        return FileNotFoundError(errno.ENOENT, what, uri)
    if isinstance(error, errors.RevisionNotFoundError):
        what = f"dataset {at.repo} has no revision {at.revision} (any more); fix the part after `@`"
        return FileNotFoundError(errno.ENOENT, what, uri)
    if isinstance(error, errors.EntryNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such file at this commit", uri)
    if status == 403:
        return PermissionError(errno.EACCES, f"the hub denies access: {sign} ({shown})", uri)
    if status == 429:
        return OSError(errno.EIO, f"the hub's limit of requests is reached: {sign} ({shown})", uri)
    return OSError(errno.EIO, f"the hub does not answer as it should ({shown})", uri)
