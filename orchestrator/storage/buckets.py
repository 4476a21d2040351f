"""Requests to buckets of S3, Google Cloud Storage and Azure, and explanations of their errors.

This is the one way in which a run's storage (`ObjectStore`) and its data (`data.sources.access`) reach a
bucket.

One library, obstore, serves all three. It lists with sizes and etags, 1,000 objects a request; pyarrow.fs has
no etag (data rule 13 needs one) without a request for each object. It creates exclusively, which pyarrow.fs
cannot. It needs no other Python package; fsspec's s3fs, gcsfs and adlfs bring three trees of packages that
pin each other's versions.

Credentials come from the usual places. S3: `AWS_ACCESS_KEY_ID` and its kin, a web identity, a container's or
an instance's role, else the keys of the profile `AWS_PROFILE` in `~/.aws/credentials` or `~/.aws/config` (a
profile without keys, such as one of SSO, needs boto3, which provides them). GCS:
`GOOGLE_APPLICATION_CREDENTIALS`, gcloud's own file, the metadata server. Azure:
`AZURE_STORAGE_CONNECTION_STRING`, or `AZURE_STORAGE_ACCOUNT_NAME` with `AZURE_STORAGE_ACCOUNT_KEY`, a SAS
token, or a managed identity. Another endpoint: `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`,
`STORAGE_EMULATOR_HOST`, `AZURE_STORAGE_ENDPOINT`. Public buckets: `AWS_SKIP_SIGNATURE`,
`GOOGLE_SKIP_SIGNATURE`, `AZURE_SKIP_SIGNATURE` = true. For a server of S3 that deletes only one object at a
time and does not report that: `AWS_DISABLE_BULK_DELETE` = true.
"""

from __future__ import annotations

import configparser
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from orchestrator.errors import ConfigError, StorageError
from orchestrator.storage.store import ObjectFacts
from orchestrator.storage.tries import FAILED, FULL, TIMEOUT, UNREACHABLE, RequestFailedError

S3, GCS, AZURE = ("s3", "s3a"), ("gs", "gcs"), ("az", "azure", "abfs", "abfss")
SCHEMES = (*S3, *GCS, *AZURE)
_BEGINS = re.compile(rf"\s*({'|'.join(SCHEMES)}):", re.IGNORECASE)
_BUCKET = re.compile(r"[\w.:@-]+", re.ASCII)
_MOST_REPEATS = 5
_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_MOST_SHOWN = 300  # characters of a text of the library or a server
_SAID = re.compile(r"<(Code|Message)>(.*?)</\1>", re.DOTALL)
READING = "list and read"  # the rights of a program that reads; see `explained`
_NO_CREDENTIALS = (
    "169.254.",
    "/latest/api/token",
    "metadata.google",
    "redentials",
    "Account must be specified",
)
# Parts of the library's texts, which end with the error of the connection
_KINDS = {"kind: Timeout,": TIMEOUT, "kind: Connect,": UNREACHABLE, "status code: 507": FULL}
_OWN = (
    "ACCESS_KEY_ID",
    "WEB_IDENTITY_TOKEN_FILE",
    "SKIP_SIGNATURE",
    "CONTAINER_CREDENTIALS_RELATIVE_URI",
    "CONTAINER_CREDENTIALS_FULL_URI",
)


def is_uri(location: str) -> bool:
    """Whether `location` is meant as a URI, not as a path.

    It contains `://`, or begins like a bucket's URI, as in `s3:/bucket`. Callers refuse a URI that
    `split_bucket` does not support.
    """
    return "://" in location or _BEGINS.match(location) is not None


def split_bucket(uri: str) -> tuple[str, str] | None:
    """(the bucket's own URI, the key in it); None if it is no bucket of a known kind."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES or not _BUCKET.fullmatch(bucket):
        return None
    return f"{scheme}://{bucket}", key.strip("/")


def no_bucket(uri: str) -> str:
    """The error text for a URI that `split_bucket` does not support."""
    known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    text = f"{uri} is not the URI of a bucket; write one of {known}, then the name of a bucket and a prefix"
    return text + called_so(uri)


def called_so(uri: str) -> str:
    """How to name a folder whose name begins like a URI; empty if it does not begin like one."""
    path = re.sub("/+", "/", uri.strip())
    return f"; for a folder with this name, write ./{path}" if _BEGINS.match(uri) else ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds.

    `request_s`: one request, including its answer. `retry_s`: the library repeats a request that is refused
    for the moment, or interrupted, within this time of the first request. `again_s`: the caller starts again
    after remaining failures, but not later than this after its first start. It is longer than `request_s`;
    otherwise one request without an answer would end the call. So a call ends within the sum of the three.
    """

    request_s: float
    retry_s: float
    again_s: float

    @classmethod
    def within(cls, limit_s: float) -> Limits:
        """A call ends within `limit_s`. A request without an answer is tried once more."""
        return cls(request_s=0.3 * limit_s, retry_s=0.2 * limit_s, again_s=0.5 * limit_s)


