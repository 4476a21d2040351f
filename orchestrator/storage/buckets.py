"""Buckets of S3, Google Cloud Storage and Azure: how one is reached, and its errors in words.

One library, obstore, serves all three: it lists with sizes and etags, 1,000 objects a request, where
pyarrow.fs gives no etag (data rule 13 needs one) but by a request for each object; it creates exclusively,
which pyarrow.fs cannot; it needs no other Python package, where fsspec's s3fs, gcsfs and adlfs bring three
trees of them that pin each other's versions.

Credentials come from the usual places. S3: `AWS_ACCESS_KEY_ID` and its kin, a web identity, a container's or
an instance's role, else the keys of the profile `AWS_PROFILE` in `~/.aws/credentials` or `~/.aws/config` (a
profile without keys, such as one of SSO, needs boto3, which is asked for them). GCS:
`GOOGLE_APPLICATION_CREDENTIALS`, gcloud's own file, the metadata server. Azure:
`AZURE_STORAGE_CONNECTION_STRING`, or `AZURE_STORAGE_ACCOUNT_NAME` with `AZURE_STORAGE_ACCOUNT_KEY`, a SAS
token, or a managed identity. Another endpoint: `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`,
`STORAGE_EMULATOR_HOST`, `AZURE_STORAGE_ENDPOINT`. Public buckets: `AWS_SKIP_SIGNATURE`,
`GOOGLE_SKIP_SIGNATURE`, `AZURE_SKIP_SIGNATURE` = true. A server of S3 that deletes one object at a time only:
`AWS_DISABLE_BULK_DELETE` = true.
"""

from __future__ import annotations

import configparser
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

from orchestrator.errors import ConfigError

S3, GCS, AZURE = ("s3", "s3a"), ("gs", "gcs"), ("az", "azure", "abfs", "abfss")
SCHEMES = (*S3, *GCS, *AZURE)
# The library repeats what a server refuses for the moment, or what breaks off, for so long.
_RETRY: dict[str, Any] = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}
_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_SHOWN = 300
_OWN = (
    "ACCESS_KEY_ID",
    "WEB_IDENTITY_TOKEN_FILE",
    "SKIP_SIGNATURE",
    "CONTAINER_CREDENTIALS_RELATIVE_URI",
    "CONTAINER_CREDENTIALS_FULL_URI",
)


def split_bucket(uri: str) -> tuple[str, str] | None:
    """(the bucket's own URI, the key in it); None for what is no bucket of a known kind."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    return (f"{scheme}://{bucket}", key.strip("/")) if scheme in SCHEMES and bucket else None


# A process has few buckets; each keeps its connections.
@lru_cache(maxsize=32)
def bucket_of(bucket: str) -> Any:
    """The store of a bucket's own URI, made once per process. It asks nothing yet."""
    try:
        from obstore import store as stores
    except ImportError as error:
        raise ConfigError(
            f"{bucket}: reaching it needs the package obstore: pip install 'orchestrator[remote]' on "
            "every machine of the run"
        ) from error
    store: Any = stores
    scheme, _, name = bucket.partition("://")
    if scheme in S3:
        config = _s3_config()
        more = {"credential_provider": provider} if (provider := _s3_provider(config)) else {}
        return store.S3Store(name, config=config, client_options=_client(config), retry_config=_RETRY, **more)
    if scheme in GCS:
        config = _gcs_config()
        # an emulator believes everybody, and the library writes nothing without a token
        more = {"credential_provider": _nobodys_token} if config else {}
        return store.GCSStore(
            name, config=config, client_options=_client(config), retry_config=_RETRY, **more
        )
    config = _azure_config()
    container, _, host = name.partition("@")
    if host:
        config["account_name"] = host.partition(".")[0]
    return store.AzureStore(container, config=config, client_options=_client(config), retry_config=_RETRY)


def _client(config: dict[str, Any]) -> Any:
    plain = str(config.get("endpoint") or config.get("base_url") or "").startswith("http://")
    return {"allow_http": plain, "connect_timeout": "10s", "timeout": "120s"}


def _s3_config() -> dict[str, Any]:
    config: dict[str, Any] = {}
    if not _has_own_credentials():
        config |= _profile()
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        if os.environ.get(name):
            config["endpoint"] = os.environ[name]
    return config


