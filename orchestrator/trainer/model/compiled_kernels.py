"""The kernels that `torch.compile` has made: where this machine keeps them, and copies for other machines.

They are machine code and pickles, which run when they are read. So they lie in a folder that only this user
can read or write, and travel only between processes of one launch, never into a run's storage or out of it.
A process finds what an earlier process on its machine has compiled, and a newcomer on another machine begins
with a copy. No copy changes what is computed: torch compiles what none of them has.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

import torch

_log = logging.getLogger(__name__)
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # read by torch whenever it compiles
MAX_BYTES = 64 << 20  # of a copy


def keep_privately() -> None:
    """Lets torch keep compiled kernels in a folder of this user (mode 0700) below that of temporary files.

    Nothing is changed if the user has named a folder (`TORCHINDUCTOR_CACHE_DIR`). A folder that others could
    have written to is not used: the kernels then go to a new one, and are found by this process only.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(_FOLDER, default_cache_dir()) != default_cache_dir():  # torch itself sets the default
        return
    folder = Path(tempfile.gettempdir(), f"orchestrator-kernels-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not _is_private(found):
            mode = stat.filemode(found.st_mode)
            raise PermissionError(f"{folder} belongs to the user {found.st_uid}, and has the mode {mode}")
    except OSError as error:
        _log.warning("compiled kernels are kept for this process only: %s", error)
        folder = Path(tempfile.mkdtemp(prefix="orchestrator-kernels-"))
    os.environ[_FOLDER] = str(folder)


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def copies() -> bytes | None:
    """Returns what this process has compiled or found, for `take`. None if that is nothing, or too much."""
    try:
        found = torch.compiler.save_cache_artifacts()
    except Exception as error:  # noqa: BLE001  other machines compile anew
        _log.warning("compiled kernels cannot be copied: %s", error)
        return None
    if found is None:
        return None
    data, _ = found
    if len(data) > MAX_BYTES:
        _log.warning("other machines compile anew: the kernels take %d bytes, of %d", len(data), MAX_BYTES)
        return None
    return data


def take(data: bytes) -> None:
    """Puts copies of another process of this launch where torch looks for kernels. To be called before the
    first step.
    """
    keep_privately()
    try:
        torch.compiler.load_cache_artifacts(data)
    except Exception as error:  # noqa: BLE001  torch compiles anew
        _log.warning("kernels of another machine cannot be used: %s", error)
