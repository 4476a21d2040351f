"""Repeats the packing for an audit: chunks of tokens in, a step's samples and cursors out.

It follows the rule (input_ids = T[p:p+L], labels = T[p+1:p+L+1], p += L), and holds T and the beginnings of
documents and pieces in it as plain arrays. It does not hold whole documents, because a document may be larger
than memory. It makes the cursor of every step, because the journal's cursors are compared, too.

It shares no code with the trainer's packer (`stream`, `segments`, `step_samples`), so that a fault there
cannot hide here. `tests/inspect/test_reference_packing.py` checks both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from xxhash import xxh3_64

from orchestrator.errors import DataError, DataIdentityError
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

NO_TARGET, NO_DOCUMENT, NO_TOKEN = -100, -1, 0
# The counts of a source in a cursor.
_COUNTS = (
    "documents",
    "empty_documents",
    "bad_documents",
    "filtered_documents",
    "held_out_documents",
    "special_texts",
)
_BEFORE = -(1 << 62)  # the position of what began before the first chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Consecutive samples as a model takes them; arrays are int32 of shape (num_samples, seq_len)."""

    input_ids: Int32Array
    labels: Int32Array  # -100: no loss; masked targets are still there
    document_ids: Int32Array  # 0, 1, … within a sample, -1: padding
    masked: BoolArray  # the labels that a loss mask takes out

    @property
    def labels_of_loss(self) -> Int32Array:
        """The labels as a model takes them."""
        if not self.masked.any():
            return self.labels
        return np.where(self.masked, NO_TARGET, self.labels).astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A chunk that is not passed yet, and what lies before it in the stream and in its epoch."""

    chunk: TokenChunk
    begin: int  # position of its first token; that of the cursor with which the stream was opened is 0
    passed: Int64Array  # (6,) what `_passed` counts
    epoch_passed: Int64Array  # (6,) the same at the epoch's beginning
    begins_epoch: bool  # no token of the epoch came before

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.begin + len(self.chunk.tokens)


class ReferencePacker:
    """One source's token stream from `cursor` on, as its chunks give it."""

    def __init__(self, chunks: Iterator[TokenChunk], cursor: SourceCursor) -> None:
        self._chunks, self._cursor = chunks, cursor
        self._position = 0  # of the next input token
        self._tokens = np.empty(0, np.int32)  # T from the next input token on, as far as it is read
        self._masked = np.empty(0, np.bool_)  # whether each one is no target
        # positions at which a document, and a piece of one, begins; the first of each is that at hand's
        self._documents = np.full(1, _BEFORE, np.int64)
        self._pieces = np.full(1, _BEFORE, np.int64)
        self._held: deque[_Held] = deque()
        self._earlier = _EarlierPieces(cursor)
        self._passed = np.array([getattr(cursor, name) for name in _COUNTS], np.int64)
        self._epoch, self._epoch_passed = cursor.epoch, self._passed
        place = (cursor.block, cursor.window, cursor.record, cursor.output, cursor.piece, cursor.token)
        self._epoch_has_tokens = any(place)
        self._to_skip = cursor.token

    def samples(self, num_tokens: int, seq_len: int) -> Samples:
        """The next samples, of so many targets altogether; the last is padded where they do not fill it."""
        self._read(num_tokens + 1)
        num_samples = -(-num_tokens // seq_len)
        inputs = np.full(num_samples * seq_len, NO_TOKEN, np.int32)
        inputs[:num_tokens] = self._tokens[:num_tokens]
        labels = np.full(num_samples * seq_len, NO_TARGET, np.int32)
        labels[:num_tokens] = self._tokens[1 : num_tokens + 1]
        masked = np.zeros(num_samples * seq_len, np.bool_)
        masked[:num_tokens] = self._masked[1 : num_tokens + 1]
        shape = (num_samples, seq_len)
        documents = self._document_ids(num_tokens, shape)
        self._move(num_tokens)
        while self._held and self._held[0].stop <= self._position:
            self._held.popleft()
        return Samples(
            input_ids=inputs.reshape(shape),
            labels=labels.reshape(shape),
            document_ids=documents,
            masked=masked.reshape(shape),
        )

    def _document_ids(self, num_tokens: int, shape: tuple[int, int]) -> Int32Array:
        """For each token of a sample, the number of documents that have begun in it after its first token."""
        stop = self._position + num_tokens
        first, last = (int(i) for i in np.searchsorted(self._documents, (self._position, stop)))
        found = np.zeros(shape, np.int32)
        found.reshape(-1)[self._documents[first:last] - self._position] = 1
        found[:, 0] = 0
        np.cumsum(found, axis=1, out=found)
        found.reshape(-1)[num_tokens:] = NO_DOCUMENT
        return found

    def _move(self, num_tokens: int) -> None:
        """Passes so many tokens."""
        at = self._position + num_tokens
        self._documents, self._pieces = _from(self._documents, at), _from(self._pieces, at)
        document, piece = int(self._documents[0]), int(self._pieces[0])
        self._earlier.move(self._tokens[:num_tokens], self._position, document, piece)
        self._tokens, self._masked = self._tokens[num_tokens:], self._masked[num_tokens:]
        self._position = at

    def left(self, num_positions: int, num_epochs: int | None, seq_len: int) -> int:
        """The number of the next positions before the source's limit of epochs; None: it has none."""
        del seq_len
        self._read(num_positions + 1)
        if num_epochs is None:
            return num_positions
        stop = max((held.stop for held in self._held if held.chunk.epoch < num_epochs), default=0)
        return max(0, min(num_positions, stop - self._position - 1))

    def cursor(self) -> SourceCursor:
        """The place of the next input token."""
        self._read(1)
        held = self._holding(0)
        chunk, inside = held.chunk, self._position - held.begin
        if held.begins_epoch and inside == 0:
            return _cursor((chunk.epoch, 0, 0, 0, 0, 0), 0, "", held.epoch_passed, (0, ""))
        ends = np.cumsum(chunk.num_tokens, dtype=np.int64)
        entry = int(np.searchsorted(ends, inside, side="right"))
        begin = int(ends[entry] - chunk.num_tokens[entry])
        digest = _digest(chunk.tokens[begin:inside]) if inside > begin else ""
        document = (int(chunk.record[entry]), chunk.output_of(entry), int(chunk.piece[entry]))
        place = (chunk.epoch, chunk.block, chunk.window, *document)
        earlier = self._earlier.number_and_digest if place[-1] else (0, "")
        return _cursor(place, inside - begin, digest, held.passed + _passed(chunk, entry), earlier)

    def ends_epoch(self, num_blocks: int) -> bool:
        """Whether the next input token is the last one of its epoch, which has so many blocks. All chunks of
        the epoch have come then.
        """
        self._read(1)
        epoch = self._holding(0).chunk.epoch
        self._read(2, last=(epoch, num_blocks - 1))
        return len(self._tokens) < 2 or self._holding(1).chunk.epoch != epoch  # noqa: PLR2004  the next one

    def _holding(self, ahead: int) -> _Held:
        """The chunk with the token that is so many ahead of the next input token."""
        return next(held for held in self._held if self._position + ahead < held.stop)

    def _read(self, num_tokens: int, last: tuple[int, int] | None = None) -> None:
        """Reads chunks until so many tokens are held, or the block `last` of that epoch has come."""
        tokens, masked, num = [self._tokens], [self._masked], len(self._tokens)
        while num < num_tokens and not (last is not None and self._has_come(*last)):
            chunk = self._earlier.cut_off(next(self._chunks))
            if chunk is None:
                continue
            begin = self._position + num - self._to_skip
            self._take(chunk, self._position + num)
            skip, self._to_skip = self._skipped(chunk), 0
            begins = begin + np.cumsum(chunk.num_tokens, dtype=np.int64) - chunk.num_tokens
            self._pieces = np.append(self._pieces, begins)
            firsts = begins[(chunk.kind == PIECE) & (chunk.piece == 0)]
            self._documents = np.append(self._documents, firsts)
            tokens.append(chunk.tokens[skip:])
            no_loss = np.zeros(len(chunk.tokens), np.bool_) if chunk.loss is None else ~chunk.loss
            masked.append(no_loss[skip:])
            if skip:
                document = int(firsts[0]) if chunk.piece[0] == 0 else _BEFORE
                self._earlier.begin_inside(chunk.tokens[:skip], begin, document)
            num += len(tokens[-1])
        if len(tokens) > 1:
            self._tokens, self._masked = np.concatenate(tokens), np.concatenate(masked)

    def _has_come(self, epoch: int, block: int) -> bool:
        newest = self._held[-1].chunk
        return newest.ends_block and (newest.epoch, newest.block) == (epoch, block)

    def _take(self, chunk: TokenChunk, begin: int) -> None:
        """Notes the chunk. Its first token that is not skipped has the position `begin`."""
        if chunk.epoch != self._epoch:
            if not self._epoch_has_tokens:
                raise DataError(
                    f"epoch {self._epoch} of source {chunk.source} has no tokens, but the run trained some; "
                    "check its path and text_field in data.sources",
                    code="data.too_few_tokens",
                )
            self._epoch, self._epoch_passed, self._epoch_has_tokens = chunk.epoch, self._passed, False
        held = _Held(
            chunk=chunk,
            begin=begin - self._to_skip,
            passed=self._passed,
            epoch_passed=self._epoch_passed,
            begins_epoch=not self._epoch_has_tokens,
        )
        self._held.append(held)
        self._passed = self._passed + _passed(chunk, len(chunk.kind))
        self._epoch_has_tokens |= len(chunk.tokens) > 0

    def _skipped(self, chunk: TokenChunk) -> int:
        """The number of the first chunk's tokens before the cursor. They must be those that it names."""
        at, num = self._cursor, self._to_skip
        if num and (len(chunk.tokens) < num or _digest(chunk.tokens[:num]) != at.prefix_digest):
            found = _digest(chunk.tokens[:num])
            raise DataIdentityError(
                f"the cursor names token {num} of record {at.record}, document {at.output} of it, piece "
                f"{at.piece} (source "
                f"{chunk.source}, epoch {at.epoch}, block {at.block}, window {at.window}), but the {num} "
                f"tokens before it had digest {at.prefix_digest} and now have {found}; the data, the "
                "tokenizer or the encoder are not those that the run was trained with",
                code="resume.cursor_mismatch",
            )
        return num


class _EarlierPieces:
    """The tokens of the document at hand that lie in pieces before the one at hand: their number and digest.
    Unknown (0 and empty) in a document that was opened inside at a cursor without them.
    """

    def __init__(self, cursor: SourceCursor) -> None:
        self._cursor = cursor
        self._known = cursor.piece == 0 or bool(cursor.earlier_digest)
        self._to_find = bool(cursor.earlier_digest)  # the chunks begin with them
        self._hasher, self._num = xxh3_64(), 0
        self._document = _BEFORE  # where the one at hand begins
        self._part: list[Int32Array] = []  # what is passed of the piece at hand, and where that begins
        self._part_begin = 0

    @property
    def number_and_digest(self) -> tuple[int, str]:
        return (self._num, self._hasher.hexdigest()) if self._known else (0, "")

    def cut_off(self, chunk: TokenChunk) -> TokenChunk | None:
        """The chunk without the pieces that lie before the cursor's in its document, which must be those that
        were trained. None: it has no others.
        """
        if not self._to_find:
            return chunk
        at = self._cursor
        entries, outputs = 0, chunk.outputs
        while entries < len(chunk.kind) and (
            (chunk.record[entries], outputs[entries]) == (at.record, at.output)
            and chunk.piece[entries] < at.piece
        ):
            entries += 1
        tokens = int(chunk.num_tokens[:entries].sum())
        self._add(chunk.tokens[:tokens])
        if entries == len(chunk.kind) and not chunk.ends_window:
            return None
        self._to_find = False
        if self.number_and_digest != (at.earlier_tokens, at.earlier_digest):
            raise DataIdentityError(
                f"the cursor names piece {at.piece} of record {at.record} (source {chunk.source}, epoch "
                f"{at.epoch}, block {at.block}, window {at.window}), but the {at.earlier_tokens} tokens of "
                f"its document's earlier pieces had digest {at.earlier_digest}, and now there are "
                f"{self._num} with digest {self._hasher.hexdigest()}; the data, the tokenizer or the encoder "
                "are not those that the run was trained with",
                code="resume.cursor_mismatch",
            )
        names = ("record", "piece", "num_tokens", "kind", "last_piece", "special_texts", "file", "place")
        left: dict[str, Any] = {name: getattr(chunk, name)[entries:] for name in names}
        left["output"] = outputs[entries:]
        loss = None if chunk.loss is None else chunk.loss[tokens:]
        return replace(chunk, tokens=chunk.tokens[tokens:], loss=loss, **left)

    def begin_inside(self, tokens: Int32Array, begin: int, document: int) -> None:
        """These tokens of the piece at hand, which begins at `begin`, lie before the cursor; its document
        begins at `document`.
        """
        self._part, self._part_begin, self._document = [tokens], begin, document

    def move(self, tokens: Int32Array, begin: int, document: int, piece: int) -> None:
        """These tokens are passed, of which the first stands at `begin`; then the document and the piece at
        hand are those that begin at `document` and `piece`.
        """
        if document != self._document:
            self._document, self._known = document, True
            self._hasher, self._num = xxh3_64(), 0
            self._part, self._part_begin = [], max(document, begin)
            tokens = tokens[self._part_begin - begin :]
        self._part.append(tokens)
        if piece > self._part_begin:
            passed = np.concatenate(self._part)
            before = piece - self._part_begin
            self._add(passed[:before])
            self._part, self._part_begin = [passed[before:]], piece

    def _add(self, tokens: Int32Array) -> None:
        self._hasher.update(np.ascontiguousarray(tokens, dtype="<i4").data)
        self._num += len(tokens)


def _from(begins: Int64Array, position: int) -> Int64Array:
    """The begins from the last one on that is not behind `position`."""
    return begins[int(np.searchsorted(begins, position, side="right")) - 1 :]


def _passed(chunk: TokenChunk, entry: int) -> Int64Array:
    """(6,) what `_COUNTS` names, before an entry."""
    kind = chunk.kind[:entry]
    whole = (kind == PIECE) & (chunk.last_piece[:entry] == 1)
    others = [int((kind == each).sum()) for each in (EMPTY, BAD, FILTERED, HELD_OUT)]
    return np.array([whole.sum(), *others, chunk.special_texts[:entry].sum()], np.int64)


def _digest(tokens: Int32Array) -> str:
    return xxh3_64(np.ascontiguousarray(tokens, dtype="<i4").data).hexdigest()


def _cursor(
    place: tuple[int, int, int, int, int, int],
    token: int,
    prefix_digest: str,
    passed: Int64Array,
    earlier: tuple[int, str],
) -> SourceCursor:
    epoch, block, window, record, output, piece = place
    counts: dict[str, Any] = dict(zip(_COUNTS, passed.tolist(), strict=True))
    return SourceCursor(
        epoch=epoch,
        block=block,
        window=window,
        record=record,
        output=output,
        piece=piece,
        token=token,
        prefix_digest=prefix_digest,
        earlier_tokens=earlier[0],
        earlier_digest=earlier[1],
        **counts,
    )
