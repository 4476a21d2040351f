"""Order-independent checksums of an epoch: the second half of an audit, which needs neither order nor packer.

`EpochChecksums` counts what was trained, and `EpochRecords` finds a record that occurs twice in an epoch.
`file_checksum` sums up the content of the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from orchestrator.planning.encoders import EncoderChoice
from orchestrator.records.tokens import (
    BAD,
    EMPTY,
    FILTERED,
    HELD_OUT,
    PIECE,
    Int32Array,
    Int64Array,
    TokenChunk,
)


class EpochRecords:
    """The records of an epoch, as one interval of places per block and file. A block's records lie side by
    side in its files, so intervals of two blocks that overlap have a record in common.

    The first block and the newest are held record by record, because parts of them may come before or after
    (`join`).
    """

    def __init__(self) -> None:
        self._first: tuple[int, Int64Array] | None = None  # once another has come
        self._block = -1
        self._held: list[Int64Array] = []  # of the current block, (num_records, 2)
        self._intervals: list[tuple[int, int, int]] = []  # of the blocks between: file, first and last place
        self._twice: tuple[int, int] | None = None  # the least found so far

    def add(self, block: int, records: Int64Array) -> None:
        """Adds records, (num_records, 2): file and place. Blocks come one after the other."""
        if block != self._block:
            self._close()
            self._block = block
        self._held.append(records)

    def join(self, later: EpochRecords) -> None:
        """Adds later records, the rest of the newest block first."""
        if later._first is not None:
            self.add(*later._first)
        if later._intervals:
            self._close()
            self._block = -1
        self._intervals += later._intervals
        self._keep_least(later._twice)
        if later._held:
            self.add(later._block, np.concatenate(later._held))

    def twice(self) -> tuple[int, int] | None:
        """(file, place) of the least record that is known to occur twice; None if there is none."""
        intervals, found = list(self._intervals), self._twice
        for records in self._open():
            found = _least(found, _repeated(records))
            intervals += _intervals(records)
        intervals.sort()
        for (file, _, last), (next_file, first, _) in zip(intervals, intervals[1:], strict=False):
            if file == next_file and first <= last:
                return _least(found, (file, first))
        return found

    def _open(self) -> Iterator[Int64Array]:
        if self._first is not None:
            yield self._first[1]
        if self._held:
            yield np.concatenate(self._held)

    def _close(self) -> None:
        """Ends the newest block, because another one follows."""
        if not self._held:
            return
        records, self._held = np.concatenate(self._held), []
        if self._first is None and not self._intervals:
            self._first = (self._block, records)
            return
        self._keep_least(_repeated(records))
        self._intervals += _intervals(records)

    def _keep_least(self, twice: tuple[int, int] | None) -> None:
        self._twice = _least(self._twice, twice)


def _least(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _sorted(records: Int64Array) -> Int64Array:
    found: Int64Array = records[np.lexsort((records[:, 1], records[:, 0]))]
    return found


def _repeated(records: Int64Array) -> tuple[int, int] | None:
    found = _sorted(records)
    same = (found[1:] == found[:-1]).all(axis=1)
    if not same.any():
        return None
    file, place = found[1:][same][0].tolist()
    return file, place


def _intervals(records: Int64Array) -> list[tuple[int, int, int]]:
    found = _sorted(records)
    files, firsts = np.unique(found[:, 0], return_index=True)
    lasts = [*(firsts[1:] - 1), len(found) - 1]
    return [
        (file, int(found[first, 1]), int(found[last, 1]))
        for file, first, last in zip(files.tolist(), firsts.tolist(), lasts, strict=False)
    ]


EpochFiles = tuple[str, int, EncoderChoice]
"""The files that an epoch of a source reads, as an encoder makes them: of epochs with one list, the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochChecksum:
    """`documents` are those with text. The digests are sums modulo 2^64 over these, of the xxh3_64 of (file,
    place), and of (file, place, tokens with BOS and EOS): little-endian, int64 twice and int32. For a
    document that is not the first of its record, its number in the record follows the place, as an int64.
    """

    documents: int = 0
    empty: int = 0
    bad: int = 0
    filtered: int = 0
    held_out: int = 0
    places: int = 0
    tokens: int = 0
    digest: int = 0

    def without_tokens(self) -> EpochChecksum:
        """The checksum of the documents only."""
        return replace(self, tokens=0, digest=0)

    def __add__(self, other: EpochChecksum) -> EpochChecksum:
        """Adds the checksum of other documents of the epoch."""
        return EpochChecksum(
            documents=self.documents + other.documents,
            empty=self.empty + other.empty,
            bad=self.bad + other.bad,
            filtered=self.filtered + other.filtered,
            held_out=self.held_out + other.held_out,
            places=(self.places + other.places) % 2**64,
            tokens=self.tokens + other.tokens,
            digest=(self.digest + other.digest) % 2**64,
        )

    def __str__(self) -> str:
        tokens = f", {self.tokens:,} tokens, sum of digests {self.digest:016x}" if self.tokens else ""
        left_out = "".join(
            f", {num:,} {what}"
            for num, what in ((self.filtered, "dropped by transforms"), (self.held_out, "held out"))
            if num
        )
        return (
            f"{self.documents:,} documents, {self.empty:,} empty and {self.bad:,} bad ones{left_out}, sum of "
            f"places {self.places:016x}{tokens}"
        )


