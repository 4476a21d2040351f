"""Verifies the content of consecutive steps' samples, independently of their packer.

Their labels, in order, are the trained stream. They must equal the tokens of the chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.inspect.audit.checksums.epoch_checksum import EpochChecksums
from orchestrator.inspect.audit.reference.reference_packing import NO_DOCUMENT, NO_TARGET, NO_TOKEN, Samples
from orchestrator.records.cursor import SourceCursor
from orchestrator.records.tokens import Int32Array, TokenChunk

_UNKNOWN = -1  # of a sample's first token, whose document id is 0 whether or not a document begins there


class TrainedTokens:
    """The samples from a cursor on, in order, compared with the chunks that they are made of.

    The chunks' first `skipped` tokens lie before the cursor: in the piece that it names, and, if the chunks
    begin with its document's first piece, in the earlier ones. `checksums` counts documents whose tokens have
    all been targets, and their records, with the samples' own tokens in place of the chunks'. `border` counts
    them up to the current cursor, `end` all of them. So the sums of a stretch up to a cursor and of the next
    one from that on have each document once.
    """

    def __init__(self, skipped: int) -> None:
        self.checksums = EpochChecksums()
        self._chunks: deque[TokenChunk] = deque()  # whose tokens have not all been targets
        self._skipped = skipped
        self._last_label: int | None = None
        # of the samples, as far as they are not counted: tokens, and whether a document begins with each
        self._tokens: list[Int32Array] = []
        self._begins: list[npt.NDArray[np.int8]] = []
        self._num_tokens = 0
        self._document: tuple[int, ...] = ()  # of the last token that was compared
        self._fault: str | None = None

    def watch(self, chunks: Iterable[TokenChunk]) -> Iterator[TokenChunk]:
        """Passes on the chunks, and notes them."""
        for chunk in chunks:
            self._chunks.append(chunk)
            yield chunk

    def add(self, samples: Samples, num_tokens: int) -> str | None:
        """Adds the samples of the next step, which counted `num_tokens` targets. Returns a fault within them,
        or None.

        Only the last may be padded, at its end and in all three arrays alike; labels are the inputs one token
        further, also across samples and steps; document ids begin at 0 and rise by 1 at a time.
        """
        inputs, labels, documents = (
            a.ravel() for a in (samples.input_ids, samples.labels, samples.document_ids)
        )
        seq_len = samples.labels.shape[1]
        num = int(np.count_nonzero(labels != NO_TARGET))
        if num != num_tokens:
            return f"its samples have {num} targets, it counted {num_tokens}"
        padding = (inputs[num:] == NO_TOKEN) & (labels[num:] == NO_TARGET) & (documents[num:] == NO_DOCUMENT)
        if not padding.all() or len(labels) - num >= seq_len:
            return "padding is not all that follows the last target of its last sample"
        if (inputs[1:num] != labels[: num - 1]).any() or self._last_label not in (None, int(inputs[0])):
            return "its labels are not its inputs one token further"
        begins = _begins(documents, num, seq_len)
        if begins is None:
            return "its document ids do not count 0, 1, … in each sample"
        if self._last_label is None:
            self._hold(inputs[:1], np.full(1, _UNKNOWN, np.int8))
        self._hold(labels[:num], begins)
        self._last_label = int(labels[num - 1])
        self._count()
        return None

    def border(self, at: SourceCursor) -> None:
        """Counts the documents before that of the cursor `at`, which names the last target, if they are not
        counted yet. A stretch that begins with `at` counts this document and what follows.
        """
        while self._chunks:
            entries = _entries_before(self._chunks[0], at)
            if entries < len(self._chunks[0].kind):
                if entries:
                    self._chunks.extendleft(reversed(_cut(self._chunks.popleft(), entries)))
                    self._count_first()
                return
            self._count_first()

    def end(self) -> str | None:
        """Counts the remaining targets, after the last step and `border`. Returns where the samples' tokens
        or documents differ from the chunks'; None if nowhere.
        """
        self._count(least_after=0)
        if self._chunks and self._num_tokens:
            self.checksums.note_unfinished(self._chunks[0])
            self._compare(self._chunks[0], *self._release(self._num_tokens))
        return self._fault

    def _hold(self, tokens: Int32Array, begins: npt.NDArray[np.int8]) -> None:
        self._tokens.append(tokens)
        self._begins.append(begins)
        self._num_tokens += len(tokens)

    def _release(self, num: int) -> tuple[Int32Array, npt.NDArray[np.int8]]:
        """The first `num` tokens held."""
        tokens, begins = np.concatenate(self._tokens), np.concatenate(self._begins)
        self._tokens, self._begins = [tokens[num:]], [begins[num:]]
        self._num_tokens -= num
        return tokens[:num], begins[:num]

    def _count(self, least_after: int = 2) -> None:
        """Counts the chunks whose tokens have all been seen, if so many later ones follow: tokens right
        before the last target may belong to the next stretch (`border`).
        """
        while self._chunks:
            left = self._num_tokens - (len(self._chunks[0].tokens) - self._skipped)
            if left < least_after:
                return
            self._count_first()

    def _count_first(self) -> None:
        chunk = self._chunks.popleft()
        skipped = min(self._skipped, len(chunk.tokens))
        num = len(chunk.tokens) - skipped
        tokens, begins = self._release(num) if num else (chunk.tokens[:0], np.empty(0, np.int8))
        self._compare(chunk, tokens, begins)
        whole = np.concatenate([chunk.tokens[:skipped], tokens]) if skipped else tokens
        self.checksums.count(chunk, whole)
        self.checksums.note_records(chunk)
        self._skipped -= skipped

    def _compare(self, chunk: TokenChunk, tokens: Int32Array, begins: npt.NDArray[np.int8]) -> None:
        """Notes a fault if these tokens, after the skipped ones, differ from the chunk's."""
        stop = self._skipped + len(tokens)
        where = f"in epoch {chunk.epoch}, block {chunk.block}, window {chunk.window}"
        expected = chunk.tokens[self._skipped : stop]
        if (expected != tokens).any():
            at = int((expected != tokens).argmax())
            self._fault = self._fault or (
                f"the samples do not hold the documents' tokens one after the other {where}: token "
                f"{self._skipped + at} of a chunk is {expected[at]}, the samples have {tokens[at]}"
            )
        starts = self._document_starts(chunk)[self._skipped : stop]
        if ((starts != begins) & (begins != _UNKNOWN)).any():
            self._fault = (
                self._fault or f"the samples' document ids do not change where documents begin {where}"
            )

    def _document_starts(self, chunk: TokenChunk) -> npt.NDArray[np.int8]:
        """(num_tokens,) 1 where the tokens of another document begin."""
        filled = chunk.num_tokens > 0
        starts = np.zeros(len(chunk.tokens), np.int8)
        if filled.any():
            records, outputs = chunk.record[filled], chunk.outputs[filled]
            first = (chunk.epoch, chunk.block, chunk.window, int(records[0]), int(outputs[0]))
            other = (records[1:] != records[:-1]) | (outputs[1:] != outputs[:-1])
            another = np.concatenate([[first != self._document], other])
            starts[(np.cumsum(chunk.num_tokens) - chunk.num_tokens)[filled]] = another
            self._document = (*first[:3], int(records[-1]), int(outputs[-1]))
        return starts


