"""One source's stream from a cursor on, made by the audit's own packer, and what of it was trained.

`inspect.audit.stream_recheck` determines which samples were trained. `TrainedTokens` verifies their content
independently of their packer: their labels, in order, are the trained stream and must equal the tokens of the
chunks. `TrainedDocuments` does so where whole documents are packed: each document of a window must occur
once, whole, or in stretches if it is too long.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.spec import DataSpec
from orchestrator.inspect.audit.epoch_checksum import EpochChecksums, EpochTotals
from orchestrator.inspect.audit.reference.reference_encoding import EncodingDifference, ReferenceEncoding
from orchestrator.inspect.audit.reference.reference_packing import (
    NO_DOCUMENT,
    NO_TARGET,
    NO_TOKEN,
    ReferencePacker,
    Samples,
)
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows, SamplePart, content_of
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import BoolArray, Int32Array, TokenChunk


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStretch:
    """What a part of the history took of a source, from `begin` to `end`.

    `up_to_end` is what lies before the document (the window, where whole ones are packed) of `end`, which the
    next part counts, and `at_end` what else was trained if none follows. `ends_data`: `end` is its epoch's
    last token. `fault`: where the samples do not hold the documents' tokens.
    """

    begin: SourceCursor
    end: SourceCursor
    before_wanted: SourceCursor  # the begin of the first requested step
    up_to_end: EpochTotals = field(default_factory=EpochTotals)
    at_end: EpochTotals = field(default_factory=EpochTotals)
    ends_data: bool = False
    fault: str | None = None
    walked: bool = False
    differences: tuple[EncodingDifference, ...] = ()  # between the run's encoder and `tokenizers`


Stretches = dict[tuple[str, int], SourceStretch]
"""By source, and the start of the lists that it followed (`planning.resume.source_lists`)."""


class SourceWalk:
    """The stream from a cursor on, and the trained samples of it."""

    def __init__(
        self,
        spec: DataSpec,
        source: str,
        begin: SourceCursor,
        packer: type[ReferencePacker],
        windows: type[ReferenceWindows] = ReferenceWindows,
        by_reference: bool = False,
    ) -> None:
        """`by_reference`: each document is encoded by `tokenizers`, too."""
        self.begin, cursor = begin, Cursor(sources={source: begin})
        chunks = spec.endless().chunks(cursor, source)
        self._encoding = ReferenceEncoding(spec, cursor, source) if by_reference else None
        if self._encoding is not None:
            chunks = self._encoding.compare(chunks)
        self._trained: TrainedTokens | TrainedDocuments
        self.packer: ReferencePacker | ReferenceWindows
        if spec.settings.pack_mode == "concat":
            self._trained = TrainedTokens(self.begin.earlier_tokens + self.begin.token)
            self.packer = packer(self._trained.watch(chunks), self.begin)
        else:
            settings = spec.settings
            self._trained = TrainedDocuments(
                self.begin.packs, settings.long_document, settings.rows_per_sample
            )
            self.packer = windows(self._trained.watch(chunks), self.begin, spec.settings)
        self._num_blocks = partial(spec.num_blocks, source)
        self._walked = False
        self.before_wanted = SourceCursor()  # the begin of the first requested step

    def take(self, num_tokens: int, seq_len: int) -> tuple[Samples, str | None]:
        """Returns its next samples, and a fault within them, if any."""
        self._walked = True
        found = self.packer.samples(num_tokens, seq_len)
        if isinstance(self.packer, ReferenceWindows) and isinstance(self._trained, TrainedDocuments):
            passed, self.packer.passed_packs = self.packer.passed_packs, []
            if wrong := self._trained.pass_over(passed, self.begin.pack_seq_len):
                return found, wrong
        return found, self._trained.add(found, num_tokens)

    def place(self) -> SourceCursor:
        """The place of the next input token."""
        return self.packer.cursor() if self._walked else self.begin

    def stretch(self, may_be_last: bool) -> SourceStretch:
        """After the last step. If it is not the source's last stretch, what lies behind its end is not looked
        at.
        """
        end = self.place()
        common = {"begin": self.begin, "end": end, "before_wanted": self.before_wanted}
        if not self._walked:
            return SourceStretch(**common)  # type: ignore[arg-type]
        self._trained.border(end)
        up_to_end = self._trained.checksums.take()
        ends_data = may_be_last and not at_border(end) and self.packer.ends_epoch(self._num_blocks(end.epoch))
        fault = self._trained.end()
        return SourceStretch(
            **common,
            up_to_end=up_to_end,
            at_end=self._trained.checksums.take(),
            ends_data=ends_data,
            fault=fault,
            walked=True,
            differences=() if self._encoding is None else tuple(self._encoding.differences),
        )


def at_border(cursor: SourceCursor) -> bool:
    """Whether the cursor names an epoch's beginning."""
    place = (cursor.block, cursor.window, cursor.record, cursor.output, cursor.piece, cursor.token)
    return not any((*place, cursor.packs))


