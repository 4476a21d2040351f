"""One source's samples of whole documents (`bestfit`, `pad`): chunks in, packs out, window by window.

A cursor counts the packs taken of a window. Opening it there tokenizes and packs the window again, and must
reproduce the packs that were taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.packing.packed_window import PackedWindow, PathOf, WindowPacking, documents_of
from orchestrator.data.packing.segments import ChunkOrder, Counts, counted, counts_after, counts_at
from orchestrator.data.packing.step_samples import PackedRun, joined
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.planning.digest import add_tokens, token_hasher
from orchestrator.records.cursor import SourceCursor
from orchestrator.records.tokens import PIECE, TokenChunk


def _by_number(_: int, file: int) -> str:
    return str(file)


class WindowPacker:
    """Turns chunks into packs, from a cursor on, for `pack.mode` `bestfit` or `pad`. Not thread-safe.

    A document without a target is counted and is in no pack. A pack is a sample and counts as `seq_len`
    positions, however many documents it holds. Documents are divided only by `pack.long_document: split`.
    Holds the windows whose packs are not all taken, and the window being fed.
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
        self._source, self._settings = source, settings
        self._order = ChunkOrder(start, source, num_blocks, settings, num_epochs)
        self._start: SourceCursor | None = start  # until its window arrives
        # a job with another length may read the history: the rest of a window has the cursor's length
        seq_len = start.pack_seq_len if start.packs else settings.seq_len
        self._packing = WindowPacking(source=source, settings=settings, seq_len=seq_len, path_of=path_of)
        self._coming: list[TokenChunk] = []  # of the window being fed
        self._windows: deque[PackedWindow] = deque()
        self._place = PackPlace(start)
        # the beginning of the window being fed, with the counts before it
        self._begin = replace(start, packs=0, pack_seq_len=0, prefix_digest="")
        # after everything fed
        self._counts: Counts = counts_at(start)
        self._epoch_has_packs = (start.block, start.window, start.packs) != (0, 0, 0)
        self._reasons: tuple[str, ...] = ()  # of passed documents

    @property
    def finished(self) -> bool:
        """Whether no chunk will follow."""
        return self._order.finished

    @property
    def cursor(self) -> SourceCursor:
        """The window of the next pack, and how many of its packs were taken."""
        return self._place.cursor

    @property
    def num_positions(self) -> int:
        """Positions that are available and not taken: `seq_len` for each pack, whatever it holds."""
        return (sum(window.packs.num for window in self._windows) - self._place.taken) * self._seq_len

    @property
    def _seq_len(self) -> int:
        return self._packing.seq_len

    def left(self, after: int, seq_len: int) -> int:
        """Positions that are available after the samples that the next `after` positions count for.

        Raises `DataIdentityError` if the sample length has changed and a window's packs are partly taken.
        """
        if seq_len != self._seq_len:
            self._change(seq_len)
        return self.num_positions - -(-after // seq_len) * seq_len

    def feed(self, chunk: TokenChunk) -> None:
        """Adds the next chunk.

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
            self._coming.append(chunk)  # other chunks add only to the counts
        self._counts = counts_after(self._counts, chunk)
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
                    f"epoch {chunk.epoch} of source {self._source} has no document that has a target and "
                    f"fits into a sample of pack.seq_len={self._packing.row_len}; check the path and the "
                    "fields of the source in data.sources, and "
                    f"pack.long_document={self._settings.long_document}",
                    code="data.nothing_to_train",
                )
            self._epoch_has_packs = False

    def finish(self) -> None:
        """Ends the data: no chunk will follow. Raises `FeedError` if an epoch was not read to its end."""
        self._order.finish()

    def take(
        self, num_positions: int, seq_len: int, with_cursors: bool = False
    ) -> tuple[PackedRun, PackCursors | None]:
        """Takes the packs that the next positions count for, all of which must be available."""
        num = -(-num_positions // seq_len)
        assert num * seq_len <= self.num_positions, f"{num_positions} of {self.num_positions} positions"
        cursors = None
        if with_cursors:
            cursors = PackCursors(self._place.copy(), tuple(self._windows), seq_len)
        runs, passed = self._place.take(self._windows, num, seq_len)
        for _ in range(passed):
            window = self._windows.popleft()
            self._reasons += window.reasons + window.packs.long_documents
        return joined(runs, seq_len, self._settings.rows_per_sample), cursors

    def passed_reasons(self, all_of_them: bool) -> tuple[str, ...]:
        """Why documents in the windows before the cursor are bad, or too long, each once.

        `all_of_them`: also in the windows after it, at the end of the data.
        """
        reasons, self._reasons = self._reasons, ()
        if all_of_them:
            for number, window in enumerate(self._windows):
                reasons += window.reasons + window.packs.long_documents
                bare = replace(window.packs, long_documents=())
                self._windows[number] = replace(window, reasons=(), packs=bare)
        return reasons

    # ------------------------------------------------------------------------------------ a window
    def _close(self, chunks: list[TokenChunk]) -> PackedWindow:
        """The window of these chunks, the last of which was just taken."""
        epoch, block, window = self._order.expected
        behind = SourceCursor(epoch=epoch, block=block, window=window, **counted(self._counts))
        reasons = tuple(reason for chunk in chunks for reason in chunk.bad_reasons)
        return self._packing.packed(self._begin, behind, documents_of(chunks), reasons)

    def _verify_start(self, window: PackedWindow) -> None:
        """Verifies that the packs that the cursor counts in the first window are those that were trained."""
        start, self._start = self._start, None
        if start is None or not start.packs:
            return
        if window.packs.num <= start.packs:
            raise self._not_reproduced(start, f"the window has {window.packs.num} packs")
        taken = PackPlace(window.begin)
        taken.take((window,), start.packs, self._seq_len)
        if taken.cursor.prefix_digest != start.prefix_digest:
            raise self._not_reproduced(
                start,
                f"their tokens had digest {start.prefix_digest} and now have {taken.cursor.prefix_digest}",
            )
        self._place = taken

    def _change(self, seq_len: int) -> None:
        """Changes the length of samples from here on."""
        taken = self._place.taken or (self._start.packs if self._start is not None else 0)
        if taken:
            raise self._not_this_length(taken, self._seq_len, seq_len)
        self._packing = replace(self._packing, seq_len=seq_len)
        begin = self._windows[0].begin if self._windows else self._begin
        for number, old in enumerate(self._windows):
            window = self._windows[number] = self._packing.packed(begin, old.end, old.documents, old.reasons)
            begin = window.end
        self._begin = begin

    def _not_this_length(self, packs: int, old: int, new: int) -> DataIdentityError:
        kept = old // self._settings.rows_per_sample
        return DataIdentityError(
            f"{packs} packs of {old} positions were taken from a window of source {self._source}, and its "
            f"other documents cannot be packed into samples of {new}; keep pack.seq_len={kept}",
            code="resume.seq_len_within_window",
        )

    def _not_reproduced(self, start: SourceCursor, found: str) -> DataIdentityError:
        return DataIdentityError(
            f"the cursor counts {start.packs} packs of {start.pack_seq_len} positions (source "
            f"{self._source}, epoch {start.epoch}, block {start.block}, window {start.window}), but {found}; "
            "the data, the tokenizer or the encoder are not those that the run was trained with",
            code="resume.cursor_mismatch",
        )


# --------------------------------------------------------------------------------------- position and cursors
class PackPlace:
    """All windows before the current one are taken, and `taken` packs of the current one."""

    def __init__(self, cursor: SourceCursor) -> None:
        self.cursor, self.taken, self._hasher = cursor, 0, token_hasher()

    def copy(self) -> PackPlace:
        """An independent copy."""
        new = PackPlace(self.cursor)
        new.taken, new._hasher = self.taken, self._hasher.copy()
        return new

    def take(self, windows: Sequence[PackedWindow], num: int, seq_len: int) -> tuple[list[PackedRun], int]:
        """Takes the next `num` packs of the windows. Returns them, and how many windows are used up."""
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
    """The cursors inside a run, computed on demand."""

    def __init__(self, place: PackPlace, windows: Sequence[PackedWindow], seq_len: int) -> None:
        self._place, self._windows, self._seq_len = place, windows, seq_len

    def after(self, num_positions: int) -> SourceCursor:
        """The cursor after the samples that `num_positions` positions count for."""
        place = self._place.copy()
        place.take(self._windows, -(-num_positions // self._seq_len), self._seq_len)
        return place.cursor
