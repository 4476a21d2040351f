"""Checks whether the path that a job names still means the files that its run was started with.

`listing` resolves the path, `manifest` compares a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.data.sources.access.hub_datasets import same_revisions
from orchestrator.data.sources.access.matches import real_file
from orchestrator.data.sources.access.object_stores import is_remote
from orchestrator.data.sources.formats import format_of
from orchestrator.data.sources.lists.listing import Listing, list_files, patterns_in, same_files
from orchestrator.data.sources.lists.manifest import Manifest, changed_text
from orchestrator.data.sources.lists.source_diff import changes_since
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.planning.resume.restarting import files_text, restart_text

if TYPE_CHECKING:
    from orchestrator.config.data_sections import SourceConfig


def compare_files(
    source: SourceConfig,
    frozen: Manifest,
    paths: Sequence[str],
    accept_changed: bool,
    refreshed: bool = False,
) -> tuple[Manifest, Manifest, tuple[str, ...]]:
    """(the frozen list at the path that the job names, its current content there, notes).

    `paths` are the absolute paths that the run was started with, empty if they were not recorded.
    `refreshed`: the next epoch has its own list. Another folder with the same files is the same data.

    Raises `DataIdentityError` with both values if the path leaves out files of the run or means more than
    before, if files are missing, and, without `accept_changed`, if files have changed.
    """
    asked = (source.path,) if isinstance(source.path, str) else source.path
    at = frozen.base if same_revisions(asked, paths) else ""  # another revision is resolved
    listing = list_files(source.name, source.path, frozen.format, at)
    manifest = replace(frozen, base=listing.base)
    if not (format_of(frozen.format).has_files or frozen.files.same_paths(listing.names)):
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
