"""Finds the names that match a pattern, as the standard library's `glob` does: local files, and objects.

Each local folder is listed once. A remote storage is asked for everything below the part of the pattern
without a wildcard. `look_at` has the file system's facts about many names at once. Nothing is opened.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from orchestrator.data.sources.access.remote_stores import RemoteStore, remote_store
from orchestrator.records.tokens import Int64Array
from orchestrator.storage.parallel import batches_in_threads
from orchestrator.storage.store import ObjectFacts

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
    """The matches of a URI: `objects` below `base`, by their names there.

    `looked_for` is the pattern, for messages. `is_folder`: all objects below are meant. `passed_over` are the
    names that do not match the format's.
    """

    base: str
    looked_for: str
    objects: Mapping[str, ObjectFacts]
    is_folder: bool = False
    passed_over: tuple[str, ...] = ()


def remote_matches(uri: str) -> RemoteMatches:
    """The objects that `uri` means, by the rules of local paths.

    They are an object of this name, else the matches of a pattern, else everything below it that is not
    hidden. One request for 1,000 objects below the part without a wildcard. Raises `OSError` with an
    explanation, `FileNotFoundError` if there is no such bucket.
    """
    store, key = remote_store(uri)
    full = f"{store.uri}/{key}"
    if key:
        with suppress(FileNotFoundError):
            base, _, name = full.rpartition("/")
            return RemoteMatches(base=base, looked_for="that object", objects={name: store.facts(key)})
    folder, pattern = split_glob(full, "/")
    if pattern:
        parts = tuple(pattern.split("/"))
        objects = {n: facts for n, facts in _below(store, folder) if name_fits(tuple(n.split("/")), parts)}
        return RemoteMatches(base=folder, looked_for=pattern, objects=objects)
    base = full.rstrip("/")
    visible = {
        n: facts for n, facts in _below(store, base) if not any(p.startswith(".") for p in n.split("/"))
    }
    return RemoteMatches(base=base, looked_for="**/*", objects=visible, is_folder=True)


def _below(store: RemoteStore, folder: str) -> Iterator[tuple[str, ObjectFacts]]:
    """(name in the folder, metadata) of every object below a folder of a store, which is a URI."""
    prefix = folder.removeprefix(store.uri).lstrip("/")
    begin = f"{prefix}/" if prefix else ""
    for key, facts in store.below(prefix):
        name = key.removeprefix(begin)
        if name and not name.endswith("/"):  # not a folder marker, which consoles create
            yield name, facts


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


# ------------------------------------------------------------------------------------------ facts about names
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
    looks = batches_in_threads(partial(_look, os.path.join(base, "")), names, quick_s=QUICK_STAT_S)
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