# --------------------------------------------------------------------------------- tokens one after the other
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


# -------------------------------------------------------------------------------------------- whole documents
# Of each part of a unit (`reference_windows.WindowContent`): its tokens, and which labels are masked.
_Held = list[tuple[Int32Array, BoolArray]]


class _Expected:
    """A window's units that no sample has held yet."""

    def __init__(
        self, chunks: list[TokenChunk], seq_len: int, long_document: str, rows_per_sample: int
    ) -> None:
        content = content_of(chunks, seq_len, long_document, rows_per_sample)
        self.unpacked = content.without_target, content.too_long
        self.num_left = self.num_units = len(content.units)
        self._left: dict[tuple[bytes, ...], list[list[SamplePart]]] = defaultdict(list)
        for unit in content.units:
            self._left[tuple(part.tokens.tobytes() for part in unit)].append(unit)

    def take(self, held: _Held) -> str | None:
        """Takes what a sample holds. Returns why it should not hold that; None if it should."""
        found = self._left.get(tuple(tokens.tobytes() for tokens, _ in held))
        if found is None:
            return "are no document, nor a stretch of one that is too long"
        if not found:
            return "are a document that was trained already"
        here = next((i for i, unit in enumerate(found) if _has_masks(unit, held)), None)
        if here is None:
            return "are a document with another loss mask"
        found.pop(here)
        self.num_left -= 1
        return None


def _has_masks(unit: Sequence[SamplePart], held: _Held) -> bool:
    masks = zip(unit, held, strict=True)
    return all(np.array_equal(~part.loss[1:], masked) for part, (_, masked) in masks)


