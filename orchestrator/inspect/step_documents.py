"""Finds the documents that a step of the history was trained on: the document of `samples --json`.

It follows the stream as the audit does, from the nearest cursor in the journal on, and verifies it with the
journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from orchestrator.coordinator.attempt.survey import Survey
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.access.compressed import COMPRESSED
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.sources.records.line_records import line_numbers
from orchestrator.data.spec import DataSpec
from orchestrator.errors import RefusedError
from orchestrator.history.step_names import find_steps, names_steps, no_step, numbering_note, step_name
from orchestrator.inspect.audit.reference.reference_packing import ReferencePacker, Samples
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows
from orchestrator.inspect.audit.reference.reference_windows import SamplePart as Content
from orchestrator.inspect.audit.trained_data import Walk
from orchestrator.records.cursor import SourceCursor
from orchestrator.records.steps import DocumentLoss
from orchestrator.records.tokens import PIECE, Int32Array, Int64Array, TokenChunk


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentSpan:
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

    @override
    def samples(self, num_tokens: int, seq_len: int) -> Samples:
        self._first = self._position
        while self._traced and self._traced[0].stop <= self._first:
            self._traced.popleft()
        return super().samples(num_tokens, seq_len)

    def stretches(self, start: int, stop: int) -> list[DocumentSpan]:
        """The documents of input tokens [start, stop), counted from the newest samples' first, in order."""
        found = list[DocumentSpan]()
        document: tuple[int, ...] = ()
        for traced in self._traced:
            chunk, shift = traced.chunk, self._first
            for entry in np.flatnonzero(chunk.num_tokens).tolist():
                begin = int(traced.begins[entry]) - shift
                first, end = max(begin, start), min(begin + int(chunk.num_tokens[entry]), stop)
                if first >= end:
                    continue
                before = int(traced.first_tokens[entry])
                here = DocumentSpan(
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


def _joined(one: DocumentSpan, more: DocumentSpan) -> DocumentSpan:
    """Joins two consecutive stretches of one document."""
    return DocumentSpan(
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


# -------------------------------------------------------------------------------------------- whole documents
@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    file: int
    place: int
    output: int
    num_tokens: int


class TracingWindows(ReferenceWindows):
    """The audit's packer of whole documents. Keeps the content of its newest samples, for `stretches`."""

    def __init__(self, chunks: Iterator[TokenChunk], cursor: SourceCursor, settings: StreamSettings) -> None:
        super().__init__(chunks, cursor, settings)
        self._newest: list[tuple[list[TokenChunk], list[Content]]] = []  # a window and a pack for each sample
        self._capacity = 0

    @override
    def samples(self, num_tokens: int, seq_len: int) -> Samples:
        self._newest, self._capacity = [], seq_len
        found = super().samples(num_tokens, seq_len)
        # packs before the cursor were taken on the way and are no samples of this call
        self._newest = self._newest[-len(found.input_ids) :]
        return found

    def stretches(self, start: int, stop: int) -> list[DocumentSpan]:
        """The documents of the sample with positions [start, stop), counted from the newest samples' first:
        each has `seq_len` of them, padding included. Input tokens; the last label follows them.
        """
        assert stop - start <= self._capacity, "the positions are those of one sample"
        chunks, pack = self._newest[start // self._capacity]
        documents, begin, found = _documents(chunks), 0, list[DocumentSpan]()
        num_rows = self._settings.rows_per_sample
        for content in pack:
            document = documents[content.document]
            begin = max(begin, content.row * (self._capacity // num_rows))
            found.append(
                DocumentSpan(
                    file=document.file,
                    place=document.place,
                    output=document.output,
                    epoch=chunks[0].epoch,
                    begin=begin,
                    num_tokens=content.size,
                    first_token=content.first_token,
                    begins=num_rows > 1 or content.first_token == 0,
                    ends=num_rows > 1 or content.first_token + len(content.tokens) == document.num_tokens,
                )
            )
            begin += content.size
        return found

    def _take(self) -> list[Content]:
        while self._taken == len((window := next(self._coming())).packs):
            self._leave()
        pack = super()._take()
        self._newest.append((window.chunks, pack))
        return pack


def _documents(chunks: list[TokenChunk]) -> list[_Document]:
    """The documents of a window, in order, without bad and empty ones."""
    found, num_tokens = list[_Document](), 0
    for chunk in chunks:
        for entry, kind in enumerate(chunk.kind.tolist()):
            if kind != PIECE:
                continue
            num_tokens += int(chunk.num_tokens[entry])
            if chunk.last_piece[entry]:
                file, place = int(chunk.file[entry]), int(chunk.place[entry])
                output = chunk.output_of(entry)
                found.append(_Document(file=file, place=place, output=output, num_tokens=num_tokens))
                num_tokens = 0
    return found


_LINES = ("jsonl", "lines")  # formats with a record per line


def only_step(seen: Survey, step: str) -> int:
    """Returns the index of the step's record in the history.

    Raises `RefusedError` for a step that the history does not have, and for a name of several.
    """
    if not names_steps(step):
        raise no_step(step)
    wanted = find_steps(seen.lineage.records, step)
    if len(wanted) != 1:
        raise RefusedError(
            f"{step!r} names {len(wanted)} steps; name one, e.g. 250 or a2:250", code="command.several_steps"
        )
    return wanted.start


def step_documents(
    spec: DataSpec, seen: Survey, step: str, text: bool, worst: Sequence[DocumentLoss] | None = None
) -> dict[str, Any]:
    """The documents of the step: for each sample `index`, `source`, `tokens`, and its `documents` in order.

    Each document has `file`, `unit` and `place` (byte or row), `line` (None where it is not counted:
    compressed files, rows), `output` (its number among those that transforms made of the record), `epoch`,
    `first_token` and `end_token` within the document's tokens (the end is not included; None if unknown),
    `begins` and `ends`: whether the stretch has the document's first and last token; with `text`, the
    stretch's tokens decoded.

    These are input tokens; the last label is the token after them. Where whole documents are packed
    (`bestfit`, `pad`), each document, or stretch of one that is too long, has a last label of its own: the
    token at `end_token`. It is the document's last token where the stretch `ends`, and its text then has it.
    `tokens` of a sample are those of its documents, without padding.

    `matches`: the journal's digest of the step is that of these samples. `difference` is the fault; there may
    be no samples then. `note`: that the step's number belongs to another counting than the newest steps'
    (None if not). `by_loss` has, for each of `worst`, the document with its `loss` and `targets`, the
    sample's `index` and `source`, and `document`, its number in the sample (None without `worst`).

    Raises `RefusedError` for a step that the history does not have, `DataIdentityError` if an attempt was
    configured to continue with changed files and they differ.
    """
    records, index = seen.lineage.records, only_step(seen, step)
    wanted = range(index, index + 1)
    seen.require_steps(wanted)
    walk = Walk(spec, seen, records, index, packer=TracingPacker, windows=TracingWindows)
    difference = next(walk.differences(wanted), None)
    name = step_name(records, index)
    found = list(_samples(spec, walk, text)) if difference is None or difference["step"] == name else []
    return {
        "step": name,
        "digest": records[index].digest,
        "matches": difference is None,
        "difference": difference and difference["reason"],
        "note": numbering_note(records, index),
        "samples": found,
        "by_loss": None if worst is None else list(_by_loss(found, worst)),
    }


def _by_loss(samples: Sequence[dict[str, Any]], worst: Sequence[DocumentLoss]) -> Iterator[dict[str, Any]]:
    of_index = {sample["index"]: sample for sample in samples}
    for each in worst:
        sample = of_index.get(each.sample)
        if sample is not None and each.document < len(sample["documents"]):
            yield {
                "loss": each.loss,
                "targets": each.targets,
                "index": each.sample,
                "source": sample["source"],
                "document": each.document,
                **sample["documents"][each.document],
            }


def _samples(spec: DataSpec, walk: Walk, text: bool) -> Iterator[dict[str, Any]]:
    """The samples of the step that was walked last."""
    step = walk.newest
    if step is None:
        return
    decode = _decoder(spec) if text else None
    passed = dict.fromkeys((source.name for source in spec.sources), 0)
    for number, (source, num_tokens) in enumerate(step.turns):
        packer = walk.packer(source)
        assert isinstance(packer, (TracingPacker, TracingWindows)), "the walk was begun with them"
        stretches = packer.stretches(passed[source], passed[source] + num_tokens)
        passed[source] += num_tokens
        inputs = step.samples.input_ids[number]
        documents = [_shown(spec.plan_of(source, each.epoch).manifest, each) for each in stretches]
        if decode is not None:
            labels = step.samples.labels[number] if isinstance(packer, TracingWindows) else None
            for document, stretch in zip(documents, stretches, strict=True):
                document["text"] = decode(_tokens(inputs, labels, stretch))
        yield {
            "index": step.first_index + number,
            "source": source,
            "tokens": sum(stretch.num_tokens for stretch in stretches),
            "documents": documents,
        }


def _tokens(inputs: Int32Array, labels: Int32Array | None, stretch: DocumentSpan) -> Int32Array:
    """The stretch's tokens in a sample. With `labels` also the last one of a document that ends there, which
    is no input.
    """
    stop = stretch.begin + stretch.num_tokens
    tokens = inputs[stretch.begin : stop]
    return tokens if labels is None or not stretch.ends else np.append(tokens, labels[stop - 1])


def _shown(manifest: Manifest, stretch: DocumentSpan) -> dict[str, Any]:
    first, num = stretch.first_token, stretch.num_tokens
    return {
        "file": manifest.path(stretch.file),
        "unit": manifest.unit,
        "place": stretch.place,
        "line": _line(manifest, stretch),
        "output": stretch.output,
        "epoch": stretch.epoch,
        "tokens": num,
        "first_token": first,
        "end_token": None if first is None else first + num,
        "begins": stretch.begins,
        "ends": stretch.ends,
    }


def _line(manifest: Manifest, stretch: DocumentSpan) -> int | None:
    row, path = manifest.files[stretch.file], manifest.path(stretch.file)
    if manifest.format not in _LINES or path.endswith(COMPRESSED):
        return None
    before = line_numbers(manifest.base, row.path, row.bytes, row.probe).newlines_before(stretch.place)
    return None if before is None else before + 1


def _decoder(spec: DataSpec) -> Callable[[Int32Array], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(spec.tokenizer.model_json)

    def decode(tokens: Int32Array) -> str:
        text: str = tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)
        return text

    return decode


def sample_rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each document of each sample, for a table."""
    for sample in found["samples"]:
        for number, document in enumerate(sample["documents"]):
            yield {"index": sample["index"], "source": sample["source"], "document": number, **document}
