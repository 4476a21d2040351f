"""One source's token stream for `concat`: chunks of tokens in, runs of consecutive positions out.

A chunk's place in the order is checked. Its content is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.packing.segments import Before, ChunkOrder, Counts, Segment, counts_at, without_entries
from orchestrator.data.packing.step_samples import Run
from orchestrator.errors import DataIdentityError
from orchestrator.planning.digest import add_tokens, token_hasher
from orchestrator.records.cursor import SourceCursor
from orchestrator.records.tokens import Int32Array, Int64Array, TokenChunk


# The number and digest of the current document's earlier tokens, which a resume must reproduce.
class UnfinishedDocument:
    """Follows a stream from `start` on.

    The tokens in earlier pieces of the document are known if the stream was opened in the document's first
    piece, or at a cursor that records them. Otherwise they are known from the next document on.
    """

    def __init__(self, start: SourceCursor) -> None:
        self._known = start.piece == 0 or bool(start.earlier_digest)
        self._hasher, self._num = token_hasher(), 0  # of the document's tokens passed so far
        self._earlier = (start.earlier_tokens, start.earlier_digest)

    def copy(self) -> UnfinishedDocument:
        """An independent copy."""
        new = copy(self)
        new._hasher = self._hasher.copy()
        return new

    @property
    def passed(self) -> tuple[int, str]:
        """Number and digest of the document's tokens passed so far."""
        return self._num, self._hasher.hexdigest()

    def add(self, tokens: Int32Array) -> None:
        """Passes more tokens of the same document."""
        add_tokens(self._hasher, tokens)
        self._num += len(tokens)

    def move(self, tokens: Int32Array, begin: int | None, piece: int, token: int) -> tuple[int, str]:
        """Passes `tokens`. The next token is number `token` of piece `piece`.

        The last document that begins among them or right after them begins at `begin` (None: there is none).
        Returns number and digest of the tokens in the document's earlier pieces: (0, "") in the first piece,
        and if they are not known.
        """
        if begin is not None:
            self._known, self._hasher, self._num = True, token_hasher(), 0
            tokens = tokens[begin:]
        before_piece = len(tokens) - token
        if before_piece >= 0:  # the piece begins here
            self.add(tokens[:before_piece])
            self._earlier = self.passed
            tokens = tokens[before_piece:]
        self.add(tokens)
        return self._earlier if piece and self._known else (0, "")


__all__ = ["Packer", "Run"]


_NOTHING = Run(tokens=np.empty(0, np.int32), document_starts=np.empty(0, np.int64))


class _Follower:
    """The cursor of the next input token, which advances with the tokens that are passed."""

    def __init__(self, start: SourceCursor) -> None:
        self.taken = 0  # positions passed since the opening
        self.cursor = start
        self._hasher = token_hasher()
        self._hashed_piece: tuple[int, ...] | None = None
        self.unfinished = UnfinishedDocument(start)
        self._opened_inside = start.piece > 0  # the first token begins no document

    def copy(self) -> _Follower:
        """An independent copy."""
        new = _Follower(self.cursor)
        new.taken, new._opened_inside = self.taken, self._opened_inside
        new._hasher, new._hashed_piece = self._hasher.copy(), self._hashed_piece
        new.unfinished = self.unfinished.copy()
        return new

    def passes(self, stop: int, starts: Int64Array) -> Int64Array:
        """The next input token is at `stop`, if nothing follows it. Returns the `starts` at which documents
        begin.
        """
        if self._opened_inside and not self.taken:
            starts = starts[starts > 0]
        self.taken = stop
        return starts

    def move(self, segment: Segment, stop: int, passed: Int32Array, starts: Int64Array) -> None:
        """Advances to the next input token at `stop`, which lies in `segment`.

        `starts`: where documents begin in `passed` and right after it. The digest of the unfinished piece
        grows with the `passed` tokens, so that a long piece is not hashed repeatedly.
        """
        starts = self.passes(stop, starts)
        place = segment.place_of(stop)
        if place.piece_key == self._hashed_piece:
            add_tokens(self._hasher, passed)
        else:
            self._hasher = token_hasher(segment.piece_tokens(place))
            self._hashed_piece = place.piece_key
        begin = int(starts[-1]) if len(starts) else None
        earlier = self.unfinished.move(passed, begin, place.piece_key[-1], place.token)
        self.cursor = place.cursor(self._hasher.hexdigest() if place.token else "", earlier)


