"""One source's stream from a cursor on, made by the audit's own packer, and what of it was trained.

`inspect.audit.stream_recheck` determines which samples were trained.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from orchestrator.data.spec import DataSpec
from orchestrator.inspect.audit.checksums.epoch_checksum import EpochChecksums, EpochTotals
from orchestrator.inspect.audit.reference.reference_encoding import EncodingDifference, ReferenceEncoding
from orchestrator.inspect.audit.reference.reference_packing import (
    NO_DOCUMENT,
    NO_TARGET,
    NO_TOKEN,
    ReferencePacker,
    Samples,
)
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows, SamplePart, content_of
from orchestrator.inspect.audit.sample_check import TrainedTokens
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import BoolArray, Int32Array, TokenChunk

# Of each part of a unit (`reference_windows.WindowContent`): its tokens, and which labels are masked.
_Held = list[tuple[Int32Array, BoolArray]]


# Verifies the content of samples where whole documents are packed, independently of their packer.
#
# Each document of a window must occur once: whole, or in stretches if it is too long.
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
