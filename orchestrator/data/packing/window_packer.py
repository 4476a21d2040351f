"""One source's samples of whole documents, `bestfit` and `pad`: chunks go in, packs come out, window by
window.

It knows no file, no tokenizer, no other source and no step. A cursor counts the packs taken of a window: who
opens it there has the window tokenized once more, packs it again, and must find what was taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.data.packing.arrangement import best_fit, stretches
from orchestrator.data.packing.chunk_order import ChunkOrder
from orchestrator.data.packing.runs import PackedRun
from orchestrator.data.packing.segments import Counts, counted, counts_at
from orchestrator.data.settings import BAD_SHARE_RECORDS, StreamSettings
from orchestrator.data.tokens.token_chunk import BAD, EMPTY, FILTERED, HELD_OUT, PIECE, TokenChunk
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.planning.digest import add_tokens, token_hasher
from orchestrator.planning.order import pack_order
from orchestrator.records.arrays import BoolArray, Int32Array, Int64Array
from orchestrator.records.cursor import SourceCursor

PathOf = Callable[[int, int], str]  # (epoch, a file's number in its list)


def _by_number(_: int, file: int) -> str:
    return str(file)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Documents:
    """The documents of a window that have a target, in order."""

    tokens: Int32Array  # of all documents
    loss: BoolArray | None  # like tokens
    begin: Int64Array  # (num_documents,) of each one's tokens
    length: Int64Array  # (num_documents,)
    file: Int32Array  # (num_documents,)
    place: Int64Array  # (num_documents,)
    unpacked: int  # documents without a target


def _documents_of(chunks: Sequence[TokenChunk]) -> _Documents:
    """Those of a whole window."""

    def column(name: str) -> Any:
        return np.concatenate([getattr(chunk, name) for chunk in chunks])

    is_piece = column("kind") == PIECE
    new = column("piece")[is_piece] == 0
    number = np.cumsum(new) - 1
    length = np.bincount(number, weights=column("num_tokens")[is_piece]).astype(np.int64)
    begin = np.cumsum(length) - length
    tokens, loss, targets = column("tokens"), None, np.maximum(length - 1, 0)
    if any(chunk.loss is not None for chunk in chunks):
        every = [np.ones(len(c.tokens), np.bool_) if c.loss is None else c.loss for c in chunks]
        loss = np.concatenate(every)
        before = np.concatenate([[0], np.cumsum(loss)])
        targets = before[begin + length] - before[np.minimum(begin + 1, begin + length)]
    kept = targets > 0
    return _Documents(
        tokens=tokens,
        loss=loss,
        begin=begin[kept],
        length=length[kept],
        file=column("file")[is_piece][new][kept],
        place=column("place")[is_piece][new][kept],
        unpacked=int((~kept).sum()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packs:
    """A window's packs in the order in which they are taken, as stretches of its tokens."""

    begin: Int64Array  # (num_stretches,) of each one's tokens
    size: Int64Array  # (num_stretches,) positions of each
    firsts: Int64Array  # (num_packs + 1,) number of each pack's first stretch, and of all
    long_documents: tuple[str, ...]  # that are skipped: where, and why

    @property
    def num(self) -> int:
        return len(self.firsts) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """A window that has come to its end, and the cursors at its begin and behind it."""

    begin: SourceCursor  # `packs` is 0
    end: SourceCursor
    documents: _Documents
    packs: _Packs
    reasons: tuple[str, ...]  # of bad documents

    def run(self, start: int, stop: int, seq_len: int) -> PackedRun:
        """Its packs [start, stop), in arrays of their own."""
        firsts = self.packs.firsts[start : stop + 1]
        begin, size = (a[firsts[0] : firsts[-1]] for a in (self.packs.begin, self.packs.size))
        num = size + 1  # tokens
        at = np.repeat(begin - (np.cumsum(num) - num), num) + np.arange(int(num.sum()))
        loss = self.documents.loss
        return PackedRun(
            seq_len=seq_len,
            tokens=self.documents.tokens[at],
            sizes=size,
            firsts=firsts - firsts[0],
            loss=None if loss is None else loss[at],
        )


def _counted(before: Counts, chunk: TokenChunk) -> Counts:
    """The counts after a chunk."""
    documents, empty, bad, special, filtered, held_out = before
    return (
        documents + int(((chunk.kind == PIECE) & (chunk.last_piece == 1)).sum()),
        empty + int((chunk.kind == EMPTY).sum()),
        bad + int((chunk.kind == BAD).sum()),
        special + int(chunk.special_texts.sum()),
        filtered + int((chunk.kind == FILTERED).sum()),
        held_out + int((chunk.kind == HELD_OUT).sum()),
    )


