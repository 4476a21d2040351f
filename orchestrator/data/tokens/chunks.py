"""A block of documents as chunks of tokens: what a tokenizer process runs, and any stream in one process.

It is a pure function of (task, files, tokenizer, settings) and may run again at any time; it packs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.settings import CHECK_ONE_IN, StreamSettings
from orchestrator.data.sources.documents import Conversation, Prompted
from orchestrator.data.sources.formats import format_of
from orchestrator.data.sources.fragments import SourcePlan
from orchestrator.data.sources.manifest import Manifest
from orchestrator.data.sources.windows import (
    BadRecordError,
    OrderedWindow,
    Window,
    WrongFieldError,
    read_windows,
)
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.data.tokens.encoder import (
    GIGATOKEN,
    Encoder,
    Pieces,
    UnencodableTextError,
    difference_text,
)
from orchestrator.data.tokens.encoders import Encoders
from orchestrator.data.tokens.masked import MaskedDocument, MaskedPiece
from orchestrator.data.tokens.tokenizer_files import UNKNOWN_TEXT
from orchestrator.errors import BadDocumentError, DataError, DataIdentityError
from orchestrator.records import (
    BAD,
    EMPTY,
    PIECE,
    BoolArray,
    Int32Array,
    Int64Array,
    TokenChunk,
    WindowTask,
)

# Text is encoded in batches of about so many bytes, or of so many entries; the fixed cost of a call vanishes
# in it. A chunk has at most about so many entries: there may be many without any token.
_BATCH_BYTES, _BATCH_ENTRIES, _CHUNK_ENTRIES = 1 << 20, 1 << 15, 1 << 18
_FIELDS = ("record", "piece", "kind", "last_piece", "special_texts", "file", "place")
_Entry = tuple[int, int, int, bool, int, int, int]
_NEW_RUN = "in a new run (another run.name; a run keeps its own)"
# What is appended to a file is not the run's: a document that grew would push the file's end out of it.
_IN_PLACE = "at the same length, and go on with resume.accept_changed=true"
_NOTHING = (np.empty(0, np.int32), np.empty(0, np.int32))
# Notified of the decoded bytes of a window that is passed over; whether to go on.
Passed = Callable[[int], bool]


def tokenize_block(
    task: WindowTask,
    plan: SourcePlan,
    encoders: Encoders,
    settings: StreamSettings,
    passed: Passed = lambda _: True,
) -> Iterator[TokenChunk]:
    """The chunks of the block that `task` names, from its window, record and piece on, in order.

    What lies before is read up to the window, ordered up to the record, and not parsed or tokenized. Every
    window ends with a chunk that says so, even an empty one. `passed` is called with the decoded bytes of
    each window before the task's: they may take an hour and give no chunk. If it answers False, nothing
    follows. Raises `BadDocumentError` (under `stop`) and `DataError` with the place, `DataIdentityError` if
    the task's window, record or piece is not there.
    """
    windows = read_windows(plan, settings, task.epoch, task.block)
    yield from tokenize_windows(task, windows, plan, encoders, settings, passed)


def tokenize_windows(
    task: WindowTask,
    windows: Iterator[Window],
    plan: SourcePlan,
    encoders: Encoders,
    settings: StreamSettings,
    passed: Passed,
) -> Iterator[TokenChunk]:
    """The chunks of these windows, which stand for the block that `task` names; see `tokenize_block`."""
    seen = None
    for window in windows:
        if window.number < task.window:
            if not passed(sum(int(part.records.sizes.sum()) for part in window.parts)):
                return
            continue
        seen = window.number
        here = task if window.number == task.window else replace(task, window=seen, record=0, piece=0)
        yield from tokenize_window(here, window, plan, encoders, settings)
    if seen is None:
        raise _absent(task, "the block has fewer windows")


def tokenize_window(
    task: WindowTask, window: Window, plan: SourcePlan, encoders: Encoders, settings: StreamSettings
) -> Iterator[TokenChunk]:
    """The chunks of the window that `task` names, from its record and piece on, in order; the last one says
    that it ends the window. Raises as `tokenize_block` does.
    """
    assert window.number == task.window, f"window {window.number} is not that of {task}"
    ordered = OrderedWindow(window, plan, settings, task.epoch)
    yield from tokenize_records(task, window, ordered, plan, encoders, settings)


def tokenize_records(
    task: WindowTask,
    window: Window,
    ordered: OrderedWindow,
    plan: SourcePlan,
    encoders: Encoders,
    settings: StreamSettings,
) -> Iterator[TokenChunk]:
    """The chunks of a window whose records are in order already; see `tokenize_window`."""
    writer = _Writer(task, window.number, window.last, settings, plan.manifest)
    if task.record and task.record >= len(ordered):
        raise _absent(task, f"window {window.number} has {len(ordered)} records")
    for position in range(task.record, len(ordered)):
        first_piece = task.piece if position == task.record else 0
        encoder = encoders.at(task.source, (task.epoch, task.block, window.number, position))
        if not writer.encodes_with(encoder):
            yield from writer.encode_with(encoder)
        yield from _add_record(writer, ordered, position, first_piece, settings, encoders)
    yield from writer.finish()


def _absent(task: WindowTask, found: str) -> DataIdentityError:
    return DataIdentityError(
        f"the cursor names block {task.block} of source {task.source} in epoch {task.epoch}, window "
        f"{task.window}, record {task.record}, piece {task.piece}, but {found}; "
        "the data are not those that the run was started with"
    )


def _add_record(
    writer: _Writer,
    window: OrderedWindow,
    position: int,
    first_piece: int,
    settings: StreamSettings,
    encoders: Encoders,
) -> Iterator[TokenChunk]:
    """The chunks that get full while it adds what one record is: pieces of a document, one of which nothing
    is learnt (it is counted as empty), a bad one, nothing for a blank line.
    """
    origin = window.origin(position)
    try:
        text = window.document(position)
        masked = (
            None
            if text is None or isinstance(text, str)
            else _masked(writer, window, position, text, settings, encoders)
        )
    except UnencodableTextError as error:
        raise DataError(_unencodable(window.place(position), error)) from error
    except DataError as error:
        raise type(error)(f"{window.place(position)}: {error}") from error
    except (BadRecordError, UnrenderableError) as error:
        _add_bad(writer, window, position, error, settings)
        yield from writer.full_chunks()
        return
    if masked is not None:
        yield from _add_masked(writer, window, position, first_piece, settings, masked)
        return
    if text is None:
        return
    assert isinstance(text, str), "any other document is masked"
    if not text:
        writer.add(position, origin, EMPTY)
        yield from writer.full_chunks()
        return
    pieces = Pieces(text, window.size(position), settings.piece_bytes)
    del text  # a large one is held once, as its pieces
    if first_piece >= len(pieces):
        raise _absent(writer.task, f"that document has {len(pieces)} pieces")
    encoder = writer.encoder
    check = encoder.choice.name == GIGATOKEN and window.is_sampled(position, CHECK_ONE_IN)
    for number in range(first_piece, len(pieces)):
        piece = pieces[number]
        special = encoder.count_special(piece)
        _judge_special(special, window, position, settings)
        if check:
            _check(writer, window, position, piece)
        last = number == len(pieces) - 1
        if writer.has_masked:
            yield from writer.texts_only()
        writer.add(position, origin, PIECE, piece, number, last, special)
        if writer.is_full:
            yield from writer.full_chunks()


def _add_bad(
    writer: _Writer, window: OrderedWindow, position: int, error: Exception, settings: StreamSettings
) -> None:
    reason = f"{window.place(position)}: {error}"
    if settings.on_bad_document == "stop":
        fields = "text_field or " if isinstance(error, WrongFieldError) else ""
        raise BadDocumentError(
            f"{reason}; set {fields}data.on_bad_document=skip {_NEW_RUN}, or fix the document {_IN_PLACE}"
        ) from None
    writer.add(position, window.origin(position), BAD, reason=reason)


def _judge_special(special: int, window: OrderedWindow, position: int, settings: StreamSettings) -> None:
    if special and settings.special_tokens_in_text == "stop":
        raise DataError(
            f"{window.place(position)}: {special} special tokens of the tokenizer stand in the text; "
            f"set data.special_tokens_in_text=text {_NEW_RUN}, or take them out {_IN_PLACE}"
        )


def _masked(
    writer: _Writer,
    window: OrderedWindow,
    position: int,
    document: Conversation | Prompted,
    settings: StreamSettings,
    encoders: Encoders,
) -> MaskedDocument:
    encoder, masked = writer.encoder, encoders.masked(writer.encoder)
    loss, ends = settings.loss.get(writer.task.source, "assistant"), (settings.bos_id, settings.eos_id)
    found = masked.encode(document, loss, ends, settings.piece_bytes)
    if encoder.choice.name == GIGATOKEN and window.is_sampled(position, CHECK_ONE_IN):
        try:
            difference = masked.difference(document, loss, ends, settings.piece_bytes)
        except UnencodableTextError as error:
            writer.differences.append(f"{window.place(position)}: tokenizers cannot encode {error.reason}")
        else:
            if difference is not None:
                writer.differences.append(f"{window.place(position)}: {encoder.choice}: {difference}")
    return found


def _add_masked(
    writer: _Writer,
    window: OrderedWindow,
    position: int,
    first_piece: int,
    settings: StreamSettings,
    document: MaskedDocument,
) -> Iterator[TokenChunk]:
    """The chunks that get full while it adds a document of which a part is learnt."""
    origin, pieces = window.origin(position), document.pieces
    _judge_special(document.special_texts, window, position, settings)
    if not pieces:
        writer.add(position, origin, EMPTY)
        yield from writer.full_chunks()
        return
    if first_piece >= len(pieces):
        raise _absent(writer.task, f"that document has {len(pieces)} pieces")
    for number in range(first_piece, len(pieces)):
        # those of the whole document are counted with its last piece, as the document itself is
        special = document.special_texts if number == len(pieces) - 1 else 0
        yield from writer.add_masked(
            position, origin, pieces[number], number, number == len(pieces) - 1, special
        )
        yield from writer.full_chunks()


def _check(writer: _Writer, window: OrderedWindow, position: int, text: str) -> None:
    """Encodes the text by both libraries; what differs is reported, the stream keeps its own encoder's
    ids.
    """
    encoder = writer.encoder
    try:
        ids, expected = encoder.encode([text])[0], encoder.encode_reference([text])[0]
    except UnencodableTextError as error:
        writer.differences.append(f"{window.place(position)}: tokenizers cannot encode {error.reason}")
        return
    if not np.array_equal(ids, expected):
        writer.differences.append(
            f"{window.place(position)}: {encoder.choice}: {difference_text(text, ids, expected)}"
        )


def _unencodable(place: str, error: UnencodableTextError) -> str:
    return (
        f"{place}: the tokenizer cannot encode {error.reason}; {UNKNOWN_TEXT}; either is another tokenizer, "
        "which needs a new run (another run.name)"
    )


class _Writer:
    """Gathers the entries of one window, encodes them in batches, and cuts them into chunks."""

    def __init__(
        self, task: WindowTask, window: int, last_window: bool, settings: StreamSettings, manifest: Manifest
    ) -> None:
        self.task, self._manifest = task, manifest
        self.differences: list[str] = []
        self._window, self._last_window, self._settings = window, last_window, settings
        self._encoder: Encoder | None = None
        self._entries: list[_Entry] = []  # in the order of _FIELDS
        self._texts: list[str] = []
        self._masked: list[MaskedPiece] = []  # of the entries are either texts or these
        self._text_size = 0
        self._batch_bytes = min(_BATCH_BYTES, settings.chunk_tokens)
        self._reasons: list[str] = []
        self._encoded: list[_Batch] = []
        self._num_tokens = self._num_entries = 0

    def add(
        self,
        record: int,
        origin: tuple[int, int],
        kind: int,
        text: str = "",
        piece: int = 0,
        last_piece: bool = True,
        special_texts: int = 0,
        reason: str = "",
    ) -> None:
        """One more entry."""
        self._entries.append((record, piece, kind, last_piece, special_texts, *origin))
        if kind == PIECE:
            self._texts.append(text)
            self._text_size += len(text) if text.isascii() else len(text.encode())
        elif kind == BAD:
            self._reasons.append(reason)

    def add_masked(
        self,
        record: int,
        origin: tuple[int, int],
        piece: MaskedPiece,
        number: int,
        last_piece: bool,
        special_texts: int,
    ) -> Iterator[TokenChunk]:
        """One more entry, which is encoded already; the chunks that get full before it."""
        if self._texts:
            yield from self._encode()
        self._masked.append(piece)
        self._entries.append((record, number, PIECE, last_piece, special_texts, *origin))
        self._text_size += len(piece.tokens)

    @property
    def encoder(self) -> Encoder:
        """Who encodes what is added now."""
        assert self._encoder is not None, "encode_with comes first"
        return self._encoder

    def encodes_with(self, encoder: Encoder) -> bool:
        """Whether what is added now is encoded so."""
        return self._encoder is encoder

    def encode_with(self, encoder: Encoder) -> Iterator[TokenChunk]:
        """From the next entry on; the chunks that get full while the entries before are encoded."""
        if self._encoder not in (None, encoder):
            yield from self._encode()
        self._encoder = encoder

    @property
    def has_masked(self) -> bool:
        """Whether what waits is encoded already, so that no text may join it."""
        return bool(self._masked)

    def texts_only(self) -> Iterator[TokenChunk]:
        """What is added now is text; the chunks that get full before it."""
        yield from self._encode()

    @property
    def is_full(self) -> bool:
        """Whether what was added is enough for a call of the encoder."""
        return self._text_size >= self._batch_bytes or len(self._entries) >= _BATCH_ENTRIES

    def full_chunks(self) -> Iterator[TokenChunk]:
        """The chunks that are full now."""
        if self.is_full:
            yield from self._encode()

    def finish(self) -> Iterator[TokenChunk]:
        """The rest; at least one chunk, which ends the window."""
        yield from self._encode()
        yield self._chunk(ends_window=True)

    def _encode(self) -> Iterator[TokenChunk]:
        try:
            encoded = self.encoder.encode(self._texts) if self._texts else _NOTHING
        except UnencodableTextError as error:
            *_, file, place = [entry for entry in self._entries if entry[2] == PIECE][error.index]
            unit = format_of(self._manifest.format).unit
            where = f"{self._manifest.path(file)}: {unit} {place}"
            raise DataError(_unencodable(where, error)) from error
        batch = _Batch(self._entries, encoded, self._masked, self._reasons, self._settings)
        tokens, entries = self._num_tokens + len(batch.tokens), self._num_entries + len(self._entries)
        if self._encoded and (tokens > self._settings.chunk_tokens or entries > _CHUNK_ENTRIES):
            yield self._chunk(ends_window=False)
        self._encoded.append(batch)
        self._num_tokens += len(batch.tokens)
        self._num_entries += len(self._entries)
        self._entries, self._texts, self._masked, self._reasons, self._text_size = [], [], [], [], 0

    def _chunk(self, ends_window: bool) -> TokenChunk:
        batches, self._encoded, self._num_tokens, self._num_entries = self._encoded, [], 0, 0
        columns: dict[str, Any] = {
            name: np.concatenate([b.columns[name] for b in batches]).astype(
                np.int64 if name == "place" else np.int32
            )
            for name in batches[0].columns
        }
        differences, self.differences = self.differences, []
        return TokenChunk(
            source=self.task.source,
            epoch=self.task.epoch,
            block=self.task.block,
            window=self._window,
            tokens=np.concatenate([b.tokens for b in batches]),
            loss=np.concatenate([b.loss_of_all() for b in batches])
            if any(b.is_masked for b in batches)
            else None,
            bad_reasons=tuple(reason for b in batches for reason in b.reasons),
            encoder_differences=tuple(differences),
            ends_window=ends_window,
            ends_block=ends_window and self._last_window,
            **columns,
        )


class _Batch:
    """Entries that were encoded in one call, as columns, and their tokens with BOS and EOS in place."""

    def __init__(
        self,
        entries: list[_Entry],
        encoded: tuple[Int32Array, Int32Array],
        masked: list[MaskedPiece],
        reasons: list[str],
        settings: StreamSettings,
    ) -> None:
        table = np.array(entries, np.int64).reshape(len(entries), len(_FIELDS))
        self.columns: dict[str, Int64Array] = {n: table[:, i] for i, n in enumerate(_FIELDS)}
        ids, lengths = encoded
        is_piece = self.columns["kind"] == PIECE
        self.is_masked, self._loss = bool(masked), [piece.loss for piece in masked]
        if masked:
            self.tokens = np.concatenate([piece.tokens for piece in masked])
            wrapped = np.fromiter((len(piece.tokens) for piece in masked), np.int64, len(masked))
        else:
            first = self.columns["piece"][is_piece] == 0
            last = self.columns["last_piece"][is_piece] == 1
            self.tokens, wrapped = _wrap(ids, lengths, first, last, settings)
        self.columns["num_tokens"] = np.zeros(len(entries), np.int64)
        self.columns["num_tokens"][is_piece] = wrapped
        self.reasons = reasons

    def loss_of_all(self) -> BoolArray:
        """Which of the tokens are targets."""
        return np.concatenate(self._loss) if self.is_masked else np.ones(len(self.tokens), np.bool_)


def _wrap(
    ids: Int32Array,
    lengths: Int32Array,
    first: npt.NDArray[np.bool_],
    last: npt.NDArray[np.bool_],
    settings: StreamSettings,
) -> tuple[Int32Array, Int64Array]:
    """(tokens, number of tokens of each piece) with BOS before each first piece and EOS after each last
    one.
    """
    bos = first & (settings.bos_id is not None)
    eos = last & (settings.eos_id is not None)
    wrapped = lengths.astype(np.int64) + bos + eos
    ends = np.cumsum(wrapped)
    tokens = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
    is_text = np.ones(len(tokens), np.bool_)
    for where, token in (((ends - wrapped)[bos], settings.bos_id), ((ends - 1)[eos], settings.eos_id)):
        if token is not None:
            tokens[where] = token
            is_text[where] = False
    tokens[is_text] = ids
    return tokens, wrapped
