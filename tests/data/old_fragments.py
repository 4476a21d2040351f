"""How a source's files are cut into fragments and blocks: arithmetic on the frozen list, nothing is read.

It knows no seed and no order; `planning.order` says when a block is read.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from orchestrator.data.sources.manifest import COMPRESSED, FileRow, Manifest

# Compressed text is reckoned at so many times its size.
DECODED_RATIO = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """A byte range of a file (lines that begin in it), a row group of it (`group`), or all of it."""

    file: int
    start: int
    stop: int
    group: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlan:
    """A manifest cut into fragments, and those into blocks of `fragments_per_block` (data rule 8).

    `run_fragments[i]` and `run_files[i]` are the first fragment and the first file of run i, where a run is
    either one file of several fragments or some files joined to one; both end with the totals.
    """

    manifest: Manifest
    run_fragments: tuple[int, ...]
    run_files: tuple[int, ...]
    fragments_per_block: int

    @property
    def source(self) -> str:
        """The source's name."""
        return self.manifest.source

    @property
    def num_fragments(self) -> int:
        """How many fragments the source has."""
        return self.run_fragments[-1]

    @property
    def num_blocks(self) -> int:
        """How many blocks an epoch has."""
        return -(-self.num_fragments // self.fragments_per_block)

    def fragments(self, block: int) -> range:
        """The numbers of a block's fragments; the last block may have fewer."""
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        start = block * self.fragments_per_block
        return range(start, min(start + self.fragments_per_block, self.num_fragments))

    def parts(self, fragment: int) -> tuple[FilePart, ...]:
        """What a fragment consists of, in reading order."""
        run = bisect_right(self.run_fragments, fragment) - 1
        first, end = self.run_files[run], self.run_files[run + 1]
        part, num = fragment - self.run_fragments[run], self.run_fragments[run + 1] - self.run_fragments[run]
        sizes = [row.bytes for row in self.manifest.files[first:end]]
        if self.manifest.format == "parquet":
            return (FilePart(file=first, start=0, stop=sizes[0], group=part),)
        if num == 1:
            return tuple(FilePart(file=first + i, start=0, stop=size) for i, size in enumerate(sizes))
        return (FilePart(file=first, start=part * sizes[0] // num, stop=(part + 1) * sizes[0] // num),)


def plan_source(manifest: Manifest, fragment_bytes: int, window_bytes: int) -> SourcePlan:
    """Cuts a manifest: ranges of about `fragment_bytes` of plain lines, one fragment per row group, small
    files joined up to it, and anything else (a compressed file, a text file) whole.
    """
    run_fragments, run_files = [0], [0]
    joined = 0  # bytes in the run that is still open
    for i, row in enumerate(manifest.files):
        num = _num_fragments(manifest.format, row, fragment_bytes)
        alone = manifest.format == "parquet" or num > 1
        if run_files[-1] < i and (alone or joined + row.bytes > fragment_bytes):
            run_fragments.append(run_fragments[-1] + 1)
            run_files.append(i)
            joined = 0
        joined += row.bytes
        if alone:
            run_fragments.append(run_fragments[-1] + num)
            run_files.append(i + 1)
            joined = 0
    if run_files[-1] < len(manifest.files):
        run_fragments.append(run_fragments[-1] + 1)
        run_files.append(len(manifest.files))
    total = sum(sum(f.group_bytes) if manifest.format == "parquet" else f.bytes for f in manifest.files)
    # K = max(1, window // (2 * mean)), with mean = total / fragments, in integers
    per_block = max(1, window_bytes * run_fragments[-1] // (2 * max(1, total)))
    return SourcePlan(
        manifest=manifest,
        run_fragments=tuple(run_fragments),
        run_files=tuple(run_files),
        fragments_per_block=max(1, min(per_block, run_fragments[-1])),
    )


def is_plain(manifest: Manifest, part: FilePart) -> bool:
    """Whether the part's bytes can be read from any place on."""
    return part.group is None and not manifest.files[part.file].path.endswith(COMPRESSED)


def decoded_bytes(manifest: Manifest, part: FilePart) -> int:
    """About how many bytes of records the part holds: what a compressed one really holds shows when it is
    read.
    """
    row = manifest.files[part.file]
    if part.group is not None:
        return row.group_bytes[part.group]
    return (part.stop - part.start) * (1 if is_plain(manifest, part) else DECODED_RATIO)


def _num_fragments(format_: str, row: FileRow, fragment_bytes: int) -> int:
    if format_ == "parquet":
        return len(row.group_rows)
    if format_ == "text" or row.path.endswith(COMPRESSED):
        return 1
    return max(1, -(-row.bytes // fragment_bytes))
