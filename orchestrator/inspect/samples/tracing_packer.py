"""The audit's packer with a memory of the documents that its last samples were cut from.

It reads the chunks that pass by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from orchestrator.data.tokens.token_chunk import TokenChunk
from orchestrator.inspect.audit.reference.reference_packing import ReferencePacker, Samples
from orchestrator.records.arrays import Int64Array
from orchestrator.records.cursor import SourceCursor


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive input tokens of one document. `first_token` counts within the document, EOS and BOS
    included. It is None if the tokens of earlier pieces were never counted (a cursor of an old version).
    """

    file: int  # number in the manifest
    place: int  # of the record in the file: byte, or row
    output: int  # number of the document among those that its record gives
    epoch: int
    begin: int  # the first position, counted from the first requested position
    num_tokens: int
    first_token: int | None
    begins: bool  # with the document's first token
    ends: bool  # with its last token


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traced:
    chunk: TokenChunk
    begins: Int64Array  # (num_entries,) position of each entry's first token in the stream
    first_tokens: Int64Array  # (num_entries,) tokens of its document before each entry; < 0: not known

    @property
    def stop(self) -> int:
        return int(self.begins[-1] + self.chunk.num_tokens[-1]) if len(self.begins) else 0


_NOT_KNOWN = -(1 << 60)  # so far below zero that no document's tokens make up for it


class TracingPacker(ReferencePacker):
    """Keeps the chunks of the newest samples, for `stretches`."""

    def __init__(self, chunks: Iterator[TokenChunk], cursor: SourceCursor) -> None:
        super().__init__(chunks, cursor)
        self._traced: deque[_Traced] = deque()
        known = cursor.piece == 0 or bool(cursor.earlier_digest)
        self._document_tokens = cursor.earlier_tokens if known else _NOT_KNOWN
        self._first = 0  # position of the newest samples' first token

    def samples(self, num_tokens: int, seq_len: int) -> Samples:
        """See `ReferencePacker`."""
        self._first = self._position
        while self._traced and self._traced[0].stop <= self._first:
            self._traced.popleft()
        return super().samples(num_tokens, seq_len)

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """The documents of input tokens [start, stop), counted from the newest samples' first, in order."""
        found = list[Stretch]()
        document: tuple[int, ...] = ()
        for traced in self._traced:
            chunk, shift = traced.chunk, self._first
            for entry in np.flatnonzero(chunk.num_tokens).tolist():
                begin = int(traced.begins[entry]) - shift
                first, end = max(begin, start), min(begin + int(chunk.num_tokens[entry]), stop)
                if first >= end:
                    continue
                before = int(traced.first_tokens[entry])
                here = Stretch(
                    file=int(chunk.file[entry]),
                    place=int(chunk.place[entry]),
                    output=chunk.output_of(entry),
                    epoch=chunk.epoch,
                    begin=first - start,
                    num_tokens=end - first,
                    first_token=None if before < 0 else before + first - begin,
                    begins=before == 0 and first == begin,
                    ends=end == begin + int(chunk.num_tokens[entry]) and _is_last(chunk, entry),
                )
                same = document == (place := _document(chunk, entry))
                found[-1:] = [_joined(found[-1], here)] if same else [*found[-1:], here]
                document = place
        return found

    def _take(self, chunk: TokenChunk, begin: int) -> None:
        skipped = self._to_skip
        super()._take(chunk, begin)
        begins = np.cumsum(chunk.num_tokens, dtype=np.int64) - chunk.num_tokens
        numbers = np.arange(len(begins))
        heads = np.maximum.accumulate(np.where(chunk.piece == 0, numbers, -1)) if len(begins) else numbers
        first_tokens = np.where(heads >= 0, begins - begins[heads], begins + self._document_tokens)
        self._traced.append(_Traced(chunk=chunk, begins=begins + begin - skipped, first_tokens=first_tokens))
        if len(begins):
            self._document_tokens = int(first_tokens[-1]) + int(chunk.num_tokens[-1])


def _document(chunk: TokenChunk, entry: int) -> tuple[int, ...]:
    return (chunk.epoch, chunk.block, chunk.window, int(chunk.record[entry]), chunk.output_of(entry))


def _is_last(chunk: TokenChunk, entry: int) -> bool:
    """Whether no token of the entry's document follows the entry's; a piece may have no tokens."""
    document = _document(chunk, entry)
    while not chunk.last_piece[entry]:
        entry += 1
        if entry == len(chunk.record) or _document(chunk, entry) != document or chunk.num_tokens[entry]:
            return False
    return True


def _joined(one: Stretch, more: Stretch) -> Stretch:
    """Joins two consecutive stretches of one document."""
    return Stretch(
        file=one.file,
        place=one.place,
        output=one.output,
        epoch=one.epoch,
        begin=one.begin,
        num_tokens=one.num_tokens + more.num_tokens,
        first_token=one.first_token,
        begins=one.begins,
        ends=more.ends,
    )