def _place(chunk: TokenChunk) -> tuple[int, int, int]:
    return chunk.epoch, chunk.block, chunk.window


def _entries_before(chunk: TokenChunk, at: SourceCursor) -> int:
    """The number of its entries that belong to documents before the cursor's."""
    here, there = _place(chunk), (at.epoch, at.block, at.window)
    if here != there:
        return len(chunk.kind) if here < there else 0
    same = (chunk.record == at.record) & (chunk.outputs < at.output)
    return int(((chunk.record < at.record) | same).sum())


def _cut(chunk: TokenChunk, entry: int) -> tuple[TokenChunk, TokenChunk]:
    """Its entries before this one, and the others."""
    names = ("record", "piece", "num_tokens", "kind", "last_piece", "special_texts", "file", "place")
    at = int(chunk.num_tokens[:entry].sum())

    def part(entries: slice, tokens: slice) -> TokenChunk:
        columns: dict[str, Any] = {name: getattr(chunk, name)[entries] for name in names}
        loss = None if chunk.loss is None else chunk.loss[tokens]
        columns["output"] = chunk.outputs[entries]
        return replace(chunk, tokens=chunk.tokens[tokens], loss=loss, **columns)

    return part(slice(0, entry), slice(0, at)), part(slice(entry, None), slice(at, None))


def _begins(documents: Int32Array, num: int, seq_len: int) -> npt.NDArray[np.int8] | None:
    """(num,) whether a document begins with the token after each; `_UNKNOWN` of those that are no input of
    the same sample. None: the ids do not begin at 0 and rise by 1 at a time.
    """
    rows = documents.reshape(-1, seq_len)
    rises = rows[:, 1:] - rows[:, :-1]
    last = num - (len(rows) - 1) * seq_len  # tokens of the last sample, which may be padded
    if rows[:, 0].any() or (rises[:-1] & ~1).any() or (rises[-1, : last - 1] & ~1).any():
        return None
    begins = np.full((len(rows), seq_len), _UNKNOWN, np.int8)
    begins[:, :-1] = rises
    begins[-1, last - 1] = _UNKNOWN
    return begins.reshape(-1)[:num]
