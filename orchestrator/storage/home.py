"""The user's home and cache folders, on machines where there may be none: no HOME, a uid without a name, a
read-only home.

A cache is never needed: what cannot be kept is read or computed again.
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


def home() -> Path | None:
    """The user's home; None without HOME for a uid that the system's user database does not list."""
    try:
        return Path.home()
    except (RuntimeError, KeyError):
        return None


def ensure_home() -> None:
    """Gives this process and those it starts a home, which is temporary, and a user name, where they have
    none: Ray and torch do not start without them.
    """
    if home() is None:
        os.environ["HOME"] = str(temporary_cache_folder())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"


def expanded(path: str, field: str = "") -> str:
    """`path` with its leading `~` replaced. `field` is the configuration field that gives it.

    Raises `ConfigError` where there is no such home: a folder that is really called `~` is never meant.
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
    """The folder in which this user's caches of orchestrator are: `XDG_CACHE_HOME`, else that of the
    operating system in the user's home. None where there is neither. It may not be writable.
    """
    if usual := os.environ.get("XDG_CACHE_HOME"):
        return Path(usual) / "orchestrator"
    found = home()
    if found is None:
        return None
    return found / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "orchestrator"


@cache
def temporary_cache_folder() -> Path:
    """A folder of this process, deleted when it ends, for files that must be on this machine where no cache
    can keep them. Raises `StorageError` where there is no room for one either.
    """
    try:
        folder = tempfile.mkdtemp(prefix="orchestrator-files-")
    except OSError as error:
        raise StorageError(
            f"cannot make a temporary folder on this machine: {error}; make room, or name another folder by "
            "TMPDIR"
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
