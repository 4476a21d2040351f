"""The file system's facts about many names at once, as columns, and errors for names that are no files.

It opens no file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from orchestrator.data.sources.access.input_file import stretches_in_threads
from orchestrator.records.arrays import Int64Array

# A storage that answers a `stat` in this time is queried by one thread.
QUICK_STAT_S = 50e-6
_FACTS = ("st_mode", "st_dev", "st_ino", "st_size", "st_mtime_ns")
# The bits of a mode that hold the file type (`S_IFMT`).
_KIND = 0o170000
_MASK63 = (1 << 63) - 1
_facts_of = attrgetter(*_FACTS)
_Facts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """Facts about the targets of names, links followed, each (num_names,).

    They are the mode, the device and file numbers, the size and the modification time. All are 0 for names in
    `errors`, which holds the reason.
    """

    modes: Int64Array
    devices: Int64Array
    numbers: Int64Array
    sizes: Int64Array
    mtimes_ns: Int64Array
    errors: dict[int, OSError]

    @property
    def regular(self) -> npt.NDArray[np.bool_]:
        """(num_names,) whether each is a regular file."""
        return np.asarray(self.modes & _KIND == stat.S_IFREG)

    def take(self, which: npt.NDArray[np.bool_]) -> FileFacts:
        """The facts of the selected files."""
        columns = (self.modes, self.devices, self.numbers, self.sizes, self.mtimes_ns)
        modes, devices, numbers, sizes, mtimes_ns = (column[which] for column in columns)
        return FileFacts(
            modes=modes, devices=devices, numbers=numbers, sizes=sizes, mtimes_ns=mtimes_ns, errors={}
        )

    @property
    def all_differ(self) -> bool:
        """Whether all are certainly distinct files. Files with the same number, or none, may be one file."""
        order = np.lexsort((self.numbers, self.devices))
        device, number = self.devices[order], self.numbers[order]
        same = (device[1:] == device[:-1]) & (number[1:] == number[:-1])
        return bool(number.all()) and not bool(same.any())


def look_at(base: str, names: Sequence[str]) -> FileFacts:
    """The facts about names in a folder: one `stat` each."""
    looks = stretches_in_threads(partial(_look, os.path.join(base, "")), names, quick_s=QUICK_STAT_S)
    table = np.concatenate([part for part, _ in looks] or [np.empty((0, len(_FACTS)), np.int64)])
    errors, begin = dict[int, OSError](), 0
    for part, wrong in looks:
        errors |= {begin + i: error for i, error in wrong.items()}
        begin += len(part)
    modes, devices, numbers, sizes, mtimes_ns = np.ascontiguousarray(table.T)
    return FileFacts(
        modes=modes, devices=devices, numbers=numbers, sizes=sizes, mtimes_ns=mtimes_ns, errors=errors
    )


def _look(begin: str, names: Sequence[str]) -> tuple[Int64Array, dict[int, OSError]]:
    try:  # the common case
        return np.array([_facts_of(os.stat(begin + name)) for name in names], np.int64), {}
    except (OSError, OverflowError):
        pass
    facts, errors = list[_Facts](), dict[int, OSError]()
    for i, name in enumerate(names):
        try:
            mode, device, number, size, mtime_ns = _facts_of(os.stat(begin + name))
        except OSError as error:
            errors[i] = error
            facts.append((0,) * len(_FACTS))
        else:  # numbers of devices and files are unsigned in some file systems
            facts.append((mode, device & _MASK63, number & _MASK63, size, mtime_ns))
    return np.array(facts, np.int64), errors


def why_irregular(path: str, mode: int, error: OSError | None) -> str | None:
    """The error for a name that is not a file. None for a folder, and for a name that no longer exists."""
    if error is not None:
        if os.path.islink(path):
            return f"{path} is a link to {os.readlink(path)!r}, which is not there"
        gone = isinstance(error, FileNotFoundError)
        return None if gone else f"{path} cannot be looked at: {error.strerror}"
    return None if stat.S_ISDIR(mode) else f"{path} is a {_kind(mode)}"


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "special file")
