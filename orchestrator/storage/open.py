"""Opens the storage at a location from a configuration or command: a folder's path, or a bucket's URI.

Opening makes no requests. `check_bucket` tests before a launch whether a run can be kept in a bucket, with an
object that is deleted. `small_files` downloads small files of a bucket into a local folder, for libraries
that read only files: those of a tokenizer, and the settings of a model.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath

from blake3 import blake3

from orchestrator.errors import NoConditionalCreateError, StorageError
from orchestrator.json_form import canonical
from orchestrator.storage.buckets import no_conditional_create, split_bucket
from orchestrator.storage.files import Storage, installed_scheme, store_at
from orchestrator.storage.home import cache_folder, temporary_cache_folder
from orchestrator.storage.tries import problem_code


def is_bucket(location: str) -> bool:
    """Whether this names a bucket, a prefix in one, or a place of an installed scheme; not a folder."""
    return split_bucket(location) is not None or installed_scheme(location) is not None


def open_storage(location: str, *, sleep: Callable[[float], None] = time.sleep) -> Storage:
    """The storage at a folder's path (absolute or not, with `~`) or at a bucket's URI.

    URIs are `s3://bucket/prefix` (`gs://`, `az://` and their other names). Makes no request yet.
    `storage.buckets` documents the credentials. `sleep` waits between tries.

    Raises `ConfigError` for an empty text, a URI of another kind, a path that begins like a bucket's URI (a
    folder with such a name is `./s3:`), and a URI that contains credentials or options.
    """
    return Storage.on(store_at(location, sleep))


def absolute(location: str) -> str:
    """The same place in a form that means the same in every process.

    It is an absolute path, or a URI without a trailing slash. Raises as `open_storage`.
    """
    return open_storage(location).root


def join(location: str, *names: str) -> str:
    """A place in a folder, or below a prefix."""
    return "/".join((location.rstrip("/"), *names))


def split(location: str) -> tuple[str, str]:
    """The folder or prefix of a place, and its name there. A bucket itself has no name."""
    if "://" in location and location.rstrip("/").count("/") == _SLASHES_OF_A_BUCKET:
        return location.rstrip("/"), ""
    return os.path.split(location.rstrip("/") or "/")


def above(location: str) -> tuple[str, ...]:
    """All places above a place, the nearest first: the folders up to `/`, the prefixes up to the bucket."""
    if not is_bucket(location):
        return tuple(map(str, PurePath(location).parents))
    found, folder = list[str](), location
    while (outer := split(folder)[0]) != folder:
        found.append(folder := outer)
    return tuple(found)


_SLASHES_OF_A_BUCKET = 2


# -------------------------------------------------------------------------------------------- before a launch
PROBE = ".probe-"  # prefix of its name; one that is left by a kill is not part of a run


def check_bucket(storage: Storage) -> str:
    """Creates an object twice and deletes it, with about four requests.

    Returns a warning if the object cannot be deleted, else an empty text. Raises `NoConditionalCreateError`
    if the bucket creates a name that is taken (membership rule 9), and `StorageError` if it cannot be
    written.
    """
    name = f"{PROBE}{secrets.token_hex(8)}"
    try:
        created = [storage.create(f"{name}/a", data) for data in (b"1", b"2")]
    except NoConditionalCreateError as error:
        raise NoConditionalCreateError(f"run.storage: {error}") from error
    except StorageError as error:
        raise StorageError(f"run.storage cannot be written: {error}", code=error.code) from error
    finally:
        warning = _delete(storage, name)
    if created != [True, False]:
        raise NoConditionalCreateError(f"run.storage: {no_conditional_create(storage.root)}")
    return warning


def _delete(storage: Storage, name: str) -> str:
    try:
        storage.delete_folder(name)
    except StorageError as error:
        return (
            f"nothing can be deleted in run.storage ({error}), so that {name} stays there, and so do old "
            "resume points: storage fills up. Give this user the right to delete"
        )
    return ""


# ------------------------------------------------------------------------------------ small files in a folder
def small_files(location: str, wanted: Callable[[str], bool]) -> Path:
    """The folder at `location`. For a URI, a local folder with the files directly below it whose names are
    `wanted`.

    Every call reads all of them into memory. The local folder is `~/.cache/orchestrator/files/<digest>` (or
    in `XDG_CACHE_HOME`), named by the files' content and compared with it by every call. So it depends
    neither on their location nor on the process that downloaded them. If it cannot be written, or there is no
    home, a temporary folder of this process is used. Raises as `open_storage`, and `StorageError`.
    """
    storage = open_storage(location)
    if storage.folder is not None:
        return storage.folder
    names = [each.name for each in storage.listed("") if each.facts is not None and wanted(each.name)]
    return _kept({name: storage.read(name) for name in names})


def _kept(files: Mapping[str, bytes]) -> Path:
    digests = {name: blake3(data).hexdigest() for name, data in files.items()}
    name, cache = blake3(canonical(digests)).hexdigest(), cache_folder()
    if cache is not None:
        with suppress(StorageError):
            return _kept_in(cache / "files", name, files)
    return _kept_in(temporary_cache_folder(), name, files)


def _kept_in(cache: Path, digest: str, files: Mapping[str, bytes]) -> Path:
    folder = cache / digest
    if _has_content(folder, files):
        return folder
    part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    try:
        part.mkdir(parents=True)
        for name, data in files.items():
            (part / name).write_bytes(data)
        shutil.rmtree(folder, ignore_errors=True)  # other content: it was damaged
        with suppress(OSError):  # another process was first
            part.rename(folder)
    except OSError as error:
        raise StorageError(
            f"cannot keep {len(files)} small files of a bucket in {cache}: {error}; make room there, or set "
            "XDG_CACHE_HOME to another folder",
            code=problem_code(error),
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if not _has_content(folder, files):
        raise StorageError(
            f"{folder} does not have the content that was written into it; delete it, and try again",
            code="storage.damaged_cache",
        )
    return folder


def _has_content(folder: Path, files: Mapping[str, bytes]) -> bool:
    with suppress(OSError):
        return {path.name: path.read_bytes() for path in folder.iterdir()} == files
    return False
