"""Compares the files of a frozen list with the current ones.

Names, sizes and times are compared first, contents only if these differ. `listing` resolves the paths, and
`manifest` compares a single file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.access.matches import QUICK_STAT_S, real_file
from orchestrator.data.sources.access.remote_stores import is_remote, same_revisions
from orchestrator.data.sources.lists.file_rows import FileRow
from orchestrator.data.sources.lists.listing import Listing, list_files, patterns_in, same_files
from orchestrator.data.sources.lists.manifest import ETAG, Manifest, changed_text, difference, file_row
from orchestrator.errors import ConfigError, DataError, DataIdentityError
from orchestrator.planning.resume.source_lists import files_text, restart_text
from orchestrator.storage.parallel import in_threads

if TYPE_CHECKING:
    from orchestrator.config.sections import SourceConfig

@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The current files at a manifest's base.

    `now` is the list without missing files. `changed` and `gone` are messages: how files differ, and which
    are missing or have fewer row groups than the run reads.
    """

    now: Manifest
    changed: tuple[str, ...]
    gone: tuple[str, ...]


def changes_since(manifest: Manifest, listing: Listing | None = None) -> Changes:
    """How the files at the manifest's base differ from it.

    A file with the same size and time is not opened (data rule 13). A file that `listing` has just seen at
    that base is not queried again. Raises `DataError` if a file cannot be queried or read.
    """
    suspects = [manifest.files[i] for i in _other_sizes_or_times(manifest, listing)]
    looks = in_threads(lambda row: _look(manifest, row), suspects)
    changed = {row.path: now for row, (now, text) in zip(suspects, looks, strict=True) if text is not None}
    return Changes(
        now=replace(manifest, files=manifest.files.replaced(changed)),
        changed=tuple(text for now, text in looks if now is not None and text is not None),
        gone=tuple(text for now, text in looks if now is None and text is not None),
    )


def _other_sizes_or_times(manifest: Manifest, listing: Listing | None) -> list[int]:
    """The numbers of the files whose size or time differs."""
    files, etags = manifest.files, listing.etags if listing is not None else ()
    known = listing is not None and listing.base == manifest.base
    if listing is not None and known and files.same_paths(listing.names) and not etags:
        other = (files.sizes != listing.sizes) | (files.mtimes_ns != listing.mtimes_ns)
        return [int(i) for i in np.flatnonzero(other)]
    signs: Iterable[_Sign] = files.probes if etags else files.mtimes_ns.tolist()
    then = zip(files.sizes.tolist(), signs, strict=True)
    seen = _seen(listing) if listing is not None and known else {}

    def now(path: str) -> tuple[int, _Sign] | None:
        if path in seen or is_remote(manifest.base):  # not listed by a bucket: missing or hidden
            return seen.get(path)
        return _size_and_time(os.path.join(manifest.base, path))

    found = in_threads(now, files.paths, quick_s=QUICK_STAT_S)
    return [i for i, (was, here) in enumerate(zip(then, found, strict=True)) if was != here]


_Sign = int | str


def _seen(listing: Listing) -> dict[str, tuple[int, _Sign]]:
    """For each name, its size, and its time or its bucket's identifier."""
    times: list[int] = listing.mtimes_ns.tolist()
    signs: Iterable[_Sign] = [ETAG + etag for etag in listing.etags] or times
    return dict(zip(listing.names, zip(listing.sizes.tolist(), signs, strict=True), strict=True))


def _size_and_time(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _look(manifest: Manifest, row: FileRow) -> tuple[FileRow | None, str | None]:
    """(the file's current row, None if it is missing; how it differs, None if it is the same)."""
    path = os.path.join(manifest.base, row.path)
    try:
        if not (is_remote(manifest.base) or stat.S_ISREG(os.stat(path).st_mode)):
            raise DataError(
                f"{path}: it is no longer a regular file; put the file back", code="data.irregular_file"
            )
        with open_input(manifest.base, row.path) as file:
            found = difference(row, file)
    except (FileNotFoundError, NotADirectoryError):
        return None, f"{path}: it had {row.bytes} bytes and is gone"
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error}; fix its permissions", code="data.unreadable_file"
        ) from error
    if found is None:
        return row, None
    now = file_row(manifest.base, manifest.format, manifest.content, row.path)
    if lost := manifest.form.lost(row, now):
        return None, f"{path}: {lost}"
    return now, f"{path}: {found}"