class TrainedDocuments:
    """The samples from a cursor on, in order, compared with the chunks that they are made of.

    Of the first window `packs_before` packs lie before the cursor; `pass_over` takes them, too. `checksums`
    counts a window when all its documents have been in samples. It also counts, by epoch, the documents that
    were in no pack: those without a target, and those that were too long.
    """

    def __init__(self, packs_before: int, long_document: str, rows_per_sample: int = 1) -> None:
        self.checksums = EpochChecksums()
        self._partial, self._long_document = packs_before > 0, long_document
        self._rows_per_sample = rows_per_sample
        self._coming: list[TokenChunk] = []
        self._windows: deque[list[TokenChunk]] = deque()  # whose documents are not all trained
        self._expected: _Expected | None = None  # of the first of them
        self._seq_len = 0

    def watch(self, chunks: Iterable[TokenChunk]) -> Iterator[TokenChunk]:
        """Passes on the chunks, and notes them."""
        for chunk in chunks:
            self._coming.append(chunk)
            if chunk.ends_window:
                self._windows.append(self._coming)
                self._coming = []
            yield chunk

    def add(self, samples: Samples, num_tokens: int) -> str | None:
        """Adds the samples of the next step. Returns a fault in them, or None.

        Document ids begin at 0 and rise by 1 at a time. Padding is at the end and in all three arrays alike.
        Labels are the inputs one token further within a document. Each document is the window's. Of samples
        with several rows, that holds for each row, which has one document.
        """
        del num_tokens
        self._seq_len = samples.input_ids.shape[1]
        num_rows = self._rows_per_sample
        columns = (samples.input_ids, samples.labels, samples.document_ids, samples.masked)
        for sample in zip(*(column.reshape(len(column), num_rows, -1) for column in columns), strict=True):
            rows = [_documents_in(number, *row) for number, row in enumerate(zip(*sample, strict=True))]
            if (fault := next((row for row in rows if isinstance(row, str)), None)) is not None:
                return fault
            held = [row for row in rows if not isinstance(row, str)]
            if num_rows > 1 and any(len(row) != 1 for row in held):
                return "a row of its samples does not hold one document"
            for unit in [[each] for each in held[0]] if num_rows == 1 else [[row[0] for row in held]]:
                if reason := self._take(unit):
                    return reason
        return None

    def pass_over(self, packs: Sequence[Sequence[SamplePart]], seq_len: int) -> str | None:
        """Takes the packs that lie before the cursor in its window. The digest in the cursor shows that they
        were trained. Returns a fault in them, or None.
        """
        if packs:
            self._seq_len, self._partial = seq_len, False
        for pack in packs:
            parts = [(part.tokens, ~part.loss[1:]) for part in pack]
            for unit in [[part] for part in parts] if self._rows_per_sample == 1 else [parts]:
                if reason := self._take(unit):
                    return reason
        return None

    def border(self, at: SourceCursor) -> None:
        """Counts what lies before the window of `at`, if it is not counted yet. A stretch that begins there
        counts that window and what follows.
        """
        self._pass_done((at.epoch, at.block, at.window))

    def end(self) -> str | None:
        """Counts all that was trained, after the last step and `border`. `add` and the sums report faults."""
        expected = self._pass_done()
        if expected is not None and expected.num_left < expected.num_units:
            for chunk in self._windows[0]:
                self.checksums.note_records(chunk)
        return None

    def _take(self, held: _Held) -> str | None:
        expected = self._pass_done()
        if expected is None:
            return "it has more documents than the windows that were read"
        reason = expected.take(held)
        if reason is not None and self._partial:  # the rest of the first window was trained before
            self._windows.popleft()
            self._expected, self._partial = None, False
            return self._take(held)
        if reason is None:
            return None
        at, num = self._windows[0][0], sum(len(tokens) for tokens, _ in held)
        return (
            f"{num} tokens of a sample {reason}, in epoch {at.epoch}, block {at.block}, window {at.window}"
        )

    def _pass_done(self, before: tuple[int, int, int] | None = None) -> _Expected | None:
        """Counts the windows (those `before`: epoch, block, window) of which all is trained; the next one."""
        while self._windows:
            first = self._windows[0][0]
            if before is not None and (first.epoch, first.block, first.window) >= before:
                return None
            if self._expected is None:
                self._expected = _Expected(
                    self._windows[0], self._seq_len, self._long_document, self._rows_per_sample
                )
            if self._expected.num_left:
                return self._expected
            for chunk in self._windows.popleft():
                self.checksums.note_records(chunk)
                if not self._partial:
                    self.checksums.count(chunk, chunk.tokens)
            if not self._partial:
                unpacked = self.checksums.totals.unpacked
                more, so_far = self._expected.unpacked, unpacked[first.epoch]
                unpacked[first.epoch] = so_far[0] + more[0], so_far[1] + more[1]
            self._expected, self._partial = None, False
        return None


def _documents_in(
    first: int, inputs: Int32Array, labels: Int32Array, documents: Int32Array, masked: BoolArray
) -> _Held | str:
    """The documents of a row, whose ids begin at `first`. A text is the fault in the row."""
    num = int((documents != NO_DOCUMENT).sum())
    rises = np.diff(documents[:num], prepend=first)
    if not num or not np.isin(rises, (0, 1)).all() or rises[0]:
        return "its document ids do not count 0, 1, … in each sample"
    behind = (inputs[num:] == NO_TOKEN) & (labels[num:] == NO_TARGET)
    if not behind.all() or (documents[num:] != NO_DOCUMENT).any() or (labels[:num] < 0).any():
        return "padding is not all that follows the last document of a sample"
    borders, found = [0, *np.flatnonzero(rises).tolist(), num], _Held()
    for start, stop in zip(borders, borders[1:], strict=False):
        if (inputs[start + 1 : stop] != labels[start : stop - 1]).any():
            return "its labels are not its inputs one token further within a document"
        tokens = np.append(inputs[start:stop], labels[stop - 1]).astype(np.int32)
        found.append((tokens, masked[start:stop]))
    return found
