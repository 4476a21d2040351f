"""Cuts a source's files into fragments and blocks, by arithmetic on the frozen list, which `read_list` reads.

`planning.order` determines when a block is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.sources.access.compressed import COMPRESSED
from orchestrator.data.sources.lists.file_rows import Cut, FilePart
from orchestrator.data.sources.lists.manifest import Manifest, from_parquet
from orchestrator.errors import DataIdentityError, OrchestratorError, StorageError
from orchestrator.records.tokens import Int64Array
from orchestrator.storage.files import Storage
from orchestrator.storage.home import cache_folder
from orchestrator.storage.open import is_bucket, join, open_storage


def read_list(storage: str, path: str, digest: str) -> Manifest:
    """The list at `path` of a run's storage.

    If that is a bucket, each user of a machine reads it once: `~/.cache/orchestrator/lists` (or in
    `XDG_CACHE_HOME`) keeps it under its digest. Raises `DataIdentityError` if it is missing, altered, or does
    not have that digest.
    """
    where = join(storage, path)
    cache = cache_folder()
    copy = cache / "lists" / f"{digest}.parquet" if cache is not None and is_bucket(storage) else None
    if copy is not None and (kept := _kept(copy, digest)) is not None:
        return kept
    try:
        data = open_storage(storage).read(path)
    except (OSError, StorageError) as error:
        raise DataIdentityError(
            f"{where}: the run's manifest cannot be read: {error}; restore it, or give this machine access "
            "to the run's storage",
            code="data.unreadable_list",
        ) from error
    manifest = from_parquet(data, where)
    if manifest.digest != digest:
        raise DataIdentityError(
            f"{where}: the run's manifest has digest {manifest.digest}, this process was started with "
            f"{digest}; restore the file",
            code="data.damaged_list",
        )
    if copy is not None:
        _keep(copy, data)
    return manifest


def _kept(copy: Path, digest: str) -> Manifest | None:
    """The cached list with that digest, if it is complete."""
    with suppress(OSError, OrchestratorError):
        manifest = from_parquet(copy.read_bytes(), str(copy))
        if manifest.digest == digest:
            return manifest
    return None


def _keep(copy: Path, data: bytes) -> None:
    """Caches the list. If that fails, each process reads the bucket."""
    part = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        copy.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(copy)


# Compressed text is estimated at this many times its size.
DECODED_RATIO = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SourcePlan:
    """A manifest cut into fragments, and these into blocks of `fragments_per_block` (data rule 8).

    `run_fragments[i]` and `run_files[i]` are the first fragment and the first file of run i. A run is either
    one file of several fragments, or several files joined to one fragment. Both arrays end with the totals,
    shape (num_runs + 1,). `reference` names the run's frozen list that the plan was made from, if there is
    one: the plan then pickles as that (see `PlanReference`), else with all its files.
    """

    manifest: Manifest
    run_fragments: Int64Array
    run_files: Int64Array
    fragments_per_block: int
    reference: PlanReference | None = None

    @property
    def source(self) -> str:
        """The source's name."""
        return self.manifest.source

    @property
    def num_fragments(self) -> int:
        """The number of fragments of the source."""
        return int(self.run_fragments[-1])

    @property
    def num_blocks(self) -> int:
        """The number of blocks of an epoch."""
        return -(-self.num_fragments // self.fragments_per_block)

    def fragments(self, block: int) -> range:
        """The numbers of a block's fragments; the last block may have fewer."""
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        start = block * self.fragments_per_block
        return range(start, min(start + self.fragments_per_block, self.num_fragments))

    def parts(self, fragment: int) -> tuple[FilePart, ...]:
        """The parts of a fragment, in reading order."""
        run = int(np.searchsorted(self.run_fragments, fragment, side="right")) - 1
        (first, end), (begin, after) = self.run_files[run : run + 2].tolist(), self._fragments_of(run)
        part, num, files = fragment - begin, after - begin, self.manifest.files
        if _has_units(self.manifest):
            return (FilePart(file=first, start=0, stop=files.bytes(first), group=part),)
        if num == 1:
            sizes = files.sizes[first:end].tolist()
            return tuple(FilePart(file=first + i, start=0, stop=size) for i, size in enumerate(sizes))
        size = files.bytes(first)
        return (FilePart(file=first, start=part * size // num, stop=(part + 1) * size // num),)

    def _fragments_of(self, run: int) -> tuple[int, int]:
        begin, after = self.run_fragments[run : run + 2].tolist()
        return begin, after

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SourcePlan):
            return NotImplemented
        mine, theirs = (
            (p.manifest, p.fragments_per_block, p.run_fragments.tolist(), p.run_files.tolist())
            for p in (self, other)
        )
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.manifest.digest, self.fragments_per_block))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reference is not None:
            return load_plan, (self.reference,)
        return _whole, (self.manifest, self.run_fragments, self.run_files, self.fragments_per_block)


