"""Finds the names that match a pattern, as the standard library's `glob` does: local files, and objects.

Each local folder is listed once. A remote storage is asked for everything below the part of the pattern
without a wildcard. Nothing is opened.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from orchestrator.data.sources.access.remote_stores import RemoteObject, split_uri, store_of

RealFile = tuple[int | str, ...]
Parts = tuple[str, ...]


def real_file(path: str) -> RealFile:
    """An identifier of the file or folder that a path leads to.

    It is the device and file number, for a file also size and time. It is the real path if the file system
    has no file numbers.
    """
    return real_of(path, os.stat(path))


def real_of(path: str, status: os.stat_result) -> RealFile:
    """`real_file`, with the result of `stat`."""
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
    """Whether a name matches a part of a pattern. A hidden name matches only a part that begins with a
    dot.
    """
    if part == "*":
        return not name.startswith(".")
    return _compiled(part)(name) is not None and (part.startswith(".") or not name.startswith("."))


@lru_cache(maxsize=256)
def _compiled(part: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(fnmatch.translate(part)).match


class Matches:
    """The names below `base` that match, with `/` between folders.

    They are those of the standard library's `glob` with `recursive=True`, except that links to a folder above
    are not followed. Through such links, `glob` finds every file forty times, or never ends.

    Of several paths with a link to the same folder, only the first is followed for the same parts: folders
    that link to each other have as many paths as there are orders of them. `unlisted` maps each folder that
    cannot be listed to the reason. `folders` are the names of the folders that `**` searched.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._linked = set[tuple[RealFile, Parts]]()
        self.unlisted: dict[str, str] = {}
        self.folders = set[str]()

    def of(self, parts: Parts) -> Iterator[str]:
        """The names that match these parts of a pattern."""
        return self._below("", parts, frozenset(), False, None)

    def _below(
        self,
        prefix: str,
        parts: Parts,
        above: frozenset[RealFile],
        by_link: bool,
        entries: list[os.DirEntry[str]] | None,
    ) -> Iterator[str]:
        """The matches in the folder `prefix` (empty, or ending with a separator).

        `entries` is the folder's content if it was listed already.
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
        # in the order of whole paths: the first of the paths to a folder is the least
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
    except OSError:  # a cycle of links
        return False


# -------------------------------------------------------------------------------------------- remote storages
@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteMatches:
    """The matches of a URI: `objects` below `base`.

    `looked_for` is the pattern, for messages. `is_folder`: all objects below are meant. `passed_over` are the
    names that do not match the format's.
    """

    base: str
    looked_for: str
    objects: tuple[RemoteObject, ...]
    is_folder: bool = False
    passed_over: tuple[str, ...] = ()


def remote_matches(uri: str) -> RemoteMatches:
    """The objects that `uri` means, by the rules of local paths.

    They are an object of this name, else the matches of a pattern, else everything below it that is not
    hidden. One request for 1,000 objects below the part without a wildcard. Raises `OSError` with an
    explanation, `FileNotFoundError` if there is no such bucket.
    """
    bucket, key = split_uri(uri)
    store = store_of(uri)
    whole = store.head(uri) if key else None
    if whole is not None:
        base, _, name = f"{bucket}/{key}".rpartition("/")
        return RemoteMatches(base=base, looked_for="that object", objects=(replace(whole, name=name),))
    folder, pattern = split_glob(f"{bucket}/{key}", "/")
    if pattern:
        parts = tuple(pattern.split("/"))
        objects = tuple(o for o in store.below(folder) if name_fits(tuple(o.name.split("/")), parts))
        return RemoteMatches(base=folder, looked_for=pattern, objects=objects)
    base = f"{bucket}/{key}".rstrip("/")
    visible = tuple(o for o in store.below(base) if not any(p.startswith(".") for p in o.name.split("/")))
    return RemoteMatches(base=base, looked_for="**/*", objects=visible, is_folder=True)


def name_fits(name: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether a name, split into parts, matches a pattern.

    `**` matches any number of folders, also none, but no hidden folder.
    """
    if not parts or not name:
        return not parts and not name
    if parts[0] != "**":
        return fits(name[0], parts[0]) and name_fits(name[1:], parts[1:])
    rest = parts[1:] or ("*",)
    deepest = next((i for i, part in enumerate(name) if part.startswith(".")), len(name))
    return any(name_fits(name[skipped:], rest) for skipped in range(deepest + 1))
