"""Resolves a source's paths (files, folders or globs, local or in a bucket) to files, each real file once.

It uses names and `stat`, and opens nothing.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from orchestrator.data.sources.access.input_file import BASE, CodeRecords
from orchestrator.data.sources.access.matches import (
    Matches,
    RealFile,
    RemoteMatches,
    look_at,
    real_file,
    remote_matches,
    split_glob,
    why_irregular,
)
from orchestrator.data.sources.access.remote_stores import is_hub, is_remote, pinned, split_hub, split_uri
from orchestrator.data.sources.formats import format_of
from orchestrator.errors import ConfigError
from orchestrator.records.tokens import Int64Array
from orchestrator.storage.home import expanded

_NAMED = 5
# Words in the names of a dataset's files.
_WORDS, _SPLITS = re.compile(r"[^a-z]+"), {"train", "test", "validation", "valid", "dev"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files that a source's paths mean now.

    `paths` are absolute. `base` is their folder without wildcards, for several paths their common folder.
    Names are relative to it and sorted by their bytes.

    `names` has each real file once: of several names for one file, the one without a link, of these the
    first. `sizes` and `mtimes_ns` (num_names,) belong to these files. `others` maps each omitted name to the
    name that is used. `irregular` has a message for each name that leads to no file, `unlisted` one for each
    folder that cannot be listed. In a bucket, `etags` (num_names) identify the objects. `passed_over` are the
    files in folders whose names do not match the format's (`called`).
    """

    paths: tuple[str, ...]
    base: str
    names: tuple[str, ...]
    others: dict[str, str]
    irregular: tuple[str, ...]
    unlisted: tuple[str, ...]
    sizes: Int64Array = field(compare=False)
    mtimes_ns: Int64Array = field(compare=False)
    etags: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = field(default=(), compare=False)
    called: str = field(default="", compare=False)

    def __contains__(self, name: str) -> bool:
        """Whether a name below this base leads to a file of the listing."""
        at = bisect_left(self.names, os.fsencode(name), key=os.fsencode)
        return self.names[at : at + 1] == (name,) or name in self.others

    @property
    def patterns(self) -> tuple[str, ...]:
        """The paths relative to their base: their meaning in any folder that the same files are moved to."""
        return patterns_in(self.base, self.paths)

    def names_by_folder(self) -> dict[str, dict[str, str]]:
        """For each path that is a folder: its files' names in it, each with the file's name in the
        listing.
        """
        found = dict[str, dict[str, str]]()
        for path in dict.fromkeys(self.paths):
            folder = path.rstrip("/")
            if is_hub(path) and self.paths == (path,) and not split_glob(path, "/")[1]:
                folder = self.base  # with the commit for the revision
            inner = f"{folder}/".removeprefix(f"{self.base}/")
            if f"{self.base}/{inner}" == f"{folder}/":
                found[folder] = {n.removeprefix(inner): n for n in self.names if n.startswith(inner)}
        return {folder: names for folder, names in found.items() if names}

    def notes(self, source: str) -> tuple[str, ...]:
        """Notes on special cases. `source` is the source's name."""
        notes = [f"source {source}: {text}; nothing in it is read" for text in self.unlisted]
        if self.others:
            name = min(self.others, key=os.fsencode)
            notes.append(
                f"source {source}: {len(self.others)} of {len(self.others) + len(self.names)} paths lead to "
                f"files that other paths lead to, e.g. {name} to {self.others[name]}; each file is read once"
            )
        if is_hub(self.base):
            at = split_hub(self.base)
            notes.append(
                f"source {source}: dataset {at.repo} of the hub is read at commit {at.revision}; what is "
                "pushed to it later is not"
            )
            splits = {word for name in self.names for word in _WORDS.split(name)} & _SPLITS
            if len(splits) > 1:
                notes.append(
                    f"warning: source {source}: by their names its {len(self.names)} files are of several "
                    f"splits ({', '.join(sorted(splits))}), and all are read; a glob that ends with "
                    "`**/*train*` names one"
                )
        notes += self._passed_over_notes(source)
        # a link's own name may be any bytes
        return tuple(note.encode(errors="backslashreplace").decode() for note in notes)

    def _passed_over_notes(self, source: str) -> Iterator[str]:
        """Names first a file whose name differs only in capitals: it was probably meant."""
        if not self.passed_over:
            return
        num, endings = len(self.passed_over), self.called.split()
        known = ", ".join(endings[:2]) + (", …" if endings[2:] else "")
        name = min(
            self.passed_over, key=lambda one: (not one.lower().endswith(tuple(endings)), os.fsencode(one))
        )
        which = f"{num:,} files in {self.base} are not read, e.g. {name}, because their names do not end"
        if num == 1:
            which = f"{name} in {self.base} is not read, because its name does not end"
        yield (
            f"source {source}: {which} with {known}; to have a file read, rename it or name it in "
            "data.sources[].path"
        )


