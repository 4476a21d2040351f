"""Packs one window of whole documents, for `bestfit` and `pad`.

It determines the window's documents, which of them are too long, and which stretches of them share a sample.
Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.common.settings import BAD_SHARE_RECORDS, SPLIT_WHOLE, StreamSettings
from orchestrator.data.packing.step_samples import PackedRun
from orchestrator.errors import DataError
from orchestrator.planning.order import pack_order
from orchestrator.records.cursor import SourceCursor
from orchestrator.records.tokens import PIECE, BoolArray, Int32Array, Int64Array, TokenChunk

PathOf = Callable[[int, int], str]  # (epoch, a file's number in its list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The documents of a window that have a target, in order.

    Of samples with two rows, each document has two: its tokens are those of the first row, then those of the
    second, and both have a target.
    """

    tokens: Int32Array  # of all documents
    loss: BoolArray | None  # like tokens
    begin: Int64Array  # (num_documents,) first token of each
    length: Int64Array  # (num_documents,)
    file: Int32Array  # (num_documents,)
    place: Int64Array  # (num_documents,)
    unpacked: int  # documents without a target
    first_row: Int64Array | None = None  # (num_documents,) tokens of the first row; None: there is one row


def documents_of(chunks: Sequence[TokenChunk]) -> Documents:
    """The documents of a whole window. The chunks of samples with two rows have `row`."""

    def column(name: str) -> Any:
        return np.concatenate([getattr(chunk, name) for chunk in chunks])

    is_piece = column("kind") == PIECE
    new = column("piece")[is_piece] == 0
    number = np.cumsum(new) - 1
    length = np.bincount(number, weights=column("num_tokens")[is_piece]).astype(np.int64)
    begin = np.cumsum(length) - length
    tokens, loss, first_row = column("tokens"), None, None
    if any(chunk.loss is not None for chunk in chunks):
        every = [np.ones(len(c.tokens), np.bool_) if c.loss is None else c.loss for c in chunks]
        loss = np.concatenate(every)
    if chunks[0].row is None:
        kept = _has_target(loss, begin, length)
    else:
        in_first = np.where(column("row")[is_piece] == 0, column("num_tokens")[is_piece], 0)
        first_row = np.bincount(number, weights=in_first).astype(np.int64)
        kept = _has_target(loss, begin, first_row)
        kept &= _has_target(loss, begin + first_row, length - first_row)
        first_row = first_row[kept]
    return Documents(
        tokens=tokens,
        loss=loss,
        begin=begin[kept],
        length=length[kept],
        file=column("file")[is_piece][new][kept],
        place=column("place")[is_piece][new][kept],
        unpacked=int((~kept).sum()),
        first_row=first_row,
    )