class RunCursors:
    """The cursors inside a run, computed on demand."""

    def __init__(self, follower: _Follower, segments: Sequence[Segment], run: Run) -> None:
        self._follower, self._segments, self._run = follower, segments, run

    def after(self, num_positions: int) -> SourceCursor:
        """The cursor after `num_positions` positions of the run."""
        follower = self._follower.copy()
        stop = follower.taken + num_positions
        here = next((segment for segment in self._segments if stop < segment.stop), None)
        if here is not None and num_positions:
            starts = self._run.document_starts
            starts = starts[starts <= num_positions]
            follower.move(here, stop, self._run.tokens[:num_positions], starts)
        return follower.cursor


class Packer:
    """Turns chunks into runs of positions, from a cursor on.

    Holds the chunks that are not taken yet. Not thread-safe. `feed` it every chunk of the source's tasks from
    the cursor on, in order, then call `finish`; `take` what is available.
    """

    def __init__(
        self,
        start: SourceCursor,
        source: str,
        num_blocks: Callable[[int], int],
        settings: StreamSettings,
        num_epochs: int | None,
    ) -> None:
        """`num_epochs` is the source's limit; None: it has no end."""
        self._source = source
        self._order = ChunkOrder(start, source, num_blocks, settings, num_epochs)
        self._start: SourceCursor | None = start  # until its first chunk arrives
        self._segments: deque[Segment] = deque()
        self._fed = 0  # tokens fed since the opening
        self._counts: Counts = counts_at(start)  # after the chunks fed
        self._epoch_counts = self._counts  # at the beginning of the epoch being fed
        self._document, self._token_document = 0, -1  # numbers of the last entry's and the last token's
        self._follower = _Follower(start)
        self._reasons: tuple[str, ...] = ()  # of bad documents before the cursor

    @property
    def finished(self) -> bool:
        """Whether no chunk will follow."""
        return self._order.finished

    @property
    def cursor(self) -> SourceCursor:
        """The cursor of the next input token."""
        return self._follower.cursor

    @property
    def num_positions(self) -> int:
        """Positions that are available and not taken: tokens that have a label after them."""
        return max(0, self._fed - self._follower.taken - 1)

    def left(self, after: int, seq_len: int) -> int:
        """Positions that are available after the next `after` ones, for samples of any length."""
        del seq_len
        return self.num_positions - after

    def feed(self, chunk: TokenChunk) -> None:
        """Adds the next chunk.

        Raises `FeedError` if it is not the next one, `DataIdentityError` if the first does not reproduce the
        cursor's tokens, `DataError` if too many documents are bad or the epoch has fewer than two tokens.
        """
        self._order.require_next(chunk)
        if self._start is not None and self._start.packs:
            raise self._not_reproduced(self._start, "it counts packs, and pack.mode is concat")
        left = self._after_earlier_pieces(chunk)
        if left is None:
            self._go_on(chunk, 0)
            return
        chunk, skip = left, self._verify_start(left)
        before = Before(
            position=self._fed,
            counts=self._counts,
            document=self._document,
            token_document=self._token_document,
            epoch_counts=self._epoch_counts,
            epoch_begins=self._order.epoch_begins,
        )
        segment = Segment(chunk, skip, before)
        num_tokens = segment.stop - segment.start
        if num_tokens or chunk.bad_reasons:  # millions of documents without a token add only to the counts
            self._segments.append(segment)
        self._counts = segment.counts_after
        self._document, self._token_document = segment.document_after, segment.token_document_after
        self._fed += num_tokens
        self._go_on(chunk, num_tokens)

    def finish(self) -> None:
        """Ends the data: no chunk will follow. Raises `FeedError` if an epoch was not read to its end."""
        self._order.finish()

    def take(
        self, num_positions: int, seq_len: int, with_cursors: bool = False
    ) -> tuple[Run, RunCursors | None]:
        """Takes the next positions, all of which must be available. `cursor` stands after them afterwards."""
        del seq_len
        assert 0 <= num_positions <= self.num_positions, f"{num_positions} of {self.num_positions} positions"
        start, stop = self._follower.taken, self._follower.taken + num_positions
        run = self._gather(start, stop + 1) if num_positions else _NOTHING
        cursors = RunCursors(self._follower.copy(), tuple(self._segments), run) if with_cursors else None
        if num_positions:
            self._move_to(stop, run)
            starts = run.document_starts
            run = Run(tokens=run.tokens, document_starts=starts[starts < num_positions], loss=run.loss)
        return run, cursors

    def passed_reasons(self, all_of_them: bool) -> tuple[str, ...]:
        """Why documents before the cursor are bad, each once.

        `all_of_them`: also those after the cursor, at the end of the data. What follows the last token is
        passed by no cursor, and must be reported too.
        """
        reasons, self._reasons = self._reasons, ()
        if all_of_them:
            reasons += tuple(reason for segment in self._segments for reason in segment.take_reasons(None))
        return reasons

    # ------------------------------------------------------------------------------------ feeding
    def _go_on(self, chunk: TokenChunk, num_tokens: int) -> None:
        if self._order.go_on(chunk, num_tokens, self._counts):
            self._epoch_counts = self._counts

    def _after_earlier_pieces(self, chunk: TokenChunk) -> TokenChunk | None:
        """The chunk without the pieces before the cursor's in its document. None: it has no others.

        These pieces come only if the cursor has their digest. They must be those that were trained.
        """
        start = self._start
        if start is None or not start.earlier_digest:
            return chunk
        earlier = (chunk.record == start.record) & (chunk.piece < start.piece)
        if chunk.output is not None:
            earlier &= chunk.output == start.output
        num = len(earlier) if earlier.all() else int(earlier.argmin())
        self._follower.unfinished.add(chunk.tokens[: int(chunk.num_tokens[:num].sum())])
        if num and num == len(earlier) and not chunk.ends_window:
            return None
        if self._follower.unfinished.passed != (start.earlier_tokens, start.earlier_digest):
            found, digest = self._follower.unfinished.passed
            raise self._not_reproduced(
                start,
                f"the {start.earlier_tokens} tokens of the document's earlier pieces had digest "
                f"{start.earlier_digest}, and now there are {found} with digest {digest}",
            )
        return without_entries(chunk, num)

    def _verify_start(self, chunk: TokenChunk) -> int:
        """The number of the chunk's tokens before the cursor. Those of the unfinished piece must be those
        that were trained.
        """
        start, self._start = self._start, None
        if start is None or (start.record, start.output, start.piece, start.token) == (0, 0, 0, 0):
            return 0
        if not len(chunk.num_tokens):
            raise self._not_reproduced(start, "the window has no such record")
        record, piece, num = int(chunk.record[0]), int(chunk.piece[0]), int(chunk.num_tokens[0])
        output = chunk.output_of(0)
        found = (record, output, piece)
        if found != (start.record, start.output, start.piece) or num <= start.token:
            document = f"document {output} of it, " if output else ""
            raise self._not_reproduced(
                start, f"the files give {num} tokens for record {record}, {document}piece {piece} there"
            )
        digest = token_hasher(chunk.tokens[: start.token]).hexdigest()
        if start.token and digest != start.prefix_digest:
            raise self._not_reproduced(
                start,
                f"the {start.token} tokens before it had digest {start.prefix_digest} and now have {digest}",
            )
        self._follower.unfinished.add(chunk.tokens[: start.token])
        return start.token

    def _not_reproduced(self, start: SourceCursor, found: str) -> DataIdentityError:
        document = f"document {start.output} of it, " if start.output else ""
        return DataIdentityError(
            f"the cursor names token {start.token} of record {start.record}, {document}piece {start.piece} "
            f"(source {self._source}, epoch {start.epoch}, block {start.block}, window {start.window}), but "
            f"{found}; the data, the tokenizer or the encoder are not those that the run was trained with",
            code="resume.cursor_mismatch",
        )

    # ------------------------------------------------------------------------------------ taking
    def _gather(self, start: int, stop: int) -> Run:
        """Tokens [start, stop) in new arrays, and where documents begin in them."""
        here = [segment for segment in self._segments if segment.start < stop]
        starts = [segment.document_starts_between(start, stop) for segment in here]
        masked = any(segment.chunk.loss is not None for segment in here)
        return Run(
            tokens=np.concatenate([segment.tokens_between(start, stop) for segment in here]),
            document_starts=np.concatenate(starts) - start,
            loss=np.concatenate([segment.loss_between(start, stop) for segment in here]) if masked else None,
        )

    def _move_to(self, stop: int, run: Run) -> None:
        """Moves the next input token to `stop`, after the run, and drops the segments before it."""
        if stop >= self._fed:  # nothing is left to read
            self._follower.passes(stop, run.document_starts)
            return
        here = next(i for i, segment in enumerate(self._segments) if stop < segment.stop)
        place = self._segments[here].place_of(stop)
        reasons: list[str] = []
        self._follower.move(self._segments[here], stop, run.tokens[:-1], run.document_starts)
        # at an epoch's border, all of its entries are still to come, also empty or bad ones before its first
        # token
        while here and not (place.epoch_border and self._segments[0].chunk.epoch == place.piece_key[0]):
            reasons += self._segments.popleft().take_reasons(None)
            here -= 1
        if not place.epoch_border:
            reasons += self._segments[0].take_reasons(place.entry)
        self._reasons += tuple(reasons)
