"""Downloads small files of a bucket into a local folder, for libraries that read only files.

They are the files of a tokenizer, and the settings of a model. A location that is already a folder is used
directly.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from orchestrator.errors import StorageError
from orchestrator.storage.home import cache_folder, temporary_cache_folder
from orchestrator.storage.open import open_storage
from orchestrator.storage.sealed import canonical
from orchestrator.storage.tries import problem_code


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
    if _holds(folder, files):
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
    if not _holds(folder, files):
        raise StorageError(
            f"{folder} does not have the content that was written into it; delete it, and try again",
            code="storage.damaged_cache",
        )
    return folder


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    with suppress(OSError):
        return {path.name: path.read_bytes() for path in folder.iterdir()} == files
    return False
