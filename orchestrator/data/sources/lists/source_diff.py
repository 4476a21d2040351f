"""Compares the files of a frozen list with the current ones.

Names, sizes and times are compared first, contents only if these differ. `unchanged` decides about the
result.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.data.sources.access.in_threads import in_threads
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.access.object_stores import is_remote
from orchestrator.data.sources.formats import format_of
from orchestrator.data.sources.lists.file_facts import QUICK_STAT_S
from orchestrator.data.sources.lists.file_rows import FileRow
from orchestrator.data.sources.lists.listing import Listing
from orchestrator.data.sources.lists.manifest import ETAG, Manifest, difference, file_row
from orchestrator.errors import DataError


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
    if lost := format_of(manifest.format).lost(row, now):
        return None, f"{path}: {lost}"
    return now, f"{path}: {found}"