class EpochTotals:
    """The content of the epochs in a stretch of a source's stream. Stretches are joined. Pickles."""

    def __init__(self) -> None:
        self.sums: dict[int, EpochChecksum] = defaultdict(EpochChecksum)
        self.records: dict[int, EpochRecords] = defaultdict(EpochRecords)
        # documents in no sample, where whole ones are packed: without a target, and too long
        self.unpacked: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def __reduce__(self) -> Any:
        return _totals, (dict(self.sums), dict(self.records), dict(self.unpacked))

    def join(self, later: EpochTotals) -> None:
        """Adds the stretch that follows."""
        for epoch, more in later.sums.items():
            self.sums[epoch] = self.sums[epoch] + more
        for epoch, records in later.records.items():
            self.records[epoch].join(records)
        for epoch, (without_target, too_long) in later.unpacked.items():
            before = self.unpacked[epoch]
            self.unpacked[epoch] = before[0] + without_target, before[1] + too_long


def _totals(sums: Any, records: Any, unpacked: Any) -> EpochTotals:
    made = EpochTotals()
    made.sums.update(sums)
    made.records.update(records)
    made.unpacked.update(unpacked)
    return made


class EpochChecksums:
    """The content of epochs, counted chunk by chunk, from any place of a stream on. A document counts when
    its last piece has come.
    """

    def __init__(self) -> None:
        self.totals = EpochTotals()
        self._hasher: Any = None  # of the current document; None if its beginning was not in the chunks
        self._num_tokens = 0  # of it

    def take(self) -> EpochTotals:
        """Returns the counts so far. Later counts begin at zero."""
        found, self.totals = self.totals, EpochTotals()
        return found

    def note_records(self, chunk: TokenChunk) -> None:
        """Notes the chunk's records for `twice`: each with the last piece of its first document."""
        self._add_places(chunk, (chunk.last_piece == 1) & (chunk.outputs == 0))

    def note_unfinished(self, chunk: TokenChunk) -> None:
        """Notes that a part of the chunk's first record has come."""
        first = np.zeros(len(chunk.kind), np.bool_)
        first[:1] = chunk.outputs[:1] == 0
        self._add_places(chunk, first)

    def _add_places(self, chunk: TokenChunk, which: npt.NDArray[np.bool_]) -> None:
        places = np.stack([chunk.file[which], chunk.place[which]], axis=1).astype(np.int64)
        self.totals.records[chunk.epoch].add(chunk.block, places)

    def of(self, epoch: int) -> EpochChecksum:
        """The counts of this epoch."""
        return self.totals.sums[epoch]

    def twice(self, epoch: int) -> tuple[int, int] | None:
        """(file, place) of a record that occurred twice in this epoch; None if there is none."""
        return self.totals.records[epoch].twice()

    def count(self, chunk: TokenChunk, tokens: Int32Array) -> None:
        """Counts the chunk's entries, with these `tokens` (as many as it has) in place of its own. Call it in
        order, once for each chunk.
        """
        is_piece = chunk.kind == PIECE
        bytes_ = np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8).data
        outputs = chunk.outputs[is_piece]
        columns = chunk.file[is_piece], chunk.place[is_piece], outputs
        held = np.stack(columns, axis=1).astype("<i8").tobytes()
        sizes = np.where(outputs == 0, 16, 24).tolist()
        origins = [held[24 * i : 24 * i + size] for i, size in enumerate(sizes)]
        borders = chunk.piece[is_piece] == 0, chunk.last_piece[is_piece] == 1
        stops = 4 * np.cumsum(chunk.num_tokens[is_piece], dtype=np.int64)
        documents = places = digest = num_tokens = start = 0
        hasher = self._hasher
        pieces = zip(*(column.tolist() for column in (*borders, stops)), strict=True)
        for i, (is_first, is_last, stop) in enumerate(pieces):
            if is_first:
                hasher = xxh3_64(origins[i])
                self._num_tokens = 0
            if hasher is not None:
                hasher.update(bytes_[start:stop])
                self._num_tokens += (stop - start) // 4
                if is_last:
                    documents += 1
                    digest += hasher.intdigest()
                    places += xxh3_64_intdigest(origins[i])
                    num_tokens += self._num_tokens
                    hasher = None
            start = stop
        self._hasher = hasher
        self.totals.sums[chunk.epoch] += EpochChecksum(
            documents=documents,
            empty=int((chunk.kind == EMPTY).sum()),
            bad=int((chunk.kind == BAD).sum()),
            filtered=int((chunk.kind == FILTERED).sum()),
            held_out=int((chunk.kind == HELD_OUT).sum()),
            places=places % 2**64,
            tokens=num_tokens,
            digest=digest % 2**64,
        )
