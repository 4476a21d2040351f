"""How the files of a frozen list differ from it now: names, sizes and times first, contents only where these
differ.

It says what it finds and decides nothing; `unchanged` does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.data.sources.file_rows import FileRow
from orchestrator.data.sources.in_threads import in_threads
from orchestrator.data.sources.listing import QUICK_STAT_S, Listing
from orchestrator.data.sources.manifest import Manifest, difference, file_row
from orchestrator.errors import DataError
from orchestrator.records import Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What lies at a manifest's base now: `now` is the list without the files that are gone; how files
    differ, and which are gone or have fewer row groups than the run reads, for people.
    """

    now: Manifest
    changed: tuple[str, ...]
    gone: tuple[str, ...]


def changes_since(manifest: Manifest, listing: Listing | None = None) -> Changes:
    """How the files at the manifest's base differ from it. A file whose size and time are the same is not
    opened (data rule 13), and one that `listing` has seen at that base just now is not asked for again.

    Raises `DataError` if one cannot be looked at or read.
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
    """The numbers of the files that are not plainly the same."""
    files = manifest.files
    names: Sequence[str] = ()
    if listing is not None and listing.base == manifest.base:
        if files.same_paths(listing.names):
            other = (files.sizes != listing.sizes) | (files.mtimes_ns != listing.mtimes_ns)
            return [int(i) for i in np.flatnonzero(other)]
        names = listing.names
    seen = dict(zip(names, _pairs(listing), strict=True)) if listing is not None and names else {}

    def now(path: str) -> tuple[int, int] | None:
        return seen.get(path) or _size_and_time(os.path.join(manifest.base, path))

    then = zip(files.sizes.tolist(), files.mtimes_ns.tolist(), strict=True)
    found = in_threads(now, files.paths, quick_s=QUICK_STAT_S)
    return [i for i, (was, here) in enumerate(zip(then, found, strict=True)) if was != here]


def _pairs(listing: Listing) -> Iterator[tuple[int, int]]:
    sizes: Int64Array = listing.sizes
    return zip(sizes.tolist(), listing.mtimes_ns.tolist(), strict=True)


def _size_and_time(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _look(manifest: Manifest, row: FileRow) -> tuple[FileRow | None, str | None]:
    """(the row as it would be now, None if it is gone; how it differs, None if it is the same)."""
    path = os.path.join(manifest.base, row.path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError(f"{path}: is no regular file any more; put the file back")
        with open(path, "rb") as file:
            found = difference(row, file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return None, f"{path}: it had {row.bytes} bytes and is gone"
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; fix its rights") from error
    if found is None:
        return row, None
    now = file_row(manifest.base, manifest.format, manifest.text_field, row.path)
    groups, left = len(row.group_rows), len(now.group_rows)
    if left < groups:
        return None, f"{path}: it had {groups} row groups and has {left}"
    return now, f"{path}: {found}"