def _has_own_credentials() -> bool:
    return any(os.environ.get(f"AWS_{name}") for name in _OWN)


def _profile() -> dict[str, Any]:
    """What the AWS command line's files say of the profile."""
    name, found = os.environ.get("AWS_PROFILE", "default"), dict[str, Any]()
    for variable, path in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        file = configparser.RawConfigParser()
        file.read(os.path.expanduser(os.environ.get(variable) or f"~/.aws/{path}"))
        for section in (f"profile {name}", name):
            if file.has_section(section):
                found |= {key: file.get(section, key) for key in file.options(section)}
    return {ours: found[theirs] for theirs, ours in _KEYS.items() if theirs in found}


def _s3_provider(config: dict[str, Any]) -> Any:
    """Who is asked for the keys of a profile that has none itself."""
    if not os.environ.get("AWS_PROFILE") or "access_key_id" in config or _has_own_credentials():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ConfigError(
            f"the AWS profile {os.environ['AWS_PROFILE']!r} has no access keys of its own; install boto3, "
            "which knows roles and SSO, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    return Boto3CredentialProvider()


def _gcs_config() -> dict[str, Any]:
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if not host:
        return {}
    return {"base_url": host if "://" in host else f"http://{host}"}


def _nobodys_token() -> dict[str, Any]:
    return {"token": "emulator", "expires_at": None}


def _azure_config() -> dict[str, Any]:
    pairs = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    given = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    names = {"AccountName": "account_name", "AccountKey": "account_key", "BlobEndpoint": "endpoint"}
    names["SharedAccessSignature"] = "sas_token"
    config: dict[str, Any] = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
    if os.environ.get("AZURE_STORAGE_ENDPOINT"):
        config["endpoint"] = os.environ["AZURE_STORAGE_ENDPOINT"]
    return config


# ---------------------------------------------------------------------------------------- errors
class NoBucketError(FileNotFoundError):
    """The bucket itself is not there: nothing is known of an object in it."""


@contextmanager
def explained(uri: str, rights: str = "list and read") -> Iterator[None]:
    """What the library raises about `uri`, as the `OSError` that a file of this machine would raise:
    `FileNotFoundError`, `PermissionError`, or another one; its text says what is wrong and what to do.
    `rights`: those that are needed there.
    """
    from obstore import exceptions

    try:
        yield
    except (exceptions.BaseError, FileNotFoundError, PermissionError) as error:
        raise _in_words(uri, rights, error) from error


def _in_words(uri: str, rights: str, error: Exception) -> OSError:
    from obstore import exceptions

    text = str(error).partition("\n\nDebug source")[0]
    at, shown = split_bucket(uri), text[:_SHOWN]
    bucket = at[0] if at else uri
    if any(word in text for word in ("NoSuchBucket", "ContainerNotFound", "specified bucket does not")):
        return NoBucketError(errno.ENOENT, "there is no such bucket at this endpoint", bucket)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such object", uri)
    if isinstance(error, exceptions.PreconditionError):
        return OSError(errno.ESTALE, "the object was replaced while it was read", uri)
    # a machine that is no cloud's has nobody at the address that gives a cloud's machines their credentials
    if any(word in text for word in ("169.254.", "/latest/api/token", "metadata.google", "redentials")):
        what = f"no credentials for {bucket} were found on this machine"
        return PermissionError(errno.EACCES, f"{what}; {_how_to_sign(bucket)} ({shown})", uri)
    denied = isinstance(error, PermissionError) or "status code: 401" in text or "status code: 403" in text
    if denied or isinstance(error, exceptions.UnauthenticatedError | exceptions.PermissionDeniedError):
        what = f"access to {bucket} is denied to these credentials: give them the rights to {rights} it"
        return PermissionError(errno.EACCES, f"{what}, or {_how_to_sign(bucket)} ({shown})", uri)
    return OSError(errno.EIO, f"the storage does not answer as it should ({shown})", uri)


def _how_to_sign(bucket: str) -> str:
    scheme = bucket.partition("://")[0]
    names = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
    if scheme in S3:
        names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if scheme in GCS:
        names = "GOOGLE_APPLICATION_CREDENTIALS"
    kind = "AWS" if scheme in S3 else "GOOGLE" if scheme in GCS else "AZURE"
    return f"set {names} on every machine; for a public bucket {kind}_SKIP_SIGNATURE=true"