def list_files(source: str, path: str | Sequence[str], format_: str, at: str = "") -> Listing:
    """The files that `path` means for `source`: one path or glob, or several.

    With several, names are relative to their common folder. Hidden files are left out. `at` is the base of an
    older list: a revision of a dataset on the hub keeps the meaning that it had then. A folder means
    everything below it whose name matches the format. Links are followed, except those that lead back to a
    folder above.

    Raises `ConfigError` if there are no files, if one of several paths has none, or if a name is not UTF-8.
    """
    paths = (path,) if isinstance(path, str) else tuple(path)
    if not format_of(format_).has_files:
        return _list_code(source, paths)
    if any(is_remote(one) for one in paths):
        return _list_remote(source, paths, format_, at)
    each = [_find(os.path.abspath(expanded(one, f"the path of source {source}")), format_) for one in paths]
    base = each[0].base if len(each) == 1 else os.path.commonpath([found.base for found in each])
    found = dict.fromkeys(name for one in each for name in one.names_in(base))
    unlisted = {folder: why for one in each for folder, why in one.unlisted.items()}
    full = tuple(one.path for one in each)
    passed_over = {name for one in each for name in one.in_base(base, one.passed_over)} - found.keys()
    listing = replace(
        _look(full, base, _sorted(found), unlisted),
        passed_over=tuple(passed_over),
        called=format_of(format_).called,
    )
    for one, asked in zip(each, paths, strict=True):
        if listing.irregular or any(name in listing for name in one.names_in(base)):
            continue
        raise ConfigError(
            f"data.sources {source}: no file matches {asked!r} (looked for {one.looked_for} in "
            f"{one.base}); relative paths are relative to the current folder; fix the path, or create the "
            "files",
            code="data.no_matching_file",
        )
    if not _is_utf8("".join(listing.names)):
        unnamed = next(name for name in listing.names if not _is_utf8(name))
        raise ConfigError(
            f"data.sources {source}: the file name {unnamed!r} in {base} is not UTF-8; rename the file",
            code="data.file_name_encoding",
        )
    return listing


def _list_code(source: str, paths: Sequence[str]) -> Listing:
    """The one virtual file of a source that is code."""
    if len(paths) != 1:
        raise ConfigError(
            f"data.sources {source}: path names {len(paths)} functions, {', '.join(paths)}; name one, and "
            "use a source for each",
            code="config.several_functions",
        )
    records = CodeRecords.anew(paths[0])
    return Listing(
        paths=tuple(paths),
        base=BASE,
        names=tuple(paths),
        others={},
        irregular=(),
        unlisted=(),
        sizes=np.array([records.size], np.int64),
        mtimes_ns=np.array([records.mtime_ns], np.int64),
        etags=(records.etag,),
    )


def _list_remote(source: str, paths: Sequence[str], format_: str, at: str) -> Listing:
    """The same for URIs: each object once, whatever paths lead to it."""
    if local := [one for one in paths if not is_remote(one)]:
        raise ConfigError(
            f"data.sources {source}: {local[0]} is a path of this machine and other paths are URIs; use one "
            "source for each storage",
            code="data.several_storages",
        )
    for one in paths:
        try:
            split_uri(one)
        except ConfigError as error:  # before anything repeats the URI: it may have a secret in it
            raise ConfigError(f"data.sources {source}: {error}", code=error.code) from error
    each = [_matches_of(source, path, format_) for path in _at_commits(source, paths, at)]
    bases = [found.base for found in each]
    levels = zip(*(base.split("/") for base in bases), strict=False)
    common = list(takewhile(lambda level: len(set(level)) == 1, levels))
    base = "/".join(level[0] for level in common)
    if any(len(common) < split_uri(base)[0].count("/") + 1 for base in bases):
        what = "datasets, or revisions of one" if is_hub(base) else "buckets"
        raise ConfigError(
            f"data.sources {source}: its paths lie in several {what}: {bases[0]} and {bases[-1]}; use one "
            "source for each",
            code="data.several_storages",
        )
    objects = {
        f"{found.base}/{name}".removeprefix(f"{base}/"): facts
        for found in each
        for name, facts in found.objects.items()
    }
    names = sorted(objects, key=os.fsencode)
    return Listing(
        paths=tuple(paths),
        base=base,
        names=tuple(names),
        others={},
        irregular=(),
        unlisted=(),
        sizes=np.array([objects[name].size for name in names], np.int64),
        mtimes_ns=np.array([objects[name].mtime_ns for name in names], np.int64),
        etags=tuple(objects[name].tag for name in names),
        passed_over=tuple(
            {f"{found.base}/{name}".removeprefix(f"{base}/") for found in each for name in found.passed_over}
            - objects.keys()
        ),
        called=format_of(format_).called,
    )


def _at_commits(source: str, paths: Sequence[str], at: str) -> Sequence[str]:
    """Paths of the hub with commits for their revisions. Other paths are unchanged."""
    if not all(is_hub(path) for path in paths):
        return paths
    try:
        return pinned(paths, at)
    except OSError as error:
        raise ConfigError(
            f"data.sources {source}: {', '.join(paths)} cannot be listed: {error.strerror}",
            code="data.unlistable_path",
        ) from error


