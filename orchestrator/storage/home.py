"""The user's home and cache folders, on machines that may have none, and the results that are cached there.

Such machines have no HOME, a uid without a name, or a read-only home. A cache is optional: data that cannot
be cached are read or computed again.
"""

from __future__ import annotations

import atexit
import getpass
import os
import shutil
import sys
import tempfile
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

import orjson
from blake3 import blake3

from orchestrator.errors import ConfigError, OrchestratorError, StorageError
from orchestrator.json_form import decode, encode
from orchestrator.storage.tries import problem_code


def home() -> Path | None:
    """The user's home; None without HOME for a uid that the system's user database does not list."""
    try:
        return Path.home()
    except (RuntimeError, KeyError):
        return None


def ensure_home() -> None:
    """Sets a temporary home and a user name for this process and its children, if they have none.

    Ray and torch do not start without them.
    """
    if home() is None:
        os.environ["HOME"] = str(temporary_cache_folder())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"


def expanded(path: str, field: str = "") -> str:
    """`path` with its leading `~` replaced. `field` is its configuration field.

    Raises `ConfigError` if there is no such home: a folder with the actual name `~` is never meant.
    """
    found = os.path.expanduser(path)
    if path.startswith("~") and found == path:
        named = f"{field}={path}" if field else path
        raise ConfigError(
            f"{named}: this machine has no home folder for {path.partition('/')[0]!r} (uid {os.getuid()}, "
            f"HOME={os.environ.get('HOME', '')!r}); write the whole path, or set HOME",
            code="config.no_home",
        )
    return found


def cache_folder() -> Path | None:
    """The folder of this user's orchestrator caches.

    It is in `XDG_CACHE_HOME`, else in the operating system's cache folder in the user's home. None if there
    is neither. It may not be writable.
    """
    if usual := os.environ.get("XDG_CACHE_HOME"):
        return Path(usual) / "orchestrator"
    found = home()
    if found is None:
        return None
    return found / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "orchestrator"


@cache
def temporary_cache_folder() -> Path:
    """A folder of this process, deleted when it ends, for files that must be on this machine and cannot be
    cached.

    Raises `StorageError` if there is no room for one.
    """
    try:
        folder = tempfile.mkdtemp(prefix="orchestrator-files-")
    except OSError as error:
        raise StorageError(
            f"cannot make a temporary folder on this machine: {error}; make room, or set TMPDIR to another "
            "folder",
            code=problem_code(error),
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


# --------------------------------------------------------------------------------------------- cached results
Record = TypeVar("Record")
CACHE_VARIABLE = "ORCHESTRATOR_CACHE_DIR"
"""Environment variable: a folder instead of the user's default; empty: no cache."""


def remembered(kind: type[Record], content: list[object], find: Callable[[], Record]) -> Record:
    """The result of `find` (a flat dataclass), from the cache if an earlier process stored it completely.

    For facts that take seconds to compute and never change, such as those about a tokenizer. `content` holds
    everything that the result depends on, as JSON values. A file that is missing, damaged or cannot be
    written is no error: the result is then computed. A run does not depend on the cache, because it freezes
    its choices in its own folder.
    """
    folder = _folder()
    if folder is None:
        return find()
    key = blake3(orjson.dumps([kind.__name__, content], option=orjson.OPT_SORT_KEYS)).hexdigest()
    path = folder / f"{kind.__name__}-{key}.json"
    if path not in _held:
        while len(_held) >= _NUM_HELD:
            _held.pop(next(iter(_held)), None)
        _held[path] = _from_file(kind, path, find)
    return typing.cast(Record, _held[path])


# This process's most recent results, also if nothing can be written.
_held: dict[Path, object] = {}
_NUM_HELD = 16


def _from_file(kind: type[Record], path: Path, find: Callable[[], Record]) -> Record:
    try:
        kept = orjson.loads(path.read_bytes())
        if kept["check"] == _check(kept["value"]):
            return decode(kind, kept["value"])
    except (OSError, ValueError, KeyError, TypeError, OrchestratorError):
        pass  # missing or damaged: computed and written below
    found = find()
    value = encode(found)
    _write(path, orjson.dumps({"check": _check(value), "value": value}))
    return found


def _check(value: object) -> str:
    return blake3(orjson.dumps(value)).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Writes the file completely or not at all. A folder that is not writable is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        return


def _folder() -> Path | None:
    asked = os.environ.get(CACHE_VARIABLE)
    if asked is not None:
        return Path(asked) if asked else None
    return cache_folder()
