"""Encodes the entries of a window in batches and cuts them into chunks.

Records and files are numbers here. The caller defines the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.tokens.encoder import Encoder, UnencodableTextError
from orchestrator.data.tokens.loss_mask import MaskedPiece
from orchestrator.data.tokens.tokenizer_files import UNKNOWN_TEXT
from orchestrator.errors import DataError
from orchestrator.records.tokens import BAD, PIECE, BoolArray, Int32Array, Int64Array, TokenChunk, WindowTask

# Text is encoded in batches of about `_BATCH_BYTES`, or of `_BATCH_ENTRIES` entries, which makes the fixed
# cost of a call negligible. A chunk has at most about `CHUNK_ENTRIES` entries: many may have no token.
_BATCH_BYTES, _BATCH_ENTRIES, CHUNK_ENTRIES = 1 << 20, 1 << 15, 1 << 18
_FIELDS = ("record", "piece", "kind", "last_piece", "special_texts", "file", "place")
_Entry = tuple[int, int, int, bool, int, int, int]
_NOTHING = (np.empty(0, np.int32), np.empty(0, np.int32))


def unencodable(place: str, error: UnencodableTextError) -> DataError:
    """The error that the tokenizer has no ids for the text at `place`."""
    return DataError(
        f"{place}: the tokenizer cannot encode {error.reason}; {UNKNOWN_TEXT}; another tokenizer needs a new "
        "run (another run.name)",
        code="tokenizer.unencodable_text",
    )


# A comparison of the encoders: returns the difference, None if there is none.
Check = Callable[[], str | None]


class ChunkWriter:
    """Collects the entries of one window, encodes them in batches, and cuts them into chunks.

    `output` is the number of the current document among those of its record. It stays 0 for a source without
    transforms.
    """

    def __init__(
        self, task: WindowTask, window: int, last_window: bool, settings: StreamSettings, manifest: Manifest
    ) -> None:
        self.task, self._manifest = task, manifest
        self.output = 0
        self._outputs: list[int] | None = [] if settings.transforms.get(task.source) else None
        self._checks: list[Check] = []  # of the current chunk
        self._due: list[Check] = []  # of the chunk before
        self._window, self._last_window, self._settings = window, last_window, settings
        self._encoder: Encoder | None = None
        # in the order of _FIELDS: entries added together, and entries added one by one after them
        self._tables, self._entries = list[Int64Array](), list[_Entry]()
        self._num_waiting = 0  # in both
        self._texts: list[str] = []
        self._masked: list[MaskedPiece] = []  # entries are either all texts or all of these
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
        """Adds one entry."""
        self._entries.append((record, piece, kind, last_piece, special_texts, *origin))
        self._num_waiting += 1
        if self._outputs is not None:
            self._outputs.append(self.output)
        if kind == PIECE:
            self._texts.append(text)
            self._text_size += len(text) if text.isascii() else len(text.encode())
        elif kind == BAD:
            self._reasons.append(reason)

    def add_texts(
        self, record: int, origins: tuple[Int64Array, Int64Array], texts: list[str], special: Int64Array
    ) -> Iterator[TokenChunk]:
        """Adds one entry for each text, each the only piece of its record. Yields the chunks that are full.

        `record` is the first record. `origins` are the files and places.
        """
        assert self._outputs is None, "texts of transforms are added one by one"
        num = len(texts)
        sizes = np.array([len(t) if t.isascii() else len(t.encode()) for t in texts], np.int64)
        table = np.zeros((num, len(_FIELDS)), np.int64)
        columns: tuple[Any, ...] = (np.arange(record, record + num), 0, PIECE, True, special, *origins)
        for field, values in enumerate(columns):
            table[:, field] = values
        begin, ends = 0, np.cumsum(sizes)
        while begin < num:
            before = int(ends[begin - 1]) if begin else 0
            full = int(np.searchsorted(ends, self._batch_bytes - self._text_size + before)) + 1
            stop = min(full, num, begin + _BATCH_ENTRIES - self._num_waiting)
            self._flush_entries()
            self._tables.append(table[begin:stop])
            self._texts += texts[begin:stop]
            self._text_size += int(ends[stop - 1]) - before
            self._num_waiting += stop - begin
            begin = stop
            yield from self.full_chunks()

    def _flush_entries(self) -> None:
        if self._entries:
            self._tables.append(np.array(self._entries, np.int64))
            self._entries = []

    def add_masked(
        self,
        record: int,
        origin: tuple[int, int],
        piece: MaskedPiece,
        number: int,
        last_piece: bool,
        special_texts: int,
    ) -> Iterator[TokenChunk]:
        """Adds one entry that is already encoded. Yields the chunks that are full before it."""
        if self._texts:
            yield from self._encode()
        self._masked.append(piece)
        self._entries.append((record, number, PIECE, last_piece, special_texts, *origin))
        self._num_waiting += 1
        if self._outputs is not None:
            self._outputs.append(self.output)
        self._text_size += len(piece.tokens)

    @property
    def encoder(self) -> Encoder:
        """The encoder of the entries that are added now."""
        assert self._encoder is not None, "encode_with comes first"
        return self._encoder

    def encodes_with(self, encoder: Encoder) -> bool:
        """Whether the entries that are added now are encoded with this encoder."""
        return self._encoder is encoder

    def encode_with(self, encoder: Encoder) -> Iterator[TokenChunk]:
        """Sets the encoder from the next entry on.

        Yields the chunks that become full while earlier entries are encoded.
        """
        if self._encoder not in (None, encoder):
            yield from self._encode()
        self._encoder = encoder

    @property
    def has_masked(self) -> bool:
        """Whether the pending entries are already encoded, so that no text may join them."""
        return bool(self._masked)

    def texts_only(self) -> Iterator[TokenChunk]:
        """Switches to adding texts. Yields the chunks that are full before them."""
        yield from self._encode()

    @property
    def is_full(self) -> bool:
        """Whether the pending entries are enough for a call of the encoder."""
        return self._text_size >= self._batch_bytes or self._num_waiting >= _BATCH_ENTRIES

    def check_later(self, check: Check) -> None:
        """Postpones a comparison of the encoders, so that it does not delay a first chunk.

        It runs when the next chunk but one is due, or the window's last.
        """
        self._checks.append(check)

    def full_chunks(self) -> Iterator[TokenChunk]:
        """Yields the chunks that are full now."""
        if self.is_full:
            yield from self._encode()

    def finish(self) -> Iterator[TokenChunk]:
        """Yields the rest: at least one chunk, which ends the window."""
        yield from self._encode()
        yield self._chunk(ends_window=True)

    def _encode(self) -> Iterator[TokenChunk]:
        self._flush_entries()
        table = np.concatenate([np.empty((0, len(_FIELDS)), np.int64), *self._tables])
        try:
            encoded = self.encoder.encode(self._texts) if self._texts else _NOTHING
        except UnencodableTextError as error:
            *_, file, place = table[table[:, _FIELDS.index("kind")] == PIECE][error.index].tolist()
            unit = self._manifest.unit
            where = f"{self._manifest.path(file)}: {unit} {place}"
            raise unencodable(where, error) from error
        batch = _Batch(table, encoded, self._masked, self._reasons, self._settings)
        if self._settings.rows_per_sample > 1:
            batch.columns["row"] = batch.rows()
        if self._outputs is not None:
            batch.columns["output"] = np.array(self._outputs, np.int64)
            self._outputs = []
        tokens, entries = self._num_tokens + len(batch.tokens), self._num_entries + len(table)
        if self._encoded and (tokens > self._settings.chunk_tokens or entries > CHUNK_ENTRIES):
            yield self._chunk(ends_window=False)
        self._encoded.append(batch)
        self._num_tokens += len(batch.tokens)
        self._num_entries += len(table)
        self._tables, self._texts, self._masked, self._reasons = [], [], [], []
        self._text_size = self._num_waiting = 0

    def _chunk(self, ends_window: bool) -> TokenChunk:
        batches, self._encoded, self._num_tokens, self._num_entries = self._encoded, [], 0, 0
        columns: dict[str, Any] = {
            name: np.concatenate([b.columns[name] for b in batches]).astype(
                np.int64 if name == "place" else np.int32
            )
            for name in batches[0].columns
        }
        made, self._due, self._checks = self._due, self._checks, []
        if ends_window:
            made, self._due = made + self._due, []
        differences = [difference for check in made if (difference := check()) is not None]
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
    """Entries that were encoded in one call, as columns, and their tokens with BOS and EOS inserted."""

    def __init__(
        self,
        table: Int64Array,
        encoded: tuple[Int32Array, Int32Array],
        masked: list[MaskedPiece],
        reasons: list[str],
        settings: StreamSettings,
    ) -> None:
        self.columns: dict[str, Int64Array] = {n: table[:, i] for i, n in enumerate(_FIELDS)}
        ids, lengths = encoded
        is_piece = self.columns["kind"] == PIECE
        self.is_masked, self._loss = bool(masked), [piece.loss for piece in masked]
        self._rows = [piece.row for piece in masked]
        if masked:
            self.tokens = np.concatenate([piece.tokens for piece in masked])
            wrapped = np.fromiter((len(piece.tokens) for piece in masked), np.int64, len(masked))
        else:
            first = self.columns["piece"][is_piece] == 0
            last = self.columns["last_piece"][is_piece] == 1
            self.tokens, wrapped = _wrap(ids, lengths, first, last, settings)
        self.columns["num_tokens"] = np.zeros(len(table), np.int64)
        self.columns["num_tokens"][is_piece] = wrapped
        self.reasons = reasons

    def rows(self) -> Int64Array:
        """The row of each entry in its sample; 0 for entries without tokens."""
        rows = np.zeros(len(self.columns["kind"]), np.int64)
        rows[self.columns["kind"] == PIECE] = self._rows
        return rows

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
    """(tokens, number of tokens of each piece), with BOS before first pieces and EOS after last pieces."""
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
