"""Names below a local folder that match a pattern, as the standard library's `glob` finds them, each folder
listed once.

It knows no source and no format, and opens nothing.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache

RealFile = tuple[int | str, ...]
Parts = tuple[str, ...]


def real_file(path: str) -> RealFile:
    """What distinguishes the file or folder that a path leads to from all others: device and number, for a
    file size and time, too; its real path where the file system numbers nothing.
    """
    return real_of(path, os.stat(path))


def real_of(path: str, status: os.stat_result) -> RealFile:
    """`real_file`, given what `stat` says of it."""
    if status.st_ino == 0:
        return (os.path.realpath(path),)
    if stat.S_ISDIR(status.st_mode):
        return status.st_dev, status.st_ino
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def split_glob(full: str, separator: str = os.sep) -> tuple[str, str]:
    """(the folder before the first part with a wildcard, the rest). The rest is empty without a wildcard."""
    parts = full.split(separator)
    for i, part in enumerate(parts):
        if glob.has_magic(part):
            return separator.join(parts[:i]) or separator, separator.join(parts[i:])
    return os.path.dirname(full), ""


def fits(name: str, part: str) -> bool:
    """Whether a name is what a part of a pattern means; a hidden one is only what begins with a dot, too."""
    if part == "*":
        return not name.startswith(".")
    return _compiled(part)(name) is not None and (part.startswith(".") or not name.startswith("."))


@lru_cache(maxsize=256)
def _compiled(part: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(fnmatch.translate(part)).match


class Matches:
    """The names below `base` that match, with `/` between folders: as the standard library's `glob` finds
    them with `recursive=True`, but for links that lead back to a folder above: by these it finds every file
    forty times, or for ever.

    Of the paths to a folder that have a link in them only the first is followed for the same parts: folders
    that link to each other have as many paths as there are orders of them. `unlisted` says of each folder
    that cannot be listed why; `folders` are those that `**` looked into, by their names.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._linked = set[tuple[RealFile, Parts]]()
        self.unlisted: dict[str, str] = {}
        self.folders = set[str]()

    def of(self, parts: Parts) -> Iterator[str]:
        """What matches these parts of a pattern."""
        return self._below("", parts, frozenset(), False, None)

    def _below(
        self,
        prefix: str,
        parts: Parts,
        above: frozenset[RealFile],
        by_link: bool,
        entries: list[os.DirEntry[str]] | None,
    ) -> Iterator[str]:
        """Those in the folder `prefix` (empty, or ending with a separator), of which `entries` is the content
        where it was listed already.
        """
        part, rest = parts[0], parts[1:]
        if part == "**":
            entries = self._entries(prefix) if entries is None else entries
            yield from self._below(prefix, rest or ("*",), above, by_link, entries)
            if rest[:1] != ("**",):
                yield from self._deeper(prefix, parts, above, by_link, entries)
            return
        if not glob.has_magic(part):
            path = os.path.join(self._base, prefix + part)
            if not rest:
                if os.path.lexists(path):
                    yield prefix + part
            elif os.path.isdir(path):
                yield from self._below(
                    f"{prefix}{part}{os.sep}", rest, above, by_link or os.path.islink(path), None
                )
            return
        entries = self._entries(prefix) if entries is None else entries
        if not rest:
            yield from [prefix + entry.name for entry in entries if fits(entry.name, part)]
            return
        for entry in entries:
            if fits(entry.name, part) and _is_folder(entry):
                through = by_link or entry.is_symlink()
                yield from self._below(f"{prefix}{entry.name}{os.sep}", rest, above, through, None)

    def _deeper(
        self,
        prefix: str,
        parts: Parts,
        above: frozenset[RealFile],
        by_link: bool,
        entries: list[os.DirEntry[str]],
    ) -> Iterator[str]:
        folders = [entry for entry in entries if _is_folder(entry) and not entry.name.startswith(".")]
        if not folders:
            return
        self.folders.update(prefix + entry.name for entry in folders)
        above = above | {real_file(os.path.join(self._base, prefix))}
        # as whole paths are sorted: the first of the paths to a folder is the least
        for entry in sorted(folders, key=lambda entry: os.fsencode(entry.name) + b"/"):
            if (real := real_file(entry.path)) in above:
                continue
            if through := by_link or entry.is_symlink():
                if (real, parts) in self._linked:
                    continue
                self._linked.add((real, parts))
            yield from self._below(f"{prefix}{entry.name}{os.sep}", parts, above, through, None)

    def _entries(self, prefix: str) -> list[os.DirEntry[str]]:
        folder = os.path.join(self._base, prefix.rstrip(os.sep)) if prefix else self._base
        try:
            with os.scandir(folder) as found:
                return list(found)
        except NotADirectoryError:
            return []
        except OSError as error:
            self.unlisted[folder] = error.strerror or str(error)
            return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a ring of links
        return False
