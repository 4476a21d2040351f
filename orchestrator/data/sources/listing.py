"""Which files a source's path means: a file, a folder or a glob, and each real file once.

It looks at names and at what the file system says of them, and opens nothing.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.errors import ConfigError

# What a folder's files of a format are called; text and lines take every file that is not hidden.
_SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
    "text": ("",),
    "lines": ("",),
}
_NAMED = 5
RealFile = tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What a path means now. `path` is absolute, `base` its folder without wildcards; names are relative to
    that and sorted by their bytes.

    `names` has each real file once: of several names that lead to one, the one without a link, of these the
    first. `others` maps each name left out to the one that is taken. `irregular` says of each name that leads
    to no file what is wrong with it, `unlisted` of each folder why nothing in it is known.
    """

    path: str
    base: str
    names: tuple[str, ...]
    others: dict[str, str]
    irregular: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """The path within its base: what it means of any folder that the same files are moved to."""
        return os.path.relpath(self.path, self.base)

    def notes(self, source: str) -> tuple[str, ...]:
        """What is special about it, in sentences; `source` is the source's name."""
        notes = [f"source {source}: {text}; nothing in it is read" for text in self.unlisted]
        if self.others:
            name = min(self.others, key=os.fsencode)
            notes.append(
                f"source {source}: {len(self.others)} of {len(self.others) + len(self.names)} paths lead to "
                f"files that other paths lead to, e.g. {name} to {self.others[name]}; each file is read once"
            )
        # a link's own name may be any bytes
        return tuple(note.encode(errors="backslashreplace").decode() for note in notes)


def list_files(source: str, path: str | tuple[str, ...], format_: str) -> Listing:
    """The files that `path` means for `source`; hidden ones are left out.

    A folder means all that lies below it and is called as its format's files are. Links are followed, but
    none that leads back to a folder on the way to it. Raises `ConfigError` if there are no files, or a name
    is not UTF-8.
    """
    if not isinstance(path, str):
        raise ConfigError(f"data.sources {source}: a list of paths is not in this version; give one")
    full = os.path.abspath(os.path.expanduser(path))
    unlisted: dict[str, str] = {}
    if os.path.isdir(full):
        base, pattern = full, f"**/* ({' '.join(_SUFFIXES[format_]).strip() or 'every file'})"
        found = [p for p in _matches(base, ("**", "*"), unlisted) if p.endswith(_SUFFIXES[format_])]
    elif os.path.lexists(full):
        base, pattern, found = os.path.dirname(full), "", [os.path.basename(full)]
    else:
        base, pattern = _split_glob(full)
        found = list(_matches(base, tuple(pattern.split(os.sep)), unlisted)) if pattern else []
    listing = _look(full, base, sorted(set(found), key=os.fsencode), unlisted)
    if not listing.names and not listing.irregular:
        raise ConfigError(
            f"data.sources {source}: no file matches {path!r} (looked for {pattern or 'that file'} in "
            f"{base}); relative paths are relative to the current folder; fix the path, or make the files"
        )
    unnamed = [p for p in listing.names if not _is_utf8(p)]
    if unnamed:
        raise ConfigError(
            f"data.sources {source}: the name of {unnamed[0]!r} in {base} is not UTF-8; rename the file"
        )
    return listing


def require_regular(source: str, listing: Listing) -> None:
    """Raises `ConfigError` naming what is listed and is no file."""
    if listing.irregular:
        num = len(listing.irregular)
        more = f"\n  and {num - _NAMED} more" if num > _NAMED else ""
        raise ConfigError(
            f"data.sources {source}: of what the path means, {num} are no regular files:\n  "
            + "\n  ".join(listing.irregular[:_NAMED])
            + more
            + "\nremove them, or give a path that leaves them out"
        )


def same_files(base: str, names: Sequence[str]) -> dict[str, str]:
    """Of several names in `base` that lead to one real file: each but the one to keep, and that one."""
    found = {}
    for name in names:
        with suppress(OSError):
            found[name] = real_file(os.path.join(base, name))
    return _others(base, found)


def _others(base: str, files: Mapping[str, RealFile]) -> dict[str, str]:
    """`same_files`, given what each name leads to."""
    groups: dict[RealFile, list[str]] = {}
    for name, file in files.items():
        groups.setdefault(file, []).append(name)
    real, others = os.path.realpath(base), dict[str, str]()
    for group in groups.values():
        if len(group) > 1:
            direct = [n for n in group if os.path.realpath(os.path.join(real, n)) == os.path.join(real, n)]
            kept = min(direct or group, key=os.fsencode)
            others |= {name: kept for name in group if name != kept}
    return others


