"""What an epoch holds whatever its order: the second half of an audit, which needs neither order nor packer.

`tally_files` reads whole files, one behind the other; `Tallies` count what came by in the stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from xxhash import xxh3_64

from orchestrator.data.chunks import tokenize_windows
from orchestrator.data.readers import read_files
from orchestrator.data.sources import Window
from orchestrator.data.spec import DataSpec
from orchestrator.plan.encoders import EncoderChoice, EncoderSpan
from orchestrator.records import BAD, EMPTY, Int64Array, TokenChunk, WindowTask


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """`documents` are those with text. The digests are sums modulo 2^64 over these, of the xxh3_64 of (file,
    place), and of (file, place, tokens with BOS and EOS): little-endian, int64 twice and int32.
    """

    documents: int = 0
    empty: int = 0
    bad: int = 0
    places: int = 0
    tokens: int = 0
    digest: int = 0

    def without_tokens(self) -> Tally:
        """What it says of documents only."""
        return replace(self, tokens=0, digest=0)

    def __str__(self) -> str:
        tokens = f", {self.tokens:,} tokens, sum of digests {self.digest:016x}" if self.tokens else ""
        return (
            f"{self.documents:,} documents, {self.empty:,} empty and {self.bad:,} bad ones, sum of places "
            f"{self.places:016x}{tokens}"
        )


class Tallies:
    """What the epochs hold of a stream whose chunks come by, from any place on."""

    def __init__(self) -> None:
        self._epochs: dict[int, Tally] = defaultdict(Tally)
        self._records: dict[int, _Records] = defaultdict(_Records)
        self._hasher: Any = xxh3_64()

    def watch(self, chunks: Iterable[TokenChunk]) -> Iterator[TokenChunk]:
        """The same chunks, counted."""
        for chunk in chunks:
            self._count(chunk)
            self._records[chunk.epoch].add(chunk)
            yield chunk

    def of(self, epoch: int) -> Tally:
        """What of this epoch has come by; whole documents, if it came by from its begin on."""
        return self._epochs[epoch]

    def twice(self, epoch: int) -> tuple[int, int] | None:
        """(file, place) of a record of this epoch that came by twice, None if there is none."""
        return self._records[epoch].twice()

    def _count(self, chunk: TokenChunk) -> None:
        documents = places = digest = start = 0
        tokens = np.ascontiguousarray(chunk.tokens, dtype="<i4")
        origins = np.stack([chunk.file, chunk.place], axis=1).astype("<i8")
        columns = (chunk.num_tokens, chunk.piece, chunk.last_piece, chunk.kind)
        for i, (length, piece, is_last, kind) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if kind in (BAD, EMPTY):
                continue
            if piece == 0:
                self._hasher = xxh3_64(origins[i])
                documents += 1
                places += self._hasher.intdigest()
            self._hasher.update(tokens[start : start + length])
            start += length
            if is_last:
                digest += self._hasher.intdigest()
        so_far = self._epochs[chunk.epoch]
        self._epochs[chunk.epoch] = Tally(
            documents=so_far.documents + documents,
            empty=so_far.empty + int((chunk.kind == EMPTY).sum()),
            bad=so_far.bad + int((chunk.kind == BAD).sum()),
            places=(so_far.places + places) % 2**64,
            tokens=so_far.tokens + len(tokens),
            digest=(so_far.digest + digest) % 2**64,
        )


class _Records:
    """The records of an epoch that came by, as one interval of places per block and file: a block's own lie
    side by side in its files, so intervals of two blocks that overlap have a record in common.
    """

    def __init__(self) -> None:
        self._block = -1
        self._held: list[Int64Array] = []  # (num_records, 2) of the block at hand: file, place
        self._intervals: list[tuple[int, int, int]] = []
        self._twice: tuple[int, int] | None = None

    def add(self, chunk: TokenChunk) -> None:
        if chunk.block != self._block:
            self._close()
            self._block = chunk.block
        new = chunk.piece == 0
        self._held.append(np.stack([chunk.file[new], chunk.place[new]], axis=1).astype(np.int64))

    def twice(self) -> tuple[int, int] | None:
        self._close()
        self._intervals.sort()
        for (file, _, last), (next_file, first, _) in zip(self._intervals, self._intervals[1:], strict=False):
            if file == next_file and first <= last:
                self._twice = self._twice or (file, first)
        return self._twice

    def _close(self) -> None:
        found = np.concatenate(self._held) if self._held else np.empty((0, 2), np.int64)
        self._held = []
        found = found[np.lexsort((found[:, 1], found[:, 0]))]
        same = (found[1:] == found[:-1]).all(axis=1)
        if same.any():
            file, place = found[1:][same][0].tolist()
            self._twice = self._twice or (file, place)
        files, firsts = np.unique(found[:, 0], return_index=True)
        lasts = [*(firsts[1:] - 1), len(found) - 1]
        for file, first, last in zip(files.tolist(), firsts.tolist(), lasts, strict=False):
            self._intervals.append((file, int(found[first, 1]), int(found[last, 1])))


def tally_files(spec: DataSpec, encoder: EncoderChoice) -> Tally:
    """One epoch: every file from its first byte to its last, encoded by `encoder`, without fragments, blocks
    and windows. Raises as the stream does where a file cannot be read.
    """
    settings, plan = replace(spec.settings, shuffle="none"), spec.plans[0]
    windows = (
        Window(number=number, last=False, parts=(part,))
        for number, part in enumerate(read_files(plan, settings.accept_changed))
    )
    encoders = spec.made_by((EncoderSpan(encoder=encoder),)).build_encoders()
    tallies, task = Tallies(), WindowTask(source=plan.source, epoch=0, block=0)
    for _ in tallies.watch(tokenize_windows(task, windows, plan, encoders, settings)):
        pass
    return tallies.of(0)
