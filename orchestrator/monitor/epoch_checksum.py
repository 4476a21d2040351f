"""What an epoch holds whatever its order: the second half of an audit, which needs neither order nor packer.

`checksum_files` reads whole files, one after the other; `EpochChecksums` count what was trained.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from orchestrator.data.settings import StreamSettings
from orchestrator.data.sources.documents import bare
from orchestrator.data.sources.manifest import Manifest
from orchestrator.data.sources.readers import read_files
from orchestrator.data.sources.windows import BadRecordError, OrderedWindow, Window
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.data.tokens.encoder import Encoder, Pieces
from orchestrator.data.tokens.masked import MaskedEncoder
from orchestrator.data.transforms import Output, Transforms, utf8_size
from orchestrator.errors import DataError
from orchestrator.monitor.epoch_records import EpochRecords
from orchestrator.planning import record_keys
from orchestrator.planning.encoders import EncoderChoice
from orchestrator.records import BAD, EMPTY, FILTERED, HELD_OUT, PIECE, Int32Array, TokenChunk

# Documents are encoded in batches of about so many bytes of text; the fixed cost of a call vanishes in it.
_BATCH_BYTES = 1 << 20
_Origin = tuple[int, int, int]  # number of the file, place in it, number of the record's document


EpochFiles = tuple[str, int, EncoderChoice]
"""The files that an epoch of a source reads, as an encoder makes them: of epochs with one list, the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochChecksum:
    """`documents` are those with text. The digests are sums modulo 2^64 over these, of the xxh3_64 of (file,
    place), and of (file, place, tokens with BOS and EOS): little-endian, int64 twice and int32. Of the
    documents of one record that come after its first, their number stands after the place, as an int64.
    """

    documents: int = 0
    empty: int = 0
    bad: int = 0
    filtered: int = 0
    held_out: int = 0
    places: int = 0
    tokens: int = 0
    digest: int = 0

    def without_tokens(self) -> EpochChecksum:
        """What it says of documents only."""
        return replace(self, tokens=0, digest=0)

    def __add__(self, other: EpochChecksum) -> EpochChecksum:
        """Those of other documents of the epoch, too."""
        return EpochChecksum(
            documents=self.documents + other.documents,
            empty=self.empty + other.empty,
            bad=self.bad + other.bad,
            filtered=self.filtered + other.filtered,
            held_out=self.held_out + other.held_out,
            places=(self.places + other.places) % 2**64,
            tokens=self.tokens + other.tokens,
            digest=(self.digest + other.digest) % 2**64,
        )

    def __str__(self) -> str:
        tokens = f", {self.tokens:,} tokens, sum of digests {self.digest:016x}" if self.tokens else ""
        left_out = "".join(
            f", {num:,} {what}"
            for num, what in ((self.filtered, "dropped by transforms"), (self.held_out, "held out"))
            if num
        )
        return (
            f"{self.documents:,} documents, {self.empty:,} empty and {self.bad:,} bad ones{left_out}, sum of "
            f"places {self.places:016x}{tokens}"
        )


class EpochTotals:
    """What the epochs of a source held, of a stretch of its stream; stretches are joined. Pickles."""

    def __init__(self) -> None:
        self.sums: dict[int, EpochChecksum] = defaultdict(EpochChecksum)
        self.records: dict[int, EpochRecords] = defaultdict(EpochRecords)
        # documents in no sample, where whole ones are packed: without a target, and too long
        self.unpacked: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def __reduce__(self) -> Any:
        return _totals, (dict(self.sums), dict(self.records), dict(self.unpacked))

    def join(self, later: EpochTotals) -> None:
        """The stretch that follows."""
        for epoch, more in later.sums.items():
            self.sums[epoch] = self.sums[epoch] + more
        for epoch, records in later.records.items():
            self.records[epoch].join(records)
        for epoch, (without_target, too_long) in later.unpacked.items():
            before = self.unpacked[epoch]
            self.unpacked[epoch] = before[0] + without_target, before[1] + too_long


def _totals(sums: Any, records: Any, unpacked: Any) -> EpochTotals:
    made = EpochTotals()
    made.sums.update(sums)
    made.records.update(records)
    made.unpacked.update(unpacked)
    return made