# For requests with content: at 8 MiB a part, they allow 70 kB/s.
CONTENT = Limits(request_s=120.0, retry_s=30.0, again_s=150.0)
# For a query, or a document of some kB. Servers answer in a tenth of a second, and one that has not answered
# for 9 s will not answer on this connection any more. A claim, a commit, or an end waits at most 30 s.
DOCUMENT = Limits.within(30.0)

_owner: int | None = None  # the process that first accessed a bucket


def bucket_of(bucket: str, limits: Limits = CONTENT, in_bulk: bool = True) -> Any:
    """The store of a bucket's own URI, made once per process and limits. It makes no request yet.

    `in_bulk`: it may delete many objects of S3 in one request. Raises `ConfigError` without the library, or
    for an endpoint that is no URL. Raises `OSError` with an explanation without the account that Azure needs.
    Raises `StorageError` in a process that was forked after a bucket was accessed: both would use the same
    connections, and one of them would hang or crash.
    """
    global _owner  # noqa: PLW0603  there is one library per process
    if _owner not in (None, os.getpid()):
        raise StorageError(
            f"cannot reach {bucket} from process {os.getpid()}: it was forked from process {_owner}, which "
            "had already reached a bucket, and the fork broke the connections of both. Start such processes "
            'by spawn or forkserver (of a torch DataLoader: multiprocessing_context="spawn"), or before '
            "anything is read from a bucket",
            code="storage.forked_process",
        )
    store = _made(bucket, limits, in_bulk)
    _owner = os.getpid()
    return store


# A process has few buckets. Each keeps its connections.
@lru_cache(maxsize=32)
def _made(bucket: str, limits: Limits, in_bulk: bool) -> Any:
    try:
        from obstore import store as stores
    except ImportError as error:
        raise ConfigError(
            f"{bucket}: reaching it needs the package obstore, which is not installed: "
            "pip install -e '.[remote]' in the checkout on every machine "
            "of the run",
            code="machine.missing_package",
        ) from error
    with explained(bucket, ""):
        return _store(stores, bucket, limits, in_bulk)


def _store(stores: Any, bucket: str, limits: Limits, in_bulk: bool) -> Any:
    store: Any = stores
    scheme, _, name = bucket.partition("://")
    if scheme in S3:
        config = _s3_config() | ({} if in_bulk else {"disable_bulk_delete": True})
        more = {"credential_provider": provider} if (provider := _s3_provider(config)) else {}
        return store.S3Store(
            name, config=config, client_options=_client(config, limits), retry_config=_retry(limits), **more
        )
    if scheme in GCS:
        config = _gcs_config()
        # an emulator accepts any token, but the library cannot write without one
        more = {"credential_provider": _nobodys_token} if config else {}
        return store.GCSStore(
            name, config=config, client_options=_client(config, limits), retry_config=_retry(limits), **more
        )
    config = _azure_config()
    container, _, host = name.partition("@")
    if host:
        config["account_name"] = host.partition(".")[0]
    return store.AzureStore(
        container, config=config, client_options=_client(config, limits), retry_config=_retry(limits)
    )


def _client(config: dict[str, Any], limits: Limits) -> Any:
    plain = str(config.get("endpoint") or config.get("base_url") or "").startswith("http://")
    return {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=min(10.0, limits.request_s)),
        "timeout": timedelta(seconds=limits.request_s),
    }


def _retry(limits: Limits) -> Any:
    return {"max_retries": _MOST_REPEATS, "retry_timeout": timedelta(seconds=limits.retry_s)}


def forget_buckets() -> None:
    """Lets the next `bucket_of` read endpoints and credentials again, after the environment has changed."""
    _made.cache_clear()
    refuses_taken_names.clear()


