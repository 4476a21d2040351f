"""Encodes the documents of a stream again with `tokenizers`: the independent check of `audit --reference`.

The second stream is made from the files again, so it shares only the encoders' input with the run's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import TOKENIZERS, difference_text, installed_version
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan, Place, encoder_at
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import PIECE, Int32Array, TokenChunk

SHOWN = 20  # number of differences that are named; all are counted
MOST = 100_000  # per stretch, because each is held in memory
_IDS_FROM = " its ids from "  # the text of `difference_text` continues after it


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingDifference:
    """A piece of a document that `tokenizers` encodes differently than the run did."""

    source: str
    at: Place
    output: int  # number of the document among those that its record gives
    piece: int
    file: int  # number in the manifest
    place: int  # of the record in the file: byte, or row
    encoder: str  # the run's, with its version
    text: str  # both ids, from where they differ


def reference_choice(spec: DataSpec) -> EncoderChoice:
    """The choice of the installed `tokenizers`. Raises `RefusedError` where it can show nothing."""
    if spec.tokenizer.native is not None:
        raise RefusedError(
            "--reference encodes with tokenizers, which gives other ids than the run's tokenizer of "
            f"{spec.tokenizer.native.library} ({spec.tokenizer.native.difference}); audit without "
            "--reference",
            code="audit.no_reference",
        )
    if all(span.encoder.name == TOKENIZERS for span in spec.encoders):
        raise RefusedError(
            "--reference encodes with tokenizers, but the run itself was encoded with "
            f"{spec.encoders[-1].encoder}, so it adds no check; audit without --reference",
            code="audit.no_reference",
        )
    return EncoderChoice(name=TOKENIZERS, version=installed_version(TOKENIZERS) or "")


class ReferenceEncoding:
    """One source's stream from a cursor on, by `tokenizers`, to be compared with the run's."""

    def __init__(self, spec: DataSpec, cursor: Cursor, source: str) -> None:
        self.differences: list[EncodingDifference] = []
        self._spec, self._source = spec, source
        by_reference = spec.endless().made_by((EncoderSpan(encoder=reference_choice(spec)),))
        # pieces opened inside are the same for both, for the cursor names no byte of one
        self._pieces = _pieces(by_reference.chunks(cursor, source))

    def compare(self, chunks: Iterable[TokenChunk]) -> Iterator[TokenChunk]:
        """The run's own chunks, each compared before it is passed on."""
        for chunk in chunks:
            for piece in _pieces([chunk]):
                self._compare(piece, next(self._pieces))
            yield chunk

    def _compare(self, mine: _Piece, other: _Piece) -> None:
        assert (mine.at, mine.output, mine.piece) == (other.at, other.output, other.piece), (
            "both streams have the same pieces"
        )
        if mine.tokens.tobytes() == other.tokens.tobytes():
            return
        encoder = encoder_at(self._spec.encoders, self._source, mine.at)
        if len(self.differences) == MOST:
            raise DataIdentityError(
                f"tokenizers gives other ids than {encoder} for more than {MOST:,} documents of source "
                f"{self._source}, e.g. {self.differences[0].text}: they do not agree on this tokenizer, so "
                "--reference cannot check the run's steps; audit without it, or fewer --steps",
                code="audit.reference_differs",
            )
        settings = self._spec.settings
        ends = (settings.bos_id if mine.piece == 0 else None, settings.eos_id if mine.is_last else None)
        # masked documents have their own beginnings and ends, which are shown with them
        bare = [_without(tokens, ends) if mine.is_text else tokens for tokens in (mine.tokens, other.tokens)]
        self.differences.append(
            EncodingDifference(
                source=self._source,
                at=mine.at,
                output=mine.output,
                piece=mine.piece,
                file=mine.file,
                place=mine.place,
                encoder=str(encoder),
                text=difference_text("", *bare).partition(_IDS_FROM)[2],
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    at: Place
    output: int
    piece: int
    is_last: bool
    is_text: bool
    file: int
    place: int
    tokens: Int32Array


def _pieces(chunks: Iterable[TokenChunk]) -> Iterator[_Piece]:
    for chunk in chunks:
        borders = pairwise([0, *np.cumsum(chunk.num_tokens, dtype=np.int64).tolist()])
        names = ("record", "outputs", "piece", "kind", "last_piece", "file", "place")
        columns = [getattr(chunk, name).tolist() for name in names]
        for (start, stop), record, output, piece, kind, last, file, place in zip(
            borders, *columns, strict=True
        ):
            if kind == PIECE:
                yield _Piece(
                    at=(chunk.epoch, chunk.block, chunk.window, record),
                    output=output,
                    piece=piece,
                    is_last=last == 1,
                    is_text=chunk.loss is None,
                    file=file,
                    place=place,
                    tokens=chunk.tokens[start:stop],
                )


def _without(tokens: Int32Array, ends: tuple[int | None, int | None]) -> Int32Array:
    """The text's own ids, without BOS and EOS."""
    bos, eos = (0 if end is None else 1 for end in ends)
    return tokens[bos : len(tokens) - eos]


def reference_report(
    spec: DataSpec,
    found: Sequence[EncodingDifference],
    ends: dict[str, SourceCursor],
    journalled: Collection[str],
) -> dict[str, Any]:
    """What `audit --json` says of it: of differences in what was trained before `ends`, `journalled` ones (by
    the texts of the journal's lines) and others, of which the first ones are named.
    """
    packed = spec.settings.pack_mode != "concat"
    last = {source: _last_of(end, packed) for source, end in ends.items()}
    each = {(one.source, one.at, one.output, one.piece): one for one in found if one.at <= last[one.source]}
    documents: dict[tuple[str, Place, int], EncodingDifference] = {}
    for (source, at, output, _), one in sorted(each.items()):
        documents.setdefault((source, at, output), one)
    others, known = list[str](), 0
    for one in documents.values():
        manifest = spec.plan_of(one.source, one.at[0]).manifest
        path, place = manifest.path(one.file), f"{manifest.unit} {one.place}"
        # a line names the file as its path was then
        named = re.compile(
            rf"{re.escape(path.rpartition('/')[2])}.*{place}\b.*{re.escape(one.encoder)}: ", re.DOTALL
        )
        if any(line.endswith(one.text) and named.search(line) for line in journalled):
            known += 1
            continue
        where = f"epoch {one.at[0]}, the document at {place} of {path}"
        others.append(f"{where}: by {one.encoder} its ids from {one.text}")
    return {
        "encoder": str(reference_choice(spec)),
        "documents_journalled": known,
        "documents_not_journalled": len(others),
        "not_journalled": others[:SHOWN],
    }


def _last_of(end: SourceCursor, packed: bool) -> Place:
    """The last document of which a token was trained; where whole ones are packed, of which one may have
    been: the last of the window at hand, and none of it if no pack was taken.
    """
    record = end.record if not packed else (1 << 62 if end.packs else -1)
    return end.epoch, end.block, end.window, record