class EpochChecksums:
    """What the epochs hold of a stream that comes by chunk by chunk, from any place on. A document counts
    when its last piece has come.
    """

    def __init__(self) -> None:
        self.totals = EpochTotals()
        self._hasher: Any = None  # of the document at hand; None: its beginning did not come by
        self._num_tokens = 0  # of it

    def take(self) -> EpochTotals:
        """What was counted so far; what follows is counted from nothing on."""
        found, self.totals = self.totals, EpochTotals()
        return found

    def note_records(self, chunk: TokenChunk) -> None:
        """Its records came by, for `twice`; one with the last piece of its first document."""
        self._add_places(chunk, (chunk.last_piece == 1) & (chunk.outputs == 0))

    def note_unfinished(self, chunk: TokenChunk) -> None:
        """Of the record that it begins with a part came by."""
        first = np.zeros(len(chunk.kind), np.bool_)
        first[:1] = chunk.outputs[:1] == 0
        self._add_places(chunk, first)

    def _add_places(self, chunk: TokenChunk, which: npt.NDArray[np.bool_]) -> None:
        places = np.stack([chunk.file[which], chunk.place[which]], axis=1).astype(np.int64)
        self.totals.records[chunk.epoch].add(chunk.block, places)

    def of(self, epoch: int) -> EpochChecksum:
        """What of this epoch was counted."""
        return self.totals.sums[epoch]

    def twice(self, epoch: int) -> tuple[int, int] | None:
        """(file, place) of a record of this epoch that came by twice, None if there is none."""
        return self.totals.records[epoch].twice()

    def count(self, chunk: TokenChunk, tokens: Int32Array) -> None:
        """Its entries, with these `tokens` (as many as it has) for theirs. In order, each chunk once."""
        is_piece = chunk.kind == PIECE
        bytes_ = np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8).data
        outputs = chunk.outputs[is_piece]
        columns = chunk.file[is_piece], chunk.place[is_piece], outputs
        held = np.stack(columns, axis=1).astype("<i8").tobytes()
        sizes = np.where(outputs == 0, 16, 24).tolist()
        origins = [held[24 * i : 24 * i + size] for i, size in enumerate(sizes)]
        borders = chunk.piece[is_piece] == 0, chunk.last_piece[is_piece] == 1
        stops = 4 * np.cumsum(chunk.num_tokens[is_piece], dtype=np.int64)
        documents = places = digest = num_tokens = start = 0
        hasher = self._hasher
        pieces = zip(*(column.tolist() for column in (*borders, stops)), strict=True)
        for i, (is_first, is_last, stop) in enumerate(pieces):
            if is_first:
                hasher = xxh3_64(origins[i])
                self._num_tokens = 0
            if hasher is not None:
                hasher.update(bytes_[start:stop])
                self._num_tokens += (stop - start) // 4
                if is_last:
                    documents += 1
                    digest += hasher.intdigest()
                    places += xxh3_64_intdigest(origins[i])
                    num_tokens += self._num_tokens
                    hasher = None
            start = stop
        self._hasher = hasher
        self.totals.sums[chunk.epoch] += EpochChecksum(
            documents=documents,
            empty=int((chunk.kind == EMPTY).sum()),
            bad=int((chunk.kind == BAD).sum()),
            filtered=int((chunk.kind == FILTERED).sum()),
            held_out=int((chunk.kind == HELD_OUT).sum()),
            places=places % 2**64,
            tokens=num_tokens,
            digest=digest % 2**64,
        )


def checksum_files(
    spec: DataSpec,
    encoder: EncoderChoice,
    source: str | None = None,
    epoch: int = 0,
    files: range | None = None,
    done: Callable[[int], None] = lambda num_bytes: None,
) -> EpochChecksum:
    """An epoch of a source (None: the only one), or of these files of it (by their numbers in the manifest):
    each from its first byte to its last, document by document, encoded by `encoder`, without fragments,
    blocks, windows and chunks. Epochs differ by what transforms draw. A bad record is counted, whatever
    `data.on_bad_document` says. `done` is called with the stored bytes of each file that is read. Raises as
    the stream does where a file cannot be read, or a transform fails.
    """
    settings, plan = replace(spec.settings, shuffle="none"), spec.plan_of(source or spec.only_source, epoch)
    whole = Encoder(spec.tokenizer, encoder, settings.special_tokens_in_text)
    masked = MaskedEncoder(spec.tokenizer, whole, settings.special_tokens_in_text)
    loss, ends = settings.loss.get(plan.source, "assistant"), (settings.bos_id, settings.eos_id)
    sums = _FileSums(whole, settings)
    refs = settings.transforms.get(plan.source)
    transforms, keys = Transforms(refs) if refs else None, _RecordKeys(settings, plan.manifest, epoch)
    at: int | None = None
    for number, part in enumerate(read_files(plan, settings.accept_changed, files)):
        if at not in (None, part.file):
            done(plan.manifest.files[at].bytes)
        at = part.file
        window = OrderedWindow(Window(number=number, last=False, parts=(part,)), plan, settings, epoch)
        for position in range(len(window)):
            origin = window.origin(position)
            held_out = keys.is_held_out(origin)
            seed = keys.seed(origin) if transforms else 0
            found = _documents(window, position, held_out, transforms, seed)
            for output, document in enumerate(found):
                try:
                    if document is None:
                        sums.filtered += 1
                    elif isinstance(document, BadRecordError):
                        sums.bad += 1
                    elif held_out:
                        sums.held_out += 1
                    elif isinstance(document, str) and document:
                        size = window.size(position) if transforms is None else utf8_size(document)
                        sums.add((*origin, output), document, size)
                    elif isinstance(document, str):
                        sums.empty += 1
                    else:
                        made = masked.encode(document, loss, ends, settings.piece_bytes)
                        sums.add_tokens((*origin, output), [piece.tokens for piece in made.pieces])
                except UnrenderableError:
                    sums.bad += 1
    if at is not None:
        done(plan.manifest.files[at].bytes)
    return sums.finish()