class _Place:
    """How far packs are taken: all windows before the one at hand, and so many of that."""

    def __init__(self, cursor: SourceCursor) -> None:
        self.cursor, self.taken, self._hasher = cursor, 0, token_hasher()

    def copy(self) -> _Place:
        new = _Place(self.cursor)
        new.taken, new._hasher = self.taken, self._hasher.copy()
        return new

    def take(self, windows: Sequence[_Window], num: int, seq_len: int) -> tuple[list[PackedRun], int]:
        """The next `num` packs of the windows, and how many of these are behind it now."""
        runs, passed = list[PackedRun](), 0
        while num:
            window = windows[passed]
            here = min(num, window.packs.num - self.taken)
            if here:
                run = window.run(self.taken, self.taken + here, seq_len)
                runs.append(run)
                add_tokens(self._hasher, run.tokens)
                self.taken, num = self.taken + here, num - here
                self.cursor = replace(
                    window.begin,
                    packs=self.taken,
                    pack_seq_len=seq_len,
                    prefix_digest=self._hasher.hexdigest(),
                )
            if self.taken == window.packs.num:
                self.cursor, self.taken, self._hasher = window.end, 0, token_hasher()
                passed += 1
        return runs, passed


class PackCursors:
    """The cursors inside a run, computed when asked for."""

    def __init__(self, place: _Place, windows: Sequence[_Window], seq_len: int) -> None:
        self._place, self._windows, self._seq_len = place, windows, seq_len

    def after(self, num_positions: int) -> SourceCursor:
        """The cursor after the samples that so many positions count for."""
        place = self._place.copy()
        place.take(self._windows, -(-num_positions // self._seq_len), self._seq_len)
        return place.cursor


class WindowPacker:
    """Chunks in, packs out, from a cursor on, `pack.mode` `bestfit` or `pad`. Not for several threads.

    A document without a target is counted and in no pack. A pack is a sample and counts as `seq_len`
    positions, however many documents fill it; documents are never divided but by `pack.long_document: split`.
    Holds the windows whose packs are not all taken, and the one that is coming.
    """

    def __init__(
        self,
        start: SourceCursor,
        source: str,
        num_blocks: Callable[[int], int],
        settings: StreamSettings,
        num_epochs: int | None,
        path_of: PathOf = _by_number,
    ) -> None:
        """`num_epochs` is the source's limit; None: it has no end."""
        self._source, self._settings, self._path_of = source, settings, path_of
        self._order = ChunkOrder(start, source, num_blocks, settings, num_epochs)
        self._start: SourceCursor | None = start  # until its window has come
        # a history may be read by a job of another length: what is left of a window has the cursor's
        self._seq_len = start.pack_seq_len if start.packs else settings.seq_len
        self._coming: list[TokenChunk] = []  # of the window that is fed
        self._windows: deque[_Window] = deque()
        self._place = _Place(start)
        # the begin of the window that is coming, with the counts before it
        self._begin = replace(start, packs=0, pack_seq_len=0, prefix_digest="")
        # after all that is fed
        self._counts: Counts = counts_at(start)
        self._epoch_has_packs = (start.block, start.window, start.packs) != (0, 0, 0)
        self._reasons: tuple[str, ...] = ()  # of documents that are passed

    @property
    def finished(self) -> bool:
        """Whether no chunk will follow."""
        return self._order.finished

    @property
    def cursor(self) -> SourceCursor:
        """The window of the next pack, and how many of it were taken."""
        return self._place.cursor

    @property
    def num_positions(self) -> int:
        """Positions that are there and not taken: so many for each pack, whatever it holds."""
        return (sum(window.packs.num for window in self._windows) - self._place.taken) * self._seq_len

    def left(self, after: int, seq_len: int) -> int:
        """Positions that are there behind the samples that the next `after` positions count for.

        Raises `DataIdentityError` if the samples have another length now and a window's packs are taken in
        part.
        """
        if seq_len != self._seq_len:
            self._change(seq_len)
        return self.num_positions - -(-after // seq_len) * seq_len

    def feed(self, chunk: TokenChunk) -> None:
        """The next chunk.

        Raises `FeedError` if it is not the next one, `DataIdentityError` if the first window does not
        reproduce the cursor's packs, `DataError` if a document is too long (`pack.long_document: stop`), if
        too many are (`skip`), if too many are bad, or if an epoch has nothing to train.
        """
        self._order.require_next(chunk)
        start = self._start
        if start is not None and any((start.record, start.output, start.piece, start.token)):
            raise self._not_reproduced(
                start, f"it names a token, and pack.mode is {self._settings.pack_mode}"
            )
        if chunk.ends_window or chunk.bad_reasons or (chunk.kind == PIECE).any():
            self._coming.append(chunk)  # of other ones counts are all that is left
        self._counts = _counted(self._counts, chunk)
        ends_epoch = self._order.go_on(chunk, len(chunk.tokens), self._counts)
        if not chunk.ends_window:
            return
        chunks, self._coming = self._coming, []
        window = self._close(chunks)
        self._windows.append(window)
        self._begin = window.end
        self._verify_start(window)
        self._epoch_has_packs |= window.packs.num > 0
        if ends_epoch:
            if not self._epoch_has_packs and not self._settings.held_out:
                raise DataError(
                    f"epoch {chunk.epoch} of source {self._source} has no document with a target that a "
                    f"sample of pack.seq_len={self._seq_len} holds; look at data.sources: its path and "
                    f"fields, or at pack.long_document={self._settings.long_document}"
                )
            self._epoch_has_packs = False

    def finish(self) -> None:
        """No chunk will follow: the data end here. Raises `FeedError` if an epoch is not read to its end."""
        self._order.finish()

    def take(
        self, num_positions: int, seq_len: int, with_cursors: bool = False
    ) -> tuple[PackedRun, PackCursors | None]:
        """The packs that the next positions count for, all of which must be there."""
        num = -(-num_positions // seq_len)
        assert num * seq_len <= self.num_positions, f"{num_positions} of {self.num_positions} positions"
        cursors = None
        if with_cursors:
            cursors = PackCursors(self._place.copy(), tuple(self._windows), seq_len)
        runs, passed = self._place.take(self._windows, num, seq_len)
        for _ in range(passed):
            window = self._windows.popleft()
            self._reasons += window.reasons + window.packs.long_documents
        return _join(runs, seq_len), cursors

    def passed_reasons(self, all_of_them: bool) -> tuple[str, ...]:
        """Why documents are bad, or too long, in the windows behind the cursor, each once; `all_of_them`:
        also in those that follow, at the end of the data.
        """
        reasons, self._reasons = self._reasons, ()
        if all_of_them:
            for number, window in enumerate(self._windows):
                reasons += window.reasons + window.packs.long_documents
                bare = replace(window.packs, long_documents=())
                self._windows[number] = replace(window, reasons=(), packs=bare)
        return reasons

    # ------------------------------------------------------------------------------------ a window
    def _close(self, chunks: list[TokenChunk]) -> _Window:
        """The window of these chunks, whose last one was taken."""
        epoch, block, window = self._order.expected
        behind = SourceCursor(epoch=epoch, block=block, window=window, **counted(self._counts))
        reasons = tuple(reason for chunk in chunks for reason in chunk.bad_reasons)
        return self._packed(self._begin, behind, _documents_of(chunks), reasons)

    def _packed(
        self, begin: SourceCursor, end: SourceCursor, documents: _Documents, reasons: tuple[str, ...]
    ) -> _Window:
        """The window between these cursors, packed; the counts of documents in no pack are added to `end`."""
        settings = self._settings
        kept, long_documents = documents.length > 1, tuple[str, ...]()
        if settings.long_document != "split":
            long = documents.length > self._seq_len + 1
            long_documents = tuple(
                self._long(documents, int(number), begin.epoch) for number in np.flatnonzero(long)
            )
            if long_documents and settings.long_document != "skip":
                raise DataError(
                    f"{long_documents[0]}; set pack.long_document=split or skip in a new run (another "
                    "run.name), or make pack.seq_len larger"
                )
            kept = ~long
        document, first, size = stretches(documents.length[kept], self._seq_len)
        if settings.pack_mode == "bestfit":
            packs = best_fit(size, self._seq_len)
            place = (begin.block, begin.window, settings.seed, self._source, begin.epoch, settings.shuffle)
            packs = [packs[number] for number in pack_order(len(packs), *place).tolist()]
        else:
            packs = [[number] for number in range(len(size))]
        order = np.array([number for pack in packs for number in pack], np.int64)
        end = replace(
            end,
            unpacked_documents=begin.unpacked_documents + documents.unpacked,
            long_documents=begin.long_documents + len(long_documents),
        )
        self._judge_long_share(end, ends_epoch=end.epoch != begin.epoch)
        return _Window(
            begin=begin,
            end=end,
            documents=documents,
            packs=_Packs(
                begin=(documents.begin[kept][document] + first)[order],
                size=size[order],
                firsts=np.cumsum([0, *map(len, packs)]),
                long_documents=long_documents,
            ),
            reasons=reasons,
        )

    def _judge_long_share(self, end: SourceCursor, *, ends_epoch: bool) -> None:
        """At the ends of windows, as the share of bad documents is: wherever the stream was opened."""
        if self._settings.held_out:
            return  # a few records, of a run whose other ones are judged
        long, seen, most = end.long_documents, end.documents, self._settings.max_long_share
        if (ends_epoch or seen >= BAD_SHARE_RECORDS) and long > most * seen:
            raise DataError(
                f"{long:,} of the first {seen:,} documents of source {self._source} are longer than a sample "
                f"of pack.seq_len={self._seq_len:,} holds and are skipped (pack.long_document=skip), more "
                f"than pack.max_long_share={most}: the run would be trained on the others alone; make "
                "pack.seq_len larger, set pack.long_document=split in a new run (another run.name), or allow "
                "a larger share"
            )

    def _long(self, documents: _Documents, number: int, epoch: int) -> str:
        """Says of a document that it is too long."""
        path, place = self._path_of(epoch, int(documents.file[number])), int(documents.place[number])
        return (
            f"{path}: the document at {place} (source {self._source}) has {documents.length[number]:,} "
            f"tokens, a sample of pack.seq_len={self._seq_len:,} holds {self._seq_len + 1:,}"
        )

    def _verify_start(self, window: _Window) -> None:
        """The packs of the first window that the cursor counts must be those that were trained."""
        start, self._start = self._start, None
        if start is None or not start.packs:
            return
        if window.packs.num <= start.packs:
            raise self._not_reproduced(start, f"the window has {window.packs.num} packs")
        taken = _Place(window.begin)
        taken.take((window,), start.packs, self._seq_len)
        if taken.cursor.prefix_digest != start.prefix_digest:
            raise self._not_reproduced(
                start,
                f"their tokens had digest {start.prefix_digest} and now have {taken.cursor.prefix_digest}",
            )
        self._place = taken

    def _change(self, seq_len: int) -> None:
        """The samples have this length from here on."""
        taken = self._place.taken or (self._start.packs if self._start is not None else 0)
        if taken:
            raise self._not_this_length(taken, self._seq_len, seq_len)
        self._seq_len = seq_len
        begin = self._windows[0].begin if self._windows else self._begin
        for number, old in enumerate(self._windows):
            window = self._windows[number] = self._packed(begin, old.end, old.documents, old.reasons)
            begin = window.end
        self._begin = begin

    def _not_this_length(self, packs: int, old: int, new: int) -> DataIdentityError:
        return DataIdentityError(
            f"{packs} packs of {old} positions were taken of a window of source {self._source}, and samples "
            f"of {new} are asked for: its other documents cannot be packed anew; keep pack.seq_len={old}"
        )

    def _not_reproduced(self, start: SourceCursor, found: str) -> DataIdentityError:
        return DataIdentityError(
            f"the cursor counts {start.packs} packs of {start.pack_seq_len} positions (source "
            f"{self._source}, epoch {start.epoch}, block {start.block}, window {start.window}), but {found}; "
            "the data, the tokenizer or the encoder are not those that the run was trained with"
        )


def _join(runs: list[PackedRun], seq_len: int) -> PackedRun:
    """One run of all of them."""
    if len(runs) == 1:
        return runs[0]
    if not runs:
        none = np.empty(0, np.int64)
        return PackedRun(
            seq_len=seq_len, tokens=np.empty(0, np.int32), sizes=none, firsts=np.zeros(1, np.int64)
        )
    masked = any(run.loss is not None for run in runs)
    every = [np.ones(len(run.tokens), np.bool_) if run.loss is None else run.loss for run in runs]
    return PackedRun(
        seq_len=seq_len,
        tokens=np.concatenate([run.tokens for run in runs]),
        sizes=np.concatenate([run.sizes for run in runs]),
        firsts=np.cumsum([0, *np.concatenate([np.diff(run.firsts) for run in runs])]),
        loss=np.concatenate(every) if masked else None,
    )