def _has_target(loss: BoolArray | None, begin: Int64Array, length: Int64Array) -> BoolArray:
    """Whether a token after the first is a target, in stretches of `length` tokens from `begin` on."""
    if loss is None:
        return length > 1
    before = np.concatenate([[0], np.cumsum(loss)])
    found: BoolArray = before[begin + length] > before[np.minimum(begin + 1, begin + length)]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Packs:
    """A window's packs in the order in which they are taken, as stretches of its tokens."""

    begin: Int64Array  # (num_stretches,) first token of each
    size: Int64Array  # (num_stretches,) positions of each
    firsts: Int64Array  # (num_packs + 1,) number of each pack's first stretch; last: of all
    long_documents: tuple[str, ...]  # skipped documents: the place and the reason
    rows_per_sample: int = 1

    @property
    def num(self) -> int:
        """The number of packs."""
        return len(self.firsts) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWindow:
    """A complete window, with the cursors before and after it."""

    begin: SourceCursor  # `packs` is 0
    end: SourceCursor
    documents: Documents
    packs: Packs
    reasons: tuple[str, ...]  # of bad documents

    def run(self, start: int, stop: int, seq_len: int) -> PackedRun:
        """The packs [start, stop), in new arrays."""
        firsts = self.packs.firsts[start : stop + 1]
        begin, size = (a[firsts[0] : firsts[-1]] for a in (self.packs.begin, self.packs.size))
        num = size + 1  # tokens
        at = np.repeat(begin - (np.cumsum(num) - num), num) + np.arange(int(num.sum()))
        loss = self.documents.loss
        return PackedRun(
            seq_len=seq_len,
            tokens=self.documents.tokens[at],
            sizes=size,
            firsts=firsts - firsts[0],
            loss=None if loss is None else loss[at],
            rows_per_sample=self.packs.rows_per_sample,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPacking:
    """Packs the windows of a source into samples of `seq_len` positions."""

    source: str
    settings: StreamSettings
    seq_len: int
    path_of: PathOf

    @property
    def row_len(self) -> int:
        """The positions of a row of a sample."""
        return self.seq_len // self.settings.rows_per_sample

    @property
    def _other_ways(self) -> str:
        return "split or skip" if self.settings.rows_per_sample == 1 else "skip"

    @property
    def _or_split(self) -> str:
        if self.settings.rows_per_sample > 1:
            return ""
        return ", set pack.long_document=split in a new run (another run.name)"

    def packed(
        self, begin: SourceCursor, end: SourceCursor, documents: Documents, reasons: tuple[str, ...]
    ) -> PackedWindow:
        """Packs the window between these cursors.

        The counts of documents in no pack are added to `end`. `reasons`: why documents of the window are bad.
        Raises `DataError` if a document is too long (`pack.long_document: stop`), or too many are (`skip`).
        """
        kept, long_documents = self._kept(documents, begin.epoch)
        if documents.first_row is not None:
            packs = _packs_of_pairs(documents, documents.first_row, kept, long_documents)
        else:
            packs = self._packs(documents, kept, begin, long_documents)
        end = replace(
            end,
            unpacked_documents=begin.unpacked_documents + documents.unpacked,
            long_documents=begin.long_documents + len(long_documents),
        )
        self._judge_long_share(end, ends_epoch=end.epoch != begin.epoch)
        return PackedWindow(
            begin=begin,
            end=end,
            documents=documents,
            packs=packs,
            reasons=reasons,
        )

    def _packs(
        self, documents: Documents, kept: BoolArray, begin: SourceCursor, long_documents: tuple[str, ...]
    ) -> Packs:
        """The packs of documents that may share a sample, or be divided among several."""
        document, first, size = stretches(documents.length[kept], self.seq_len)
        if documents.loss is not None and self.settings.long_document == "split":
            begins = documents.begin[kept][document] + first
            targets = np.concatenate([[0], np.cumsum(documents.loss)])
            learnt = targets[begins + 1 + size] > targets[begins + 1]
            document, first, size = document[learnt], first[learnt], size[learnt]
        packs = self._together(size, begin)
        order = np.array([number for pack in packs for number in pack], np.int64)
        return Packs(
            begin=(documents.begin[kept][document] + first)[order],
            size=size[order],
            firsts=np.cumsum([0, *map(len, packs)]),
            long_documents=long_documents,
        )

    def _kept(self, documents: Documents, epoch: int) -> tuple[BoolArray, tuple[str, ...]]:
        """Which documents go into packs, and the place and reason of those that are too long."""
        if self.settings.long_document in ("split", SPLIT_WHOLE):
            return documents.length > 1, ()
        length = _longer_row(documents)
        long = length > self.row_len + 1
        long_documents = tuple(self._long(documents, int(number), epoch) for number in np.flatnonzero(long))
        if long_documents and self.settings.long_document != "skip":
            raise DataError(
                f"{long_documents[0]}; set pack.long_document={self._other_ways} in a new run (another "
                "run.name), or make pack.seq_len larger",
                code="data.long_document",
            )
        return ~long, long_documents

    def _together(self, size: Int64Array, begin: SourceCursor) -> list[list[int]]:
        """The numbers of the stretches in each pack, in the order in which packs are taken."""
        settings = self.settings
        if settings.pack_mode != "bestfit":
            return [[number] for number in range(len(size))]
        packs = best_fit(size, self.seq_len)
        place = (begin.block, begin.window, settings.seed, self.source, begin.epoch, settings.shuffle)
        return [packs[number] for number in pack_order(len(packs), *place).tolist()]

    def _judge_long_share(self, end: SourceCursor, *, ends_epoch: bool) -> None:
        """Checks the share of long documents at the ends of windows, as for bad documents. The places of this
        check do not depend on where the stream was opened.
        """
        if self.settings.held_out:
            return  # a few records of a run whose other records are checked
        long, seen, most = end.long_documents, end.documents, self.settings.max_long_share
        if (ends_epoch or seen >= BAD_SHARE_RECORDS) and long > most * seen:
            raise DataError(
                f"{long:,} of the first {seen:,} documents of source {self.source} are longer than a sample "
                f"of pack.seq_len={self.row_len:,} and are skipped (pack.long_document=skip), more than "
                f"pack.max_long_share={most}; make pack.seq_len larger{self._or_split}, or allow a larger "
                "share",
                code="data.too_many_long",
            )

    def _long(self, documents: Documents, number: int, epoch: int) -> str:
        """The message that a document is too long."""
        path, place = self.path_of(epoch, int(documents.file[number])), int(documents.place[number])
        return (
            f"{path}: the document at {place} (source {self.source}) has {_longer_row(documents)[number]:,} "
            f"tokens, a sample of pack.seq_len={self.row_len:,} holds {self.row_len + 1:,}"
        )


def _longer_row(documents: Documents) -> Int64Array:
    """(num_documents,) tokens of each document, or of the longer one of its two rows."""
    if documents.first_row is None:
        return documents.length
    longer: Int64Array = np.maximum(documents.first_row, documents.length - documents.first_row)
    return longer


def _packs_of_pairs(
    documents: Documents, first_row: Int64Array, kept: BoolArray, long_documents: tuple[str, ...]
) -> Packs:
    """A pack for each document, in order, with a stretch for each of its two rows."""
    begin, first, length = documents.begin[kept], first_row[kept], documents.length[kept]
    return Packs(
        begin=np.stack([begin, begin + first], axis=1).reshape(-1),
        size=np.stack([first, length - first], axis=1).reshape(-1) - 1,
        firsts=2 * np.arange(len(begin) + 1),
        long_documents=long_documents,
        rows_per_sample=2,
    )


# ------------------------------------------------------------------------------------- arrangement of lengths
# With at least this many packs in a window, best-fit decreasing fills 98 % or more of them (data rule 21).
MIN_PACKS = 64
_BYTES_PER_TOKEN = 4


def few_packs(source: str, window_bytes: int, seq_len: int) -> tuple[str, ...]:
    """A note if a window of `window_bytes` of text has too few documents to fill its packs."""
    packs = window_bytes // (_BYTES_PER_TOKEN * seq_len)
    if packs >= MIN_PACKS:
        return ()
    return (
        f"source {source} has about {packs} packs of pack.seq_len={seq_len} in a window (at "
        f"{_BYTES_PER_TOKEN} bytes for a token): bestfit packs within windows and fills 98 % from "
        f"{MIN_PACKS} packs on; more documents, or a larger data.window_bytes in a new run, fill more",
    )


def stretches(lengths: Int64Array, seq_len: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Returns (document, first token, positions) of the stretches of documents with `lengths` tokens, at
    least two.

    A document of n tokens has n - 1 positions, each with the next token as its label. If these are more than
    `seq_len`, its stretches have `seq_len` positions each, and the last one has the rest. So each token but
    the first is a target once.
    """
    positions = lengths - 1
    parts = -(-positions // seq_len)
    document = np.repeat(np.arange(len(lengths)), parts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = part * seq_len
    return document, first, np.minimum(positions[document] - first, seq_len)


def best_fit(sizes: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Arranges stretches into packs of at most `capacity` positions.

    Returns the numbers of the stretches in each pack, ascending. Packs are ordered by their first stretch.

    Best-fit decreasing (Johnson 1973; for training "Fewer Truncations Improve Language Modeling", Ding et al.
    2024): the longest first, ties in their order, each into the pack with the least room that takes it, of
    equal ones the oldest. O(n log n) comparisons.
    """
    open_packs: list[tuple[int, int]] = []  # (room, number), sorted
    packs: list[list[int]] = []
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        assert size <= capacity, f"a stretch of {size} positions, packs hold {capacity}"
        at = bisect_left(open_packs, (size, -1))
        if at < len(open_packs):
            room, number = open_packs.pop(at)
            packs[number].append(item)
        else:
            room, number = capacity, len(packs)
            packs.append([item])
        if room > size:
            insort(open_packs, (room - size, number))
    return sorted(sorted(pack) for pack in packs)