class _RecordKeys:
    """What is decided of a record by where it lies, from the rule itself."""

    def __init__(self, settings: StreamSettings, manifest: Manifest, epoch: int) -> None:
        self._bound = record_keys.holdout_bound(settings.holdout.get(manifest.source, 0))
        self._settings, self._manifest, self._epoch = settings, manifest, epoch

    def is_held_out(self, origin: tuple[int, int]) -> bool:
        if not self._bound:
            return False
        key = record_keys.holdout_key(self._manifest.source, self._manifest.files.path(origin[0]))
        return record_keys.is_held_out(origin[1], key, self._bound)

    def seed(self, origin: tuple[int, int]) -> int:
        path = self._manifest.files.path(origin[0])
        key = record_keys.transform_key(self._settings.seed, self._manifest.source, self._epoch, path)
        return record_keys.record_seed(origin[1], key)


def _documents(
    window: OrderedWindow, position: int, held_out: bool, transforms: Transforms | None, seed: int
) -> Sequence[Output]:
    """What a record gives: none for a blank line, of one that is held out itself."""
    try:
        document = window.described(position)
    except BadRecordError as error:
        return ["" if held_out else error]
    if document is None:
        return []
    if held_out or transforms is None:
        return [bare(document)]
    try:
        return transforms.outputs(document, seed)
    except DataError as error:
        raise type(error)(f"{window.place(position)}: {error}") from error


class _FileSums:
    """The documents of files, encoded by pieces in batches: a large one is never held as tokens in whole."""

    def __init__(self, encoder: Encoder, settings: StreamSettings) -> None:
        self.empty = self.bad = self.filtered = self.held_out = 0
        self._encoder, self._piece_bytes = encoder, settings.piece_bytes
        ends = (settings.bos_id, settings.eos_id)
        self._bos, self._eos = (b"" if i is None else i.to_bytes(4, "little") for i in ends)
        self._documents = self._places = self._digest = self._num_bytes = 0
        self._hasher = xxh3_64()  # of the document at hand
        self._texts: list[str] = []  # pieces that are not encoded yet
        self._ends: list[tuple[_Origin | None, bool]] = []  # whose document each begins, and ends
        self._text_bytes = 0

    def add(self, origin: _Origin, text: str, size: int) -> None:
        """A document of a record, of at most `size` bytes."""
        pieces = Pieces(text, size, self._piece_bytes)
        for number, piece in enumerate(pieces):
            self._texts.append(piece)
            self._ends.append((None if number else origin, number == len(pieces) - 1))
            self._text_bytes += min(size, self._piece_bytes)
            if self._text_bytes >= _BATCH_BYTES:
                self._encode()

    def add_tokens(self, origin: _Origin, pieces: Sequence[Int32Array]) -> None:
        """A document that is encoded already, BOS and EOS included; without pieces an empty one."""
        self._encode()
        if not pieces:
            self.empty += 1
            return
        self._begin(origin)
        for tokens in pieces:
            self._hash(np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8).data)
        self._digest += self._hasher.intdigest()

    def finish(self) -> EpochChecksum:
        """The sums over all documents."""
        self._encode()
        return EpochChecksum(
            documents=self._documents,
            empty=self.empty,
            bad=self.bad,
            filtered=self.filtered,
            held_out=self.held_out,
            places=self._places % 2**64,
            tokens=self._num_bytes // 4,
            digest=self._digest % 2**64,
        )

    def _begin(self, origin: _Origin) -> None:
        self._documents += 1
        first = origin[2] == 0
        self._hasher = xxh3_64(struct.pack("<qq", *origin[:2]) if first else struct.pack("<qqq", *origin))
        self._places += self._hasher.intdigest()

    def _encode(self) -> None:
        ids, lengths = self._encoder.encode(self._texts)
        data = np.ascontiguousarray(ids, dtype="<i4").view(np.uint8).data
        stops = (4 * np.cumsum(lengths, dtype=np.int64)).tolist()
        for (origin, is_last), start, stop in zip(self._ends, [0, *stops], stops, strict=False):
            if origin is not None:
                self._begin(origin)
                self._hash(self._bos)
            self._hash(data[start:stop])
            if is_last:
                self._hash(self._eos)
                self._digest += self._hasher.intdigest()
        self._texts, self._ends, self._text_bytes = [], [], 0

    def _hash(self, tokens: bytes | memoryview) -> None:
        self._hasher.update(tokens)
        self._num_bytes += len(tokens)