# The own URIs of buckets whose server has refused, in this process, to create an existing name.
refuses_taken_names: set[str] = set()


def no_conditional_create(uri: str) -> str:
    """The error text for a bucket that creates an object although its name exists, with alternatives."""
    bucket = (split_bucket(uri) or (uri, ""))[0]
    endpoint = _s3_config().get("endpoint") if may_create_twice(bucket) else None
    at = f" at {urlsplit(endpoint).netloc.rpartition('@')[2]}" if endpoint else ""
    return (
        f"{bucket}{at} cannot create an object only where its name is free (a conditional write, "
        "`If-None-Match: *`), so two launches could claim the same attempt of a run and both train it. Use "
        "Amazon S3, Google Cloud Storage, Azure Blob Storage, Cloudflare R2, or MinIO or Ceph in a version "
        "with conditional writes; or a folder that all machines of the run share"
    )


def may_create_twice(bucket: str) -> bool:
    """Whether this bucket's own URI leads to an S3 server that is not Amazon's.

    Some of these ignore the condition of a create.
    """
    return bucket.partition("://")[0] in S3 and "endpoint" in _s3_config()


def _s3_config() -> dict[str, Any]:
    config: dict[str, Any] = {}
    if not _has_own_credentials():
        config |= _profile()
    if "endpoint" in config:
        config["endpoint"] = _endpoint("endpoint_url of the AWS profile", config["endpoint"])
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        if os.environ.get(name):
            config["endpoint"] = _endpoint(name, os.environ[name])
    return config


def _endpoint(name: str, value: str) -> str:
    """The value of a setting that is a server's URL. Raises `ConfigError`.

    The library panics if the text is no URL.
    """
    if _URL.fullmatch(value):
        return value
    shown = redacted(re.sub(r"[^/\s]*@", f"{SHOWN}@", value))
    raise ConfigError(
        f"{name}={shown} is no URL of a server: give one that begins with http:// or https://, e.g. "
        "http://127.0.0.1:9000",
        code="config.storage_endpoint",
    )


def _has_own_credentials() -> bool:
    return any(os.environ.get(f"AWS_{name}") for name in _OWN)


def _profile() -> dict[str, Any]:
    """The settings of the profile in the AWS command line's files."""
    name, found = os.environ.get("AWS_PROFILE", "default"), dict[str, Any]()
    for variable, path in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        file = configparser.RawConfigParser()
        file.read(os.path.expanduser(os.environ.get(variable) or f"~/.aws/{path}"))
        for section in (f"profile {name}", name):
            if file.has_section(section):
                found |= {key: file.get(section, key) for key in file.options(section)}
    return {ours: found[theirs] for theirs, ours in _KEYS.items() if theirs in found}


def _s3_provider(config: dict[str, Any]) -> Any:
    """The provider of keys for a profile that has none itself."""
    if not os.environ.get("AWS_PROFILE") or "access_key_id" in config or _has_own_credentials():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ConfigError(
            f"the AWS profile {os.environ['AWS_PROFILE']!r} has no access keys of its own; install boto3, "
            "which knows roles and SSO, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            code="machine.missing_package",
        ) from error
    return Boto3CredentialProvider()


def _gcs_config() -> dict[str, Any]:
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return {}
    url = host if "://" in host else f"http://{host}"
    return {"base_url": _endpoint("STORAGE_EMULATOR_HOST", url)}


def _nobodys_token() -> dict[str, Any]:
    return {"token": "emulator", "expires_at": None}


def _azure_config() -> dict[str, Any]:
    pairs = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    given = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    names = {"AccountName": "account_name", "AccountKey": "account_key", "BlobEndpoint": "endpoint"}
    names["SharedAccessSignature"] = "sas_token"
    config: dict[str, Any] = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
    if os.environ.get("AZURE_STORAGE_ENDPOINT"):
        config["endpoint"] = _endpoint("AZURE_STORAGE_ENDPOINT", os.environ["AZURE_STORAGE_ENDPOINT"])
    return config


# ---------------------------------------------------------------------------------------- errors
class NoBucketError(FileNotFoundError):
    """The bucket itself does not exist: nothing is known about an object in it."""


