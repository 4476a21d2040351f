"""Repeats the packing of whole documents for an audit: `bestfit` and `pad`, window by window.

It follows the rule in plain loops over documents and shares no code with the trainer's packer
(`window_packer`, `packed_window`, `step_samples`), so that a fault there cannot hide here.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from orchestrator.data.common.settings import SPLIT_WHOLE, StreamSettings
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.inspect.audit.reference.reference_packing import NO_DOCUMENT, NO_TARGET, NO_TOKEN, Samples
from orchestrator.planning.order import order_key
from orchestrator.records.cursor import SourceCursor
from orchestrator.records.tokens import (
    BAD,
    EMPTY,
    FILTERED,
    HELD_OUT,
    PIECE,
    BoolArray,
    Int32Array,
    TokenChunk,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePart:
    """A part of a sample: a document, or a part of one that is too long, or a row of a preference."""

    tokens: Int32Array  # inputs, and the label of the last one
    loss: BoolArray  # like tokens: whether each is a target
    document: int  # number among the window's documents
    first_token: int  # of the document
    row: int = 0  # of the sample

    @property
    def size(self) -> int:
        """Positions."""
        return len(self.tokens) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowContent:
    """The content of a window for packing, in order, and the number of its documents that are in no pack.

    A unit has the parts that no packing separates: the rows of a preference, else one part.
    """

    units: list[list[SamplePart]]
    without_target: int
    too_long: int


def content_of(
    chunks: list[TokenChunk], seq_len: int, long_document: str, rows_per_sample: int = 1
) -> WindowContent:
    """The content of a whole window. Raises `DataError` for a document that is too long under `stop`."""
    units, without_target, too_long = list[list[SamplePart]](), 0, 0
    row_len = seq_len // rows_per_sample
    for number, rows in enumerate(_documents(chunks, rows_per_sample)):
        longest = max(len(tokens) for tokens, _ in rows)
        if not all(loss[1:].any() for _, loss in rows):
            without_target += 1
        elif longest <= row_len + 1:
            firsts = np.cumsum([0, *(len(tokens) for tokens, _ in rows)]).tolist()
            units.append(
                [
                    SamplePart(tokens=tokens, loss=loss, document=number, first_token=firsts[row], row=row)
                    for row, (tokens, loss) in enumerate(rows)
                ]
            )
        elif long_document in ("split", SPLIT_WHOLE):
            ((tokens, loss),) = rows
            for at in range(0, len(tokens) - 1, seq_len):
                here = slice(at, at + seq_len + 1)
                part, mask = tokens[here], loss[here]
                if mask[1:].any() or long_document == SPLIT_WHOLE:
                    units.append([SamplePart(tokens=part, loss=mask, document=number, first_token=at)])
        elif long_document == "skip":
            too_long += 1
        else:
            raise DataError(
                f"source {chunks[0].source} has a document of {longest} tokens, more than a sample of "
                f"{row_len} positions holds, but the run with pack.long_document=stop did not stop there",
                code="data.long_document",
            )
    return WindowContent(units=units, without_target=without_target, too_long=too_long)


def _documents(
    chunks: list[TokenChunk], rows_per_sample: int
) -> Iterator[list[tuple[Int32Array, BoolArray]]]:
    """The rows of each document: their tokens, and which of them are targets."""
    parts: list[list[Int32Array]] = [[] for _ in range(rows_per_sample)]
    masks: list[list[BoolArray]] = [[] for _ in range(rows_per_sample)]
    for chunk in chunks:
        loss = np.ones(len(chunk.tokens), np.bool_) if chunk.loss is None else chunk.loss
        rows = [0] * len(chunk.kind) if chunk.row is None else chunk.row.tolist()
        columns = (chunk.kind.tolist(), chunk.num_tokens.tolist(), chunk.last_piece.tolist(), rows)
        stop = 0
        for kind, num, last, row in zip(*columns, strict=True):
            if kind != PIECE:
                continue
            start, stop = stop, stop + num
            parts[row].append(chunk.tokens[start:stop])
            masks[row].append(loss[start:stop])
            if last:
                yield [
                    (np.concatenate(tokens), np.concatenate(mask))
                    for tokens, mask in zip(parts, masks, strict=True)
                ]
                parts = [[] for _ in range(rows_per_sample)]
                masks = [[] for _ in range(rows_per_sample)]


@dataclass(kw_only=True, slots=True)
class _Window:
    """A window whose packs are not all taken; `begin` is the cursor before its first pack."""

    begin: SourceCursor
    end: SourceCursor
    chunks: list[TokenChunk]
    packs: list[list[SamplePart]]


class ReferenceWindows:
    """One source's packs from `cursor` on, as its chunks, which have no end, give them."""

    def __init__(self, chunks: Iterator[TokenChunk], cursor: SourceCursor, settings: StreamSettings) -> None:
        self._chunks, self._settings = chunks, settings
        self._cursor, self._to_skip = cursor, cursor.packs
        self._begin = replace(cursor, packs=0, pack_seq_len=0, prefix_digest="")
        self._ahead: TokenChunk | None = None
        self._windows: deque[_Window] = deque()
        self._seq_len, self._taken, self._hasher = cursor.pack_seq_len, 0, xxh3_64()
        self.passed_packs: list[list[SamplePart]] = []  # of the first window, before the cursor
        self._empty_epoch = -1  # that was read from its begin on and had no pack yet

    def samples(self, num_tokens: int, seq_len: int) -> Samples:
        """The next samples: one for every `seq_len` of these positions, and one for what is left."""
        num = -(-num_tokens // seq_len)
        self._fit(seq_len)
        packs = [self._take() for _ in range(num)]
        inputs = np.full((num, seq_len), NO_TOKEN, np.int32)
        labels = np.full((num, seq_len), NO_TARGET, np.int32)
        documents = np.full((num, seq_len), NO_DOCUMENT, np.int32)
        masked = np.zeros((num, seq_len), np.bool_)
        row_len = seq_len // self._settings.rows_per_sample
        for row, pack in enumerate(packs):
            at = 0
            for number, stretch in enumerate(pack):
                at = max(at, stretch.row * row_len)
                here = slice(at, at + stretch.size)
                inputs[row, here] = stretch.tokens[:-1]
                labels[row, here] = stretch.tokens[1:]
                masked[row, here] = ~stretch.loss[1:]
                documents[row, here] = number
                at += stretch.size
        return Samples(input_ids=inputs, labels=labels, document_ids=documents, masked=masked)

    def left(self, num_positions: int, num_epochs: int | None, seq_len: int) -> int:
        """The number of the next positions before the source's limit of epochs; None: it has none."""
        if num_epochs is None:
            return num_positions
        self._fit(seq_len)
        there = 0
        for window in self._coming():
            if window.begin.epoch >= num_epochs:
                break
            there += seq_len * (len(window.packs) - (self._taken if window is self._windows[0] else 0))
            if there >= num_positions:
                return num_positions
        return there

    def cursor(self) -> SourceCursor:
        """The window of the next pack, and the number of its packs that were taken."""
        return self._cursor

    def ends_epoch(self, num_blocks: int) -> bool:
        """Whether the epoch of the cursor has no further pack; a window is read with what follows it."""
        del num_blocks
        epoch = self._cursor.epoch
        for window in self._coming():
            if window.begin.epoch > epoch:
                return True
            if len(window.packs) > (self._taken if window is self._windows[0] else 0):
                return False
        raise AssertionError("the chunks have no end")

    def _coming(self) -> Iterator[_Window]:
        """The current window and those after it."""
        number = 0
        while True:
            while number == len(self._windows):
                self._read()
            yield self._windows[number]
            number += 1

    def _fit(self, seq_len: int) -> None:
        """Sets the length of samples."""
        if seq_len == self._seq_len:
            return
        if self._taken or self._to_skip:
            raise DataIdentityError(
                f"the run took {self._taken or self._to_skip} packs of {self._seq_len} positions of a "
                f"window, then samples of {seq_len}: pack.seq_len cannot change within a window",
                code="resume.seq_len_within_window",
            )
        self._seq_len = seq_len
        begin = self._windows[0].begin if self._windows else self._begin
        for window in self._windows:
            window.begin = begin
            self._pack(window)
            begin = window.end
        self._begin = begin

    def _take(self) -> list[SamplePart]:
        window = next(self._coming())
        while self._taken == len(window.packs):
            self._leave()
            window = next(self._coming())
        pack = window.packs[self._taken]
        self._taken += 1
        for stretch in pack:
            self._hasher.update(np.ascontiguousarray(stretch.tokens, dtype="<i4").data)
        self._cursor = replace(
            window.begin,
            packs=self._taken,
            pack_seq_len=self._seq_len,
            prefix_digest=self._hasher.hexdigest(),
        )
        if self._taken == len(window.packs):
            self._leave()
        return pack

    def _leave(self) -> None:
        """Leaves the window: all its packs are taken."""
        self._cursor = self._windows.popleft().end
        self._taken, self._hasher = 0, xxh3_64()

    def _read(self) -> None:
        """Reads one more window, and the chunk after it, which has the begin of the next one."""
        chunks = [self._ahead or next(self._chunks)]
        while not chunks[-1].ends_window:
            chunks.append(next(self._chunks))
        self._ahead = ahead = next(self._chunks)
        kinds = np.concatenate([chunk.kind for chunk in chunks])
        last = np.concatenate([chunk.last_piece for chunk in chunks])
        begin = self._begin
        end = replace(
            begin,
            epoch=ahead.epoch,
            block=ahead.block,
            window=ahead.window,
            documents=begin.documents + int(((kinds == PIECE) & (last == 1)).sum()),
            empty_documents=begin.empty_documents + int((kinds == EMPTY).sum()),
            bad_documents=begin.bad_documents + int((kinds == BAD).sum()),
            filtered_documents=begin.filtered_documents + int((kinds == FILTERED).sum()),
            held_out_documents=begin.held_out_documents + int((kinds == HELD_OUT).sum()),
            special_texts=begin.special_texts + sum(int(chunk.special_texts.sum()) for chunk in chunks),
        )
        window = _Window(begin=begin, end=end, chunks=chunks, packs=[])
        self._pack(window)
        self._begin = window.end
        self._windows.append(window)
        self._require_packs(window)
        if self._to_skip:
            self._skip(window)

    def _pack(self, window: _Window) -> None:
        settings, begin = self._settings, window.begin
        content = content_of(
            window.chunks, self._seq_len, settings.long_document, settings.rows_per_sample
        )
        if settings.pack_mode == "pad":
            window.packs = content.units
        else:
            packs = _filled([part for unit in content.units for part in unit], self._seq_len)
            if settings.shuffle != "none":
                key = order_key("packs", settings.seed, window.chunks[0].source, begin.epoch)
                place = (begin.block << 32) + begin.window
                hashes = [xxh3_64_intdigest(struct.pack("<QQ", place, i), key) for i in range(len(packs))]
                packs = [packs[i] for i in sorted(range(len(packs)), key=lambda i: (hashes[i], i))]
            window.packs = packs
        window.end = replace(
            window.end,
            unpacked_documents=begin.unpacked_documents + content.without_target,
            long_documents=begin.long_documents + content.too_long,
        )

    def _require_packs(self, window: _Window) -> None:
        """Raises `DataError` at the end of an epoch without packs: else the search would never end."""
        at = window.begin
        if (at.block, at.window) == (0, 0):
            self._empty_epoch = at.epoch
        if window.packs:
            self._empty_epoch = -1
        elif window.end.epoch != at.epoch and self._empty_epoch == at.epoch:
            raise DataError(
                f"epoch {at.epoch} of source {window.chunks[0].source} has no document that can be trained, "
                "but the run trained some; check its path and fields in data.sources",
                code="data.nothing_fits",
            )

    def _skip(self, window: _Window) -> None:
        """Passes the packs that lie before the cursor: they must be those that it names."""
        asked, num = self._cursor, min(self._to_skip, len(window.packs))
        self._to_skip = 0
        self.passed_packs = [self._take() for _ in range(num)]
        found = self._cursor.prefix_digest if self._cursor.packs == asked.packs else "none"
        if found != asked.prefix_digest:
            raise DataIdentityError(
                f"the cursor counts {asked.packs} packs (source {window.chunks[0].source}, epoch "
                f"{asked.epoch}, block {asked.block}, window {asked.window}) with digest "
                f"{asked.prefix_digest}, and now they have {found}; the data, the tokenizer or the encoder "
                "are not those that the run was trained with",
                code="resume.cursor_mismatch",
            )


def _filled(stretches: list[SamplePart], seq_len: int) -> list[list[SamplePart]]:
    """Fills packs, the longest stretch first, each into the pack with the least sufficient room; of equal
    packs, the oldest. Within a pack, and between packs by their first, the stretches' order holds.
    """
    rooms = np.empty(len(stretches), np.int64)
    packs = list[list[int]]()
    for number in sorted(range(len(stretches)), key=lambda i: -stretches[i].size):
        size = stretches[number].size
        if packs:
            open_rooms = rooms[: len(packs)]
            at = int(np.where(open_rooms >= size, open_rooms, seq_len + 1).argmin())
            if open_rooms[at] >= size:
                packs[at].append(number)
                rooms[at] -= size
                continue
        rooms[len(packs)] = seq_len - size
        packs.append([number])
    return [[stretches[number] for number in sorted(pack)] for pack in sorted(packs, key=min)]
