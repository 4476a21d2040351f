"""The user's home and cache folders, on machines that may have none.

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
from functools import cache
from pathlib import Path

from orchestrator.errors import ConfigError, StorageError
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