@contextmanager
def explained(uri: str, rights: str = READING) -> Iterator[None]:
    """Converts the library's errors about `uri` to the `OSError` that a local file would raise.

    That is `FileNotFoundError`, `PermissionError`, or another one. Its text has the problem and a remedy, and
    contains no secrets. `rights`: those that are needed there ("": no request was made yet). A public bucket
    grants only those to read.
    """
    from obstore import exceptions

    try:
        yield
    except (exceptions.BaseError, FileNotFoundError, PermissionError) as error:
        raise _in_words(uri, rights, error) from None  # its own text may contain the request's signature


def _in_words(uri: str, rights: str, error: Exception) -> OSError:
    from obstore import exceptions

    text = str(error).partition("\n\nDebug source")[0]
    at, shown = split_bucket(uri), _in_short(redacted(text))
    bucket = at[0] if at else uri
    if any(word in text for word in ("NoSuchBucket", "ContainerNotFound", "specified bucket does not")):
        return NoBucketError(errno.ENOENT, "there is no such bucket at this endpoint", bucket)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such object", uri)
    if isinstance(error, exceptions.PreconditionError):
        return OSError(errno.ESTALE, "the object was replaced while it was read", uri)
    # a machine outside a cloud gets no answer from the address of a cloud's credentials
    if any(word in text for word in _NO_CREDENTIALS):
        what = f"no credentials for {bucket} were found on this machine"
        return PermissionError(errno.EACCES, f"{what}; {_how_to_sign(bucket, rights)} ({shown})", uri)
    denied = isinstance(error, PermissionError) or "status code: 401" in text or "status code: 403" in text
    if denied or isinstance(error, exceptions.UnauthenticatedError | exceptions.PermissionDeniedError):
        what = f"access to {bucket} is denied to these credentials: give them the rights to {rights} it"
        return PermissionError(errno.EACCES, f"{what}, or {_how_to_sign(bucket, rights)} ({shown})", uri)
    what = f"the storage failed ({shown})"
    failed = RequestFailedError(errno.EIO, f"{what}; check that this machine can reach {bucket}", uri)
    failed.code = next((code for part, code in _KINDS.items() if part in str(error)), FAILED)
    return failed


def _in_short(text: str) -> str:
    """The library's message, with the code and message of a server's document in place of the document."""
    said = ": ".join(found.strip() for _, found in _SAID.findall(text))
    before = re.split(r"<\?xml|<Error", text)[0].strip() if said else text
    return f"{before[:_MOST_SHOWN]} {said[:_MOST_SHOWN]}" if said else text[:_MOST_SHOWN]


def _how_to_sign(bucket: str, rights: str) -> str:
    scheme = bucket.partition("://")[0]
    names = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
    if scheme in S3:
        names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if scheme in GCS:
        names = "GOOGLE_APPLICATION_CREDENTIALS"
    kind = "AWS" if scheme in S3 else "GOOGLE" if scheme in GCS else "AZURE"
    public = f"; for a public bucket {kind}_SKIP_SIGNATURE=true" if rights == READING else ""
    return f"set {names} on every machine{public}"


# --------------------------------------------------------------------------------------------------- requests
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


# ------------------------------------------------------------------------- secrets in texts of other programs
SHOWN = "***"
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "GCS_", "GCP_")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|SAS|PASSWORD|CONNECTION_STRING")
_SHORTEST = 6  # a shorter value is no secret, and occurs in many words
_SIGNED = re.compile(
    r"""(?ix)
    (\b (?: sig | signature | x-(?:amz|goog)-(?:signature|credential|security-token) | sharedaccesssignature
          | awsaccesskeyid | accountkey | aws_secret_access_key | authorization ) \b
      (?: ["']?\s*[=:]\s*["']? | > ) (?: (?:bearer|sharedkey|aws4-hmac-sha256)\s+ )? )
    [^\s&;,"'<>]+
    """
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]+")


def redacted(text: str) -> str:
    """`text` with `***` in place of signatures, and of secrets in this process's environment.

    Secrets are recognized by the form of credentials, and by the names of variables.
    """
    for secret in _secrets():
        text = text.replace(secret, SHOWN).replace(quote(secret, safe=""), SHOWN)
    return _BEARER.sub(rf"\1{SHOWN}", _SIGNED.sub(rf"\1{SHOWN}", text))


def _secrets() -> list[str]:
    """Secrets, the longest first, because one may be a part of another."""
    found = set[str]()
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES) and _SECRET.search(name):
            found.add(value)
            found.update(part.partition("=")[2] for part in value.split(";"))
    return sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)