def _look(path: str, base: str, found: list[str], unlisted: dict[str, str]) -> Listing:
    files, irregular = dict[str, RealFile](), []
    for name in found:
        full = os.path.join(base, name)
        try:
            status = os.stat(full)
        except OSError as error:
            if os.path.islink(full):
                irregular.append(f"{full} is a link to {os.readlink(full)!r}, which is not there")
            elif not isinstance(error, FileNotFoundError):
                irregular.append(f"{full} cannot be looked at: {error.strerror}")
            continue
        if stat.S_ISREG(status.st_mode):
            files[name] = _real(full, status)
        elif not stat.S_ISDIR(status.st_mode):
            irregular.append(f"{full} is a {_kind(status.st_mode)}")
    others = _others(base, files)
    return Listing(
        path=path,
        base=base,
        names=tuple(name for name in files if name not in others),
        others=others,
        irregular=tuple(irregular),
        unlisted=tuple(
            f"folder {folder} cannot be listed ({why})" for folder, why in sorted(unlisted.items())
        ),
    )


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "special file")


# ---------------------------------------------------------------------------------------- globs
def _split_glob(full: str) -> tuple[str, str]:
    """(the folder before the first part with a wildcard, the rest). The rest is empty without a wildcard."""
    parts = full.split(os.sep)
    for i, part in enumerate(parts):
        if glob.has_magic(part):
            return os.sep.join(parts[:i]) or os.sep, os.sep.join(parts[i:])
    return os.path.dirname(full), ""


def _matches(
    folder: str,
    parts: tuple[str, ...],
    unlisted: dict[str, str],
    above: frozenset[RealFile] = frozenset(),
    linked: set[tuple[RealFile, tuple[str, ...]]] | None = None,
    by_link: bool = False,
) -> Iterator[str]:
    """Names below `folder` that match, as the standard library's `glob` finds them with `recursive=True`, but
    for links that lead back to a folder `above`: by these it finds every file forty times, or for ever.

    Of the paths to a folder that have a link in them only the first is followed for the same parts (they are
    added to `linked`): folders that link to each other have as many paths as there are orders of them.
    """
    part, rest = parts[0], parts[1:]
    linked = set() if linked is None else linked
    if part == "**":
        yield from _matches(folder, rest or ("*",), unlisted, above, linked, by_link)
        if rest[:1] != ("**",):
            above = above | {real_file(folder)}
            # as whole paths are sorted: the first of the paths to a folder is the least
            for name in sorted(_names(folder, unlisted), key=lambda name: os.fsencode(name) + b"/"):
                inner = os.path.join(folder, name)
                if name.startswith(".") or not os.path.isdir(inner) or (real := real_file(inner)) in above:
                    continue
                if through := by_link or os.path.islink(inner):
                    if (real, parts) in linked:
                        continue
                    linked.add((real, parts))
                found = _matches(inner, parts, unlisted, above, linked, through)
                yield from (os.path.join(name, n) for n in found)
        return
    for name in _names(folder, unlisted) if glob.has_magic(part) else [part]:
        inner = os.path.join(folder, name)
        if glob.has_magic(part) and not _fits(name, part):
            continue
        if not rest:
            if os.path.lexists(inner):
                yield name
        elif os.path.isdir(inner):
            through = by_link or os.path.islink(inner)
            found = _matches(inner, rest, unlisted, above, linked, through)
            yield from (os.path.join(name, n) for n in found)


def real_file(path: str) -> RealFile:
    """What distinguishes the file or folder that a path leads to from all others: device and number, for a
    file size and time, too; its real path where the file system numbers nothing.
    """
    return _real(path, os.stat(path))


def _real(path: str, status: os.stat_result) -> RealFile:
    if status.st_ino == 0:
        return (os.path.realpath(path),)
    if stat.S_ISDIR(status.st_mode):
        return status.st_dev, status.st_ino
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _fits(name: str, part: str) -> bool:
    return fnmatch.fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))


def _names(folder: str, unlisted: dict[str, str]) -> list[str]:
    try:
        return os.listdir(folder)
    except NotADirectoryError:
        return []
    except OSError as error:
        unlisted[folder] = error.strerror or str(error)
        return []


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