def _whole(manifest: Manifest, fragments: Int64Array, files: Int64Array, per_block: int) -> SourcePlan:
    return SourcePlan(
        manifest=manifest, run_fragments=fragments, run_files=files, fragments_per_block=per_block
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReference:
    """A plan, by the place of its frozen list.

    `path` is the list's file in `storage`, a location for `open_storage`: the run's storage, which every
    process of a run can reach. `digest` is that of the manifest. `base` is where the files lie in this job.
    """

    storage: str
    path: str
    digest: str
    base: str
    fragment_bytes: int
    window_bytes: int


# A process has few sources, and needs each one's current list and the one before.
@lru_cache(maxsize=64)
def load_plan(reference: PlanReference) -> SourcePlan:
    """The plan that `reference` names, read once per process (a hundred thousand files: 0.2 s) and cached.

    Raises `DataIdentityError` if the frozen list is missing or altered.
    """
    manifest = read_list(reference.storage, reference.path, reference.digest)
    plan = plan_source(
        replace(manifest, base=reference.base), reference.fragment_bytes, reference.window_bytes
    )
    return replace(plan, reference=reference)


def frozen_at(
    plan: SourcePlan, storage: Storage, path: str, fragment_bytes: int, window_bytes: int
) -> SourcePlan:
    """The plan, which now pickles as a reference to the frozen list at `path` in `storage`.

    `fragment_bytes` and `window_bytes` are those that the plan was made with.
    """
    return replace(
        plan,
        reference=PlanReference(
            storage=storage.root,
            path=path,
            digest=plan.manifest.digest,
            base=plan.manifest.base,
            fragment_bytes=fragment_bytes,
            window_bytes=window_bytes,
        ),
    )


def plan_source(manifest: Manifest, fragment_bytes: int, window_bytes: int) -> SourcePlan:
    """Cuts a manifest into fragments.

    Plain lines are cut into ranges of about `fragment_bytes`. Each row group is a fragment. Small files are
    joined up to `fragment_bytes`. Any other file (compressed, or text) is one fragment.
    """
    files = manifest.files
    num = _num_fragments(manifest, fragment_bytes)
    alone = (num > 1) | _has_units(manifest)
    run_files = np.array([0, *_run_ends(files.sizes, alone, fragment_bytes)], np.int64)
    firsts = run_files[:-1]
    run_fragments = np.zeros(len(run_files), np.int64)
    np.cumsum(np.where(alone[firsts], num[firsts], 1), out=run_fragments[1:])
    total = int((files.group_sizes if _has_units(manifest) else files.sizes).sum())
    # K = max(1, window // (2 * mean)), with mean = total / fragments, in integers
    num_fragments = int(run_fragments[-1])
    per_block = max(1, window_bytes * num_fragments // (2 * max(1, total)))
    return SourcePlan(
        manifest=manifest,
        run_fragments=run_fragments,
        run_files=run_files,
        fragments_per_block=max(1, min(per_block, num_fragments)),
    )


def _run_ends(sizes: Int64Array, alone: npt.NDArray[np.bool_], fragment_bytes: int) -> Iterator[int]:
    """The end of each run. A file that is `alone` is a run; others are joined while they fit."""
    num_files = len(sizes)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    numbers = np.arange(num_files, dtype=np.int64)
    # a run that begins at file i ends before the first file that does not fit, or is alone
    full = np.maximum(np.searchsorted(ends, begins + fragment_bytes, side="right"), numbers + 1)
    lonely = np.append(np.flatnonzero(alone), num_files)
    next_alone = lonely[np.searchsorted(lonely, numbers, side="right").clip(max=len(lonely) - 1)]
    after = np.where(alone, numbers + 1, np.minimum(full, next_alone)).tolist()
    at = 0
    while at < num_files:
        at = after[at]
        yield at


def is_plain(manifest: Manifest, part: FilePart) -> bool:
    """Whether the part can be read from any byte on, or is one record."""
    streamed = part.group is not None or manifest.cut is Cut.STREAM
    return not (streamed or _is_compressed(manifest, part.file))


def decoded_bytes(manifest: Manifest, part: FilePart) -> int:
    """The approximate bytes of the part's records. The exact size of a compressed part shows only when it is
    read.
    """
    if part.group is not None:
        return manifest.files[part.file].group_bytes[part.group]
    return (part.stop - part.start) * (DECODED_RATIO if _is_compressed(manifest, part.file) else 1)


def _is_compressed(manifest: Manifest, file: int) -> bool:
    return manifest.files.path(file).endswith(COMPRESSED)


def _has_units(manifest: Manifest) -> bool:
    return manifest.cut is Cut.UNITS


def num_window_shuffled(plan: SourcePlan, window_bytes: int) -> int:
    """How many files lie in a block that decodes to more than a window and cannot be read from any byte on.

    Such files are compressed ones, and row groups.
    """
    files, per_block = plan.manifest.files, plan.fragments_per_block
    if _has_units(plan.manifest):
        starts = np.arange(0, plan.num_fragments, per_block)
        large = np.add.reduceat(files.group_sizes, starts) > window_bytes if len(starts) else starts > 0
        of_group = np.repeat(np.arange(len(files)), np.diff(files.group_ends))
        return len(np.unique(of_group[np.repeat(large, per_block)[: plan.num_fragments]]))
    compressed = files.paths_end(COMPRESSED)
    streamed = plan.manifest.cut is Cut.STREAM
    packed = compressed | streamed
    if not packed.any():
        return 0
    num, sizes, first = np.diff(plan.run_fragments), files.sizes, plan.run_files[:-1]
    begin, end = plan.run_fragments[:-1] // per_block, (plan.run_fragments[1:] - 1) // per_block
    decoded = np.add.reduceat(np.where(compressed, DECODED_RATIO, 1) * sizes, first)
    # of a file with several fragments, which is plain, only the first and the last block contain other files
    here = np.minimum(num, (begin + 1) * per_block - plan.run_fragments[:-1])
    in_first = np.where(num > 1, _cut(sizes[first], here, num), decoded)
    in_last = decoded - _cut(sizes[first], end * per_block - plan.run_fragments[:-1], num)
    blocks = np.zeros(plan.num_blocks, np.int64)
    np.add.at(blocks, begin, in_first)
    np.add.at(blocks, end[end > begin], in_last[end > begin])
    large = np.repeat((blocks > window_bytes)[begin], np.diff(plan.run_files))
    return int(np.count_nonzero(packed & large))


def _cut(size: Int64Array, part: Int64Array, num: Int64Array) -> Int64Array:
    """`part * size // num`, without overflow of the product."""
    return part * (size // num) + part * (size % num) // num


def _num_fragments(manifest: Manifest, fragment_bytes: int) -> Int64Array:
    """(num_files,) fragments of each file, if it were alone."""
    files = manifest.files
    cut = manifest.cut
    if cut is Cut.UNITS:
        return np.diff(files.group_ends)
    if cut is not Cut.RANGES:
        return np.ones(len(files), np.int64)
    num = np.maximum(1, -(-files.sizes // fragment_bytes))
    return np.where(files.paths_end(COMPRESSED), 1, num)
