"""A source's chunks in order: segments with document starts and cursors, and the checks of the order.

The packers string segments together. They pass every chunk to `ChunkOrder`, which also checks the shares of
bad documents at the ends of windows and epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.data.common.settings import BAD_SHARE_RECORDS, StreamSettings
from orchestrator.errors import DataError, FeedError
from orchestrator.records.cursor import SourceCursor
from orchestrator.records.tokens import (
    BAD,
    EMPTY,
    FILTERED,
    HELD_OUT,
    PIECE,
    BoolArray,
    Int32Array,
    Int64Array,
    TokenChunk,
)

Counts = tuple[int, int, int, int, int, int]  # documents, empty, bad, special texts, filtered, held out


def counts_at(cursor: SourceCursor) -> Counts:
    """The counts of a cursor."""
    return (
        cursor.documents,
        cursor.empty_documents,
        cursor.bad_documents,
        cursor.special_texts,
        cursor.filtered_documents,
        cursor.held_out_documents,
    )


def counted(counts: Counts) -> dict[str, Any]:
    """The counts as fields of a cursor."""
    documents, empty, bad, special, filtered, held_out = counts
    return {
        "documents": documents,
        "empty_documents": empty,
        "bad_documents": bad,
        "special_texts": special,
        "filtered_documents": filtered,
        "held_out_documents": held_out,
    }


def counts_after(before: Counts, chunk: TokenChunk) -> Counts:
    """The counts after a chunk."""
    documents, empty, bad, special, filtered, held_out = before
    return (
        documents + int(((chunk.kind == PIECE) & (chunk.last_piece == 1)).sum()),
        empty + int((chunk.kind == EMPTY).sum()),
        bad + int((chunk.kind == BAD).sum()),
        special + int(chunk.special_texts.sum()),
        filtered + int((chunk.kind == FILTERED).sum()),
        held_out + int((chunk.kind == HELD_OUT).sum()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """What precedes a segment in the stream.

    `position` counts tokens from the place where the stream was opened. `document` is the number of the last
    entry's document, `token_document` that of the last token's, -1 for none. `epoch_counts` are the counts at
    the epoch's beginning. `epoch_begins`: no token of the epoch has come yet.
    """

    position: int
    counts: Counts
    document: int
    token_document: int
    epoch_counts: Counts
    epoch_begins: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a token: its entry in the segment, its index in the piece, and the counts before it.

    `piece_key` is (epoch, block, window, record, output, piece). At an epoch's first token the cursor is
    (epoch, 0, …) in normal form, before any entry of the epoch.
    """

    entry: int
    token: int
    piece_key: tuple[int, int, int, int, int, int]
    epoch_border: bool
    counts: Counts

    def cursor(self, prefix_digest: str, earlier: tuple[int, str]) -> SourceCursor:
        """The cursor at this place.

        `prefix_digest` is the digest of the piece's earlier tokens (empty for none). `earlier` is the number
        and the digest of the tokens in the document's earlier pieces.
        """
        epoch, block, window, record, output, piece = self.piece_key
        if self.epoch_border:
            block = window = record = output = piece = 0
            earlier = (0, "")
        return SourceCursor(
            epoch=epoch,
            block=block,
            window=window,
            record=record,
            output=output,
            piece=piece,
            token=self.token,
            prefix_digest=prefix_digest,
            earlier_tokens=earlier[0],
            earlier_digest=earlier[1],
            **counted(self.counts),
        )


def without_entries(chunk: TokenChunk, num: int) -> TokenChunk:
    """The chunk without its first `num` entries and their tokens. None of these may be a bad document."""
    columns = ("record", "piece", "num_tokens", "kind", "last_piece", "special_texts", "file", "place")
    kept: dict[str, Any] = {name: getattr(chunk, name)[num:] for name in columns}
    first = int(chunk.num_tokens[:num].sum())
    loss = None if chunk.loss is None else chunk.loss[first:]
    output = None if chunk.output is None else chunk.output[num:]
    return replace(chunk, tokens=chunk.tokens[first:], loss=loss, output=output, **kept)