# --------------------------------------------------------------------------------------------- the job's path
def compare_files(
    source: SourceConfig,
    frozen: Manifest,
    paths: Sequence[str],
    accept_changed: bool,
    refreshed: bool = False,
) -> tuple[Manifest, Manifest, tuple[str, ...]]:
    """Checks that the path that a job names still means the files that its run was started with.

    Returns (the frozen list at that path, its current content there, notes).

    `paths` are the absolute paths that the run was started with, empty if they were not recorded.
    `refreshed`: the next epoch has its own list. Another folder with the same files is the same data.

    Raises `DataIdentityError` with both values if the path leaves out files of the run or means more than
    before, if files are missing, and, without `accept_changed`, if files have changed.
    """
    asked = (source.path,) if isinstance(source.path, str) else source.path
    at = frozen.base if same_revisions(asked, paths) else ""  # another revision is resolved
    listing = list_files(source.name, source.path, frozen.format, at)
    manifest = replace(frozen, base=listing.base)
    if not (frozen.form.has_files or frozen.files.same_paths(listing.names)):
        raise DataIdentityError(
            f"data.sources {frozen.source}: the run was started with path {', '.join(frozen.files.paths)}, "
            f"but the job has {', '.join(listing.names)}; restore the path, or {restart_text(frozen.source)}",
            code="data.other_path",
        )
    found = changes_since(manifest, listing)
    left_out, later = _other_names(frozen, found.now, listing)
    other_pattern = bool(paths) and patterns_in(frozen.base, paths) != listing.patterns
    if left_out or (later and other_pattern):
        raise DataIdentityError(_other_path(frozen, listing, paths, left_out, later), code="data.other_path")
    if found.gone or (found.changed and not accept_changed):
        text = changed_text(() if accept_changed else found.changed, found.gone, source=source.name)
        raise DataIdentityError(_other_folder(frozen, listing) + text, code=_code(found.gone))
    notes = _notes(listing, frozen, found.changed, later, refreshed)
    return manifest, found.now, (*listing.notes(source.name), *notes)


def find_unchanged(path: str | Sequence[str] | None, frozen: Manifest) -> Manifest:
    """The frozen list, with a base where its files are unchanged.

    The base is that of the path that the job names (None: it names none), or the one where they were listed.
    The path need not mean exactly these files now: a relative path does so in one folder only, and files that
    came later are not in the list.

    Raises `DataIdentityError` with both values for files that are changed or missing, at the base with the
    fewest.
    """
    bases = dict[str, Listing | None]()
    with suppress(ConfigError):
        if path is not None:
            listing = list_files(frozen.source, path, frozen.format, frozen.base)
            bases[listing.base] = listing
    bases.setdefault(frozen.base, None)
    wrong: list[tuple[Sequence[str], Sequence[str]]] = []
    for base, here in bases.items():
        manifest = replace(frozen, base=base)
        found = changes_since(manifest, here)
        if not (found.changed or found.gone):
            return manifest
        wrong.append((found.changed, found.gone))
    changed, gone = min(wrong, key=lambda each: len(each[0]) + len(each[1]))
    advice = (
        "an audit recomputes the stream from these files; put them back as they were when the run was started"
    )
    raise DataIdentityError(changed_text(changed, gone, advice), code=_code(gone))


def _code(gone: Sequence[str]) -> str:
    """The code of the error for changed files, and for missing ones."""
    return "data.missing_files" if gone else "data.changed_files"


def _other_names(frozen: Manifest, now: Manifest, listing: Listing) -> tuple[list[str], list[str]]:
    """(files of the run that still exist and are not listed, listed files that are not the run's)."""
    if frozen.files.same_paths(listing.names):
        return [], []
    here, then = set(now.files.paths), set(frozen.files.paths)
    known = then | {listing.others[name] for name in then if name in listing.others}
    left_out = _left_out(here.difference(listing.names, listing.others), listing)
    return left_out, sorted(set(listing.names) - known)


def _left_out(names: Iterable[str], listing: Listing) -> list[str]:
    """The names that lead to none of the listed files.

    Older versions also froze paths that are no longer listed, because a link in them leads back.
    """
    names = sorted(names)
    if is_remote(listing.base):
        return names
    listed = {real_file(os.path.join(listing.base, name)) for name in listing.names} if names else set()
    return [name for name in names if real_file(os.path.join(listing.base, name)) not in listed]


def _other_path(
    frozen: Manifest, listing: Listing, paths: Sequence[str], left_out: Sequence[str], later: Sequence[str]
) -> str:
    what = (
        f"leaves out {len(left_out)} of these {files_text(len(frozen.files))}, e.g. {left_out[0]}"
        if left_out
        else f"has {files_text(len(later))} more, e.g. {later[0]}"
    )
    return (
        f"data.sources {frozen.source}: the run was started with the {files_text(len(frozen.files))} of path "
        f"{', '.join(paths) or f'(not recorded, below {frozen.base})'}, but the job has "
        f"{', '.join(listing.paths)}, which {what}; restore the path, or {restart_text(frozen.source)}"
    )


def _other_folder(frozen: Manifest, listing: Listing) -> str:
    if listing.base == frozen.base:
        return ""
    return (
        f"data.sources {frozen.source} names another folder: the run was started with {frozen.base}, but the "
        f"job has {listing.base}, where "
    )


def _notes(
    listing: Listing, frozen: Manifest, changed: Sequence[str], later: Sequence[str], refreshed: bool
) -> list[str]:
    notes = [f"going on with a changed file (resume.accept_changed): {text}" for text in changed]
    if later:
        verb = "is" if len(later) == 1 else "are"
        then = "read from the next epoch on (data.refresh: epoch)" if refreshed else "not read"
        notes.append(
            f"{files_text(len(later))} of source {frozen.source} came after its list was made and {verb} "
            f"{then}, e.g. {later[0]}"
        )
    # each of the listed names is a distinct file
    same = frozen.files.same_paths(listing.names) or set(frozen.files.paths) <= set(listing.names)
    twice = {} if same else same_files(listing.base, frozen.files.paths)
    if twice:
        name = min(twice)
        notes.append(
            f"warning: the run was started with {len(twice)} paths of source {frozen.source} that lead to "
            f"files which it has under another path, too, e.g. {name} and {twice[name]}: it trains them again"
        )
    return notes