def _matches_of(source: str, path: str, format_: str) -> RemoteMatches:
    try:
        found = remote_matches(path)
    except OSError as error:
        raise ConfigError(
            f"data.sources {source}: {path} cannot be listed: {error.strerror}", code="data.unlistable_path"
        ) from error
    if found.is_folder:
        kind, names = format_of(format_), [*found.objects]
        chosen = set(kind.choose(found.base, names))
        found = replace(
            found,
            objects={name: facts for name, facts in found.objects.items() if name in chosen},
            passed_over=tuple(kind.passed_over(names)),
            looked_for=f"{found.looked_for} ({kind.called})",
        )
    if not found.objects:
        raise ConfigError(
            f"data.sources {source}: no object matches {path!r} (looked for {found.looked_for} in "
            f"{found.base}); fix the path, or create the files",
            code="data.no_matching_file",
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """The matches of one path: names in its base, of files and of other things."""

    path: str
    base: str
    looked_for: str
    names: list[str]
    unlisted: dict[str, str]
    passed_over: list[str]

    def names_in(self, base: str) -> Iterable[str]:
        """The names relative to a folder above."""
        return self.in_base(base, self.names)

    def in_base(self, base: str, names: list[str]) -> Iterable[str]:
        """The given names relative to a folder above."""
        if base == self.base:
            return names
        inner = os.path.relpath(self.base, base)
        return (os.path.join(inner, name) for name in names)


def _find(full: str, format_: str) -> _Found:
    matches, looked_for, passed_over = Matches(full), "that file", list[str]()
    if os.path.isdir(full):
        base, looked_for = full, f"**/* ({format_of(format_).called})"
        every = list(matches.of(("**", "*")))
        files = [name for name in every if name not in matches.folders]
        names, passed_over = format_of(format_).choose(base, every), format_of(format_).passed_over(files)
    elif os.path.lexists(full):
        base, names = os.path.dirname(full), [os.path.basename(full)]
    else:
        base, pattern = split_glob(full)
        matches, looked_for = Matches(base), pattern or looked_for
        names = list(matches.of(tuple(pattern.split(os.sep)))) if pattern else []
    return _Found(
        path=full,
        base=base,
        looked_for=looked_for,
        names=names,
        unlisted=matches.unlisted,
        passed_over=passed_over,
    )


def patterns_in(base: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Paths relative to `base`, sorted."""
    return tuple(sorted({os.path.relpath(path, base) for path in paths}))


def require_regular(source: str, listing: Listing) -> None:
    """Raises `ConfigError` with the listed names that are no files."""
    if listing.irregular:
        num = len(listing.irregular)
        more = f"\n  and {num - _NAMED} more" if num > _NAMED else ""
        raise ConfigError(
            f"data.sources {source}: {num} matches of the path are not regular files:\n  "
            + "\n  ".join(listing.irregular[:_NAMED])
            + more
            + "\nremove them, or give a path that leaves them out",
            code="data.irregular_file",
        )


def same_files(base: str, names: Sequence[str]) -> dict[str, str]:
    """Names in `base` that lead to the same real file: maps each but one to the one to keep."""
    groups: dict[RealFile, list[str]] = {}
    for name in names:
        with suppress(OSError):
            groups.setdefault(real_file(os.path.join(base, name)), []).append(name)
    real, others = os.path.realpath(base), dict[str, str]()
    for group in groups.values():
        if len(group) > 1:
            direct = [n for n in group if os.path.realpath(os.path.join(real, n)) == os.path.join(real, n)]
            kept = min(direct or group, key=os.fsencode)
            others |= {name: kept for name in group if name != kept}
    return others


def _look(paths: tuple[str, ...], base: str, found: list[str], unlisted: dict[str, str]) -> Listing:
    facts, names, irregular = look_at(base, found), found, list[str]()
    regular = facts.regular
    if not regular.all():
        for i in np.flatnonzero(~regular).tolist():
            path = os.path.join(base, found[i])
            if wrong := why_irregular(path, int(facts.modes[i]), facts.errors.get(i)):
                irregular.append(wrong)
        names, facts = _marked(names, regular), facts.take(regular)
    others = dict[str, str]() if facts.all_differ else same_files(base, names)
    if others:
        first = np.array([name not in others for name in names])
        names, facts = _marked(names, first), facts.take(first)
    return Listing(
        paths=paths,
        base=base,
        names=tuple(names),
        sizes=facts.sizes,
        mtimes_ns=facts.mtimes_ns,
        others=others,
        irregular=tuple(irregular),
        unlisted=tuple(
            f"folder {folder} cannot be listed ({why})" for folder, why in sorted(unlisted.items())
        ),
    )


def _marked(names: Sequence[str], which: npt.NDArray[np.bool_]) -> list[str]:
    return [name for name, marked in zip(names, which.tolist(), strict=True) if marked]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sorted(names: Iterable[str]) -> list[str]:
    """Sorts by bytes, which for texts is the order of their characters."""
    found = list(names)
    return sorted(found, key=None if _is_utf8("".join(found)) else os.fsencode)