class Segment:
    """Tokens of one chunk from `skip` on. Those before it were drawn before the stream was opened."""

    def __init__(self, chunk: TokenChunk, skip: int, before: Before) -> None:
        self.chunk, self._skip, self._before = chunk, skip, before
        self.start = before.position
        self.stop = before.position + len(chunk.tokens) - skip
        # entry i has the positions [_begins[i], _ends[i]) of the stream
        self._ends = self.start - skip + np.cumsum(chunk.num_tokens, dtype=np.int64)
        self._begins = self._ends - chunk.num_tokens
        is_piece = chunk.kind == PIECE
        whole = is_piece & (chunk.last_piece == 1)
        empty, bad, filtered, held_out = (chunk.kind == kind for kind in (EMPTY, BAD, FILTERED, HELD_OUT))
        passed = np.stack([whole, empty, bad, chunk.special_texts, filtered, held_out])
        self._counts = np.zeros((len(passed), len(chunk.kind) + 1), np.int64)  # counts before entry i
        np.cumsum(passed, axis=1, out=self._counts[:, 1:])
        self._reasons_taken = 0
        # a document begins with its first token; a piece without tokens may come before that
        document = before.document + np.cumsum(is_piece & (chunk.piece == 0), dtype=np.int64)
        filled = chunk.num_tokens > 0
        documents = document[filled]
        earlier = np.concatenate([[before.token_document], documents[:-1]])
        self._document_starts: Int64Array = self._begins[filled][documents != earlier]
        self.document_after = int(document[-1]) if len(document) else before.document
        self.token_document_after = int(documents[-1]) if len(documents) else before.token_document

    @property
    def counts_after(self) -> Counts:
        """The counts after the segment."""
        return self._counts_at(len(self.chunk.kind))

    def _counts_at(self, entry: int) -> Counts:
        documents, empty, bad, special, filtered, held_out = self._counts[:, entry].tolist()
        before = self._before.counts
        return (
            before[0] + documents,
            before[1] + empty,
            before[2] + bad,
            before[3] + special,
            before[4] + filtered,
            before[5] + held_out,
        )

    def tokens_between(self, start: int, stop: int) -> Int32Array:
        """Its tokens at the stream's positions [start, stop), as a view."""
        shift = self._skip - self.start
        return self.chunk.tokens[max(start, self.start) + shift : max(min(stop, self.stop) + shift, 0)]

    def loss_between(self, start: int, stop: int) -> BoolArray:
        """Which of these tokens are targets."""
        loss = self.chunk.loss
        if loss is None:
            return np.ones(len(self.tokens_between(start, stop)), np.bool_)
        shift = self._skip - self.start
        return loss[max(start, self.start) + shift : max(min(stop, self.stop) + shift, 0)]

    def document_starts_between(self, start: int, stop: int) -> Int64Array:
        """Positions in [start, stop) at which its documents begin."""
        first, last = self._document_starts.searchsorted([max(start, self.start), stop])
        return self._document_starts[first:last]

    def place_of(self, position: int) -> Place:
        """The place of the token at `position`, which must lie in the segment."""
        assert self.start <= position < self.stop, f"position {position} of [{self.start}, {self.stop})"
        chunk = self.chunk
        entry = int(self._ends.searchsorted(position, side="right"))
        token = position - int(self._begins[entry])
        record, piece = int(chunk.record[entry]), int(chunk.piece[entry])
        border = self._before.epoch_begins and position == self.start
        return Place(
            entry=entry,
            token=token,
            piece_key=(chunk.epoch, chunk.block, chunk.window, record, chunk.output_of(entry), piece),
            epoch_border=border,
            counts=self._before.epoch_counts if border else self._counts_at(entry),
        )

    def piece_tokens(self, place: Place) -> Int32Array:
        """The tokens of the place's piece before its token, including those drawn before the opening."""
        first = int(self._begins[place.entry]) - self.start + self._skip
        return self.chunk.tokens[first : first + place.token]

    def take_reasons(self, entry: int | None) -> tuple[str, ...]:
        """The reasons of bad documents before `entry` (None: of all) that were not taken yet."""
        passed = int(self._counts[2, len(self.chunk.kind) if entry is None else entry])
        taken, self._reasons_taken = self._reasons_taken, passed
        return self.chunk.bad_reasons[taken:passed]


# ---------------------------------------------------------------------------------------- order of the chunks
class ChunkOrder:
    """The order of one source's chunks from a cursor on.

    `num_blocks` returns the number of blocks of an epoch. The source ends before epoch `num_epochs` (None: it
    has no end).
    """

    def __init__(
        self,
        start: SourceCursor,
        source: str,
        num_blocks: Callable[[int], int],
        settings: StreamSettings,
        num_epochs: int | None,
    ) -> None:
        self.source, self.num_epochs = source, num_epochs
        self._num_blocks, self._settings = num_blocks, settings
        # (epoch, block, window) of the chunk that must come next
        self.expected = (start.epoch, start.block, start.window)
        self._inside_window = False
        place = (start.block, start.window, start.record, start.output, start.piece, start.token, start.packs)
        self._epoch_tokens = 2 if any(place) else 0  # tokens fed of the current epoch, counted up to 2
        self.finished = False

    @property
    def epoch_begins(self) -> bool:
        """Whether no token of the epoch has come yet."""
        return self._epoch_tokens == 0

    def require_next(self, chunk: TokenChunk) -> None:
        """Raises `FeedError` if another chunk is due."""
        found = (chunk.epoch, chunk.block, chunk.window)
        if self.finished or found != self.expected or chunk.source != self.source:
            raise FeedError(
                f"a packer got the chunk of source {chunk.source}, epoch {found[0]}, block {found[1]}, "
                f"window {found[2]}, expected is that of source {self.source}, {self.expected}"
                f"{' (after the end)' if self.finished else ''}",
                code="feed.chunk_order",
            )

    def go_on(self, chunk: TokenChunk, num_tokens: int, counts: Counts) -> bool:
        """Advances past a chunk with `num_tokens` new tokens. Returns whether the chunk ends the epoch.

        `counts` are those after the chunk. Raises `DataError` if too many documents are bad or the epoch has
        fewer than two tokens.
        """
        self._epoch_tokens = min(2, self._epoch_tokens + num_tokens)
        epoch, block, window = self.expected
        self._inside_window = not chunk.ends_window
        if chunk.ends_block:
            block, window = block + 1, 0
        elif chunk.ends_window:
            window += 1
        ends_epoch = block == self._num_blocks(epoch)
        if ends_epoch:
            if self._epoch_tokens < 2 and not self._settings.held_out:
                raise DataError(
                    f"epoch {epoch} of source {self.source} has {self._epoch_tokens} tokens, at least 2 are "
                    f"needed ({_of(counts)}); check the source in data.sources: its path, fields, transforms "
                    "and holdout",
                    code="data.nothing_to_train",
                )
            epoch, block = epoch + 1, 0
            self._epoch_tokens = 0
        self.expected = (epoch, block, window)
        if chunk.ends_window:
            self._judge_bad_share(ends_epoch, counts)
        return ends_epoch

    def finish(self) -> None:
        """Ends the data: no chunk will follow. Raises `FeedError` if an epoch was not read to its end."""
        epoch, block, window = self.expected
        at_border = (block, window, self._inside_window) == (0, 0, False)
        # a cursor after the last epoch has nothing to read, at any place
        if not (at_border if self.num_epochs is None else epoch >= self.num_epochs):
            raise FeedError(
                f"the chunks of source {self.source} ended before the end of epoch {epoch}, block {block}, "
                f"window {window}; a part of the data was not delivered",
                code="feed.ended_early",
            )
        self.finished = True

    def _judge_bad_share(self, ends_epoch: bool, counts: Counts) -> None:
        """Checks the share of bad documents. The places of this check do not depend on where the stream was
        opened or how chunks were cut.
        """
        if self._settings.held_out:
            return  # a few records of a run whose other records are checked
        documents, empty, bad, _, filtered, _ = counts
        seen = documents + empty + bad + filtered
        if (ends_epoch or seen >= BAD_SHARE_RECORDS) and bad > self._settings.max_bad_share * seen:
            raise DataError(
                f"{bad} of the first {seen} documents of source {self.source} are bad, more than "
                f"data.max_bad_share={self._settings.max_bad_share}; fix them, or allow a larger share",
                code="data.too_many_bad",
            )


def _of(counts: Counts) -> str:
    """Counts of a source's records by outcome, for messages."""
    documents, empty, bad, _, filtered, held_out = counts
    return (
        f"its records so far: {documents} documents, {empty} empty or without a target, {bad} bad, "
        f"{filtered} dropped by transforms, {held_out} held out"
    )
