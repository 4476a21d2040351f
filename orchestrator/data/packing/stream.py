"""One source's token stream, cut into steps: chunks of tokens go in, samples and cursors come out.

It knows no file and no tokenizer; what a chunk holds is taken as it comes, its place in the order is checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.data.packing.segments import Before, Counts, Segment, without_entries
from orchestrator.data.packing.step_samples import SOURCE_NUMBER, StepSamples
from orchestrator.data.packing.unfinished import UnfinishedDocument
from orchestrator.data.settings import BAD_SHARE_RECORDS, StreamSettings
from orchestrator.errors import DataError, DataIdentityError, FeedError
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.digest import add_tokens, token_hasher
from orchestrator.records import Cursor, Int32Array, Int64Array, SourceCursor, StepRange, TokenChunk

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec

__all__ = ["StepSamples", "Packer", "Sample", "open_samples"]

_NOTHING = (np.empty(0, np.int32), np.empty(0, np.int64))


class Packer:
    """Chunks in, steps out, from a cursor on. Holds the chunks not drawn yet; not for several threads.

    `feed` every chunk of the tasks from the cursor on, in order, then `finish`; `draw` consecutive steps.
    """

    def __init__(self, cursor: Cursor, source: str, num_blocks: int, settings: StreamSettings) -> None:
        self._source, self._num_blocks, self._settings = source, num_blocks, settings
        self._before = cursor
        start = cursor.sources.get(source, SourceCursor())
        self._source_cursor = start
        self._start: SourceCursor | None = start  # until its first chunk has come
        # (epoch, block, window) of the chunk that must come next
        self._expected = (start.epoch, start.block, start.window)
        self._inside_window = False
        self._segments: deque[Segment] = deque()
        self._taken = self._fed = 0  # tokens drawn and fed since the opening
        counts = (start.documents, start.empty_documents, start.bad_documents, start.special_texts)
        self._counts: Counts = counts  # after what is fed
        self._epoch_counts: Counts = counts  # at the beginning of the epoch that is fed
        at_border = (start.block, start.window, start.record, start.piece, start.token) == (0, 0, 0, 0, 0)
        self._epoch_tokens = 0 if at_border else 2  # tokens of that epoch, as far as 2
        self._document, self._token_document = 0, -1  # numbers of the last entry's and the last token's
        self._hasher = token_hasher()
        self._hashed_piece: tuple[int, ...] | None = None
        self._unfinished = UnfinishedDocument(start)
        self._opened_inside = start.piece > 0  # what comes first begins no document
        self._finished = False

    @property
    def buffered_tokens(self) -> int:
        """Tokens that are there and not drawn; until the end of the data is known, without the last one.

        `draw(step)` answers exactly when `step.num_tokens + 1` are counted, or after `finish`.
        """
        return self._fed - self._taken if self._finished else max(0, self._fed - self._taken - 1)

    def feed(self, chunk: TokenChunk) -> None:
        """The next chunk.

        Raises `FeedError` if it is not the next one, `DataIdentityError` if the first does not reproduce the
        cursor's tokens, `DataError` if too many documents are bad or the epoch has fewer than two tokens.
        """
        self._require_next(chunk)
        left = self._after_earlier_pieces(chunk)
        if left is None:
            self._go_on(chunk)
            return
        chunk, skip = left, self._verify_start(left)
        before = Before(
            position=self._fed,
            counts=self._counts,
            document=self._document,
            token_document=self._token_document,
            epoch_counts=self._epoch_counts,
            epoch_begins=self._epoch_tokens == 0,
        )
        segment = Segment(chunk, skip, before)
        self._segments.append(segment)
        num_tokens = segment.stop - segment.start
        self._counts = segment.counts_after
        self._document, self._token_document = segment.document_after, segment.token_document_after
        self._fed += num_tokens
        self._epoch_tokens = min(2, self._epoch_tokens + num_tokens)
        self._go_on(chunk)

    def finish(self) -> None:
        """No chunk will follow: the data end here. Raises `FeedError` if an epoch is not read to its end."""
        epoch, block, window = self._expected
        num_epochs = self._settings.num_epochs
        at_border = (block, window, self._inside_window) == (0, 0, False)
        # a cursor after the last epoch that is wanted has nothing to read, wherever it stands
        if not (at_border if num_epochs is None else epoch >= num_epochs):
            raise FeedError(
                f"the stream of source {self._source} ended before epoch {epoch}, block {block}, window "
                f"{window} was there to its end; a part of the data was not delivered"
            )
        self._finished = True

    def draw(self, step: StepRange) -> StepSamples | None:
        """The samples of `step`, or what the data still have of them; None: more chunks are needed first.

        Raises `FeedError` if the step does not begin where the one before ended.
        """
        if step.first_sample != self._before.consumed_samples:
            raise FeedError(
                f"a step from sample {step.first_sample} on was asked for, the stream stands at sample "
                f"{self._before.consumed_samples}; open it at the cursor of that sample"
            )
        assert step.num_samples == ceil_div(step.num_tokens, step.seq_len), f"{step} contradicts itself"
        if not self._finished and self.buffered_tokens < step.num_tokens + 1:
            return None
        left = max(0, self._fed - self._taken - 1)  # positions that have a label
        num = min(step.num_tokens, left)
        num_samples = ceil_div(num, step.seq_len)
        stop = self._taken + num
        tokens, starts = self._gather(self._taken, stop + 1) if num else _NOTHING
        end_of_data = self._finished and num == left
        reasons = self._move_to(stop, tokens[:num], starts)
        if end_of_data and num:
            # what follows the last token is passed by no cursor of these data, and reported all the same
            reasons += tuple(reason for segment in self._segments for reason in segment.take_reasons(None))
        samples = StepSamples(
            step=StepRange(
                first_sample=step.first_sample, num_samples=num_samples, num_tokens=num, seq_len=step.seq_len
            ),
            tokens=tokens,
            document_starts=starts[starts < num],
            source=self._source,
            before=self._before,
            source_cursor=self._source_cursor,
            end_of_data=end_of_data,
            bad_reasons=reasons,
        )
        self._before = samples.cursor
        return samples

    # ------------------------------------------------------------------------------------ feeding
    def _require_next(self, chunk: TokenChunk) -> None:
        found = (chunk.epoch, chunk.block, chunk.window)
        if self._finished or found != self._expected or chunk.source != self._source:
            raise FeedError(
                f"the chunk of source {chunk.source}, epoch {found[0]}, block {found[1]}, window {found[2]} "
                f"came where that of {self._source}, {self._expected} was due"
                f"{' (after the end)' if self._finished else ''}"
            )

    def _go_on(self, chunk: TokenChunk) -> None:
        """What must come next, and the checks that are due at a window's and an epoch's end."""
        epoch, block, window = self._expected
        self._inside_window = not chunk.ends_window
        if chunk.ends_block:
            block, window = block + 1, 0
        elif chunk.ends_window:
            window += 1
        ends_epoch = block == self._num_blocks
        if ends_epoch:
            if self._epoch_tokens < 2:
                raise DataError(
                    f"epoch {epoch} of source {self._source} has {self._epoch_tokens} tokens, 2 are the "
                    "least; look at data.sources: its path, its text_field"
                )
            epoch, block = epoch + 1, 0
            self._epoch_tokens, self._epoch_counts = 0, self._counts
        self._expected = (epoch, block, window)
        if chunk.ends_window:
            self._judge_bad_share(ends_epoch)

    def _judge_bad_share(self, ends_epoch: bool) -> None:
        """Judged at places that do not depend on where the stream was opened or how chunks were cut."""
        documents, empty, bad, _ = self._counts
        seen = documents + empty + bad
        if (ends_epoch or seen >= BAD_SHARE_RECORDS) and bad > self._settings.max_bad_share * seen:
            raise DataError(
                f"{bad} of the first {seen} documents of source {self._source} are bad, more than "
                f"data.max_bad_share={self._settings.max_bad_share}; fix them, or allow a larger share"
            )

    def _after_earlier_pieces(self, chunk: TokenChunk) -> TokenChunk | None:
        """The chunk without the pieces that lie before the cursor's in its document; None: it has no others.

        They come where the cursor has their digest, and must be those that were trained.
        """
        start = self._start
        if start is None or not start.earlier_digest:
            return chunk
        earlier = (chunk.record == start.record) & (chunk.piece < start.piece)
        num = len(earlier) if earlier.all() else int(earlier.argmin())
        self._unfinished.add(chunk.tokens[: int(chunk.num_tokens[:num].sum())])
        if num and num == len(earlier) and not chunk.ends_window:
            return None
        if self._unfinished.passed != (start.earlier_tokens, start.earlier_digest):
            found, digest = self._unfinished.passed
            raise self._not_reproduced(
                start,
                f"the {start.earlier_tokens} tokens of the document's earlier pieces had digest "
                f"{start.earlier_digest}, and now there are {found} with digest {digest}",
            )
        return without_entries(chunk, num)

    def _verify_start(self, chunk: TokenChunk) -> int:
        """How many tokens of the chunk lie before the cursor. Those of the unfinished piece must be the ones
        that were trained.
        """
        start, self._start = self._start, None
        if start is None or (start.record, start.piece, start.token) == (0, 0, 0):
            return 0
        if not len(chunk.num_tokens):
            raise self._not_reproduced(start, "the window has no such record")
        record, piece, num = int(chunk.record[0]), int(chunk.piece[0]), int(chunk.num_tokens[0])
        if (record, piece) != (start.record, start.piece) or num <= start.token:
            raise self._not_reproduced(
                start, f"the files give {num} tokens for record {record}, piece {piece} there"
            )
        digest = token_hasher(chunk.tokens[: start.token]).hexdigest()
        if start.token and digest != start.prefix_digest:
            raise self._not_reproduced(
                start,
                f"the {start.token} tokens before it had digest {start.prefix_digest} and now have {digest}",
            )
        self._unfinished.add(chunk.tokens[: start.token])
        return start.token

    def _not_reproduced(self, start: SourceCursor, found: str) -> DataIdentityError:
        return DataIdentityError(
            f"the cursor names token {start.token} of record {start.record}, piece {start.piece} (source "
            f"{self._source}, epoch {start.epoch}, block {start.block}, window {start.window}), but {found}; "
            "the data, the tokenizer or the encoder are not those that the run was trained with"
        )

    # ------------------------------------------------------------------------------------ drawing
    def _gather(self, start: int, stop: int) -> tuple[Int32Array, Int64Array]:
        """Tokens [start, stop) in an array of its own, and where documents begin in it."""
        tokens, starts = [], []
        for segment in self._segments:
            if segment.start >= stop:
                break
            tokens.append(segment.tokens_between(start, stop))
            starts.append(segment.document_starts_between(start, stop))
        return np.concatenate(tokens), np.concatenate(starts) - start

    def _move_to(self, stop: int, passed: Int32Array, starts: Int64Array) -> tuple[str, ...]:
        """Puts the next input token at `stop`; the reasons of the bad documents on the way. `starts`: where
        documents begin in `passed` and right after it.

        Drops what lies wholly before it. The digest of the unfinished piece's tokens grows with the tokens
        that are `passed`, so a long piece is not hashed again and again.
        """
        if self._opened_inside and not self._taken:
            starts = starts[starts > 0]
        self._taken = stop
        if stop >= self._fed:  # opened where nothing is left to read
            return ()
        here = next(i for i, segment in enumerate(self._segments) if stop < segment.stop)
        place = self._segments[here].place_of(stop)
        reasons: list[str] = []
        # at an epoch's border its entries are still to come, be they empty or bad ones before its first token
        while here and not (place.epoch_border and self._segments[0].chunk.epoch == place.piece_key[0]):
            reasons += self._segments.popleft().take_reasons(None)
            here -= 1
        if not place.epoch_border:
            reasons += self._segments[0].take_reasons(place.entry)
        if place.piece_key == self._hashed_piece:
            add_tokens(self._hasher, passed)
        else:
            self._hasher = token_hasher(self._segments[here].piece_tokens(place))
            self._hashed_piece = place.piece_key
        begin = int(starts[-1]) if len(starts) else None
        earlier = self._unfinished.move(passed, begin, place.piece_key[-1], place.token)
        self._source_cursor = place.cursor(self._hasher.hexdigest() if place.token else "", earlier)
        return tuple(reasons)


# ---------------------------------------------------------------------------------------- sample by sample
@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample of the canonical stream. Arrays are int32 of shape (seq_len,); label -100: no loss; document
    id -1: padding. `cursor` is the place after it: a stream opened there continues with the next.
    """

    index: int
    source: str
    input_ids: Int32Array
    labels: Int32Array
    document_ids: Int32Array
    cursor: Cursor


def open_samples(spec: DataSpec, cursor: Cursor, seq_len: int) -> Iterator[Sample]:
    """The samples from `cursor` on, in this process, to the end of the data. The last may be shortened.

    Raises `DataIdentityError` if the files or the tokenizer are not those of the cursor, `DataError` for what
    cannot be read.
    """
    packer, source = spec.packer(cursor), spec.plans[SOURCE_NUMBER].source
    chunks = spec.chunks(cursor)
    index = cursor.consumed_samples
    while True:
        step = StepRange(first_sample=index, num_samples=1, num_tokens=seq_len, seq_len=seq_len)
        while (samples := packer.draw(step)) is None:
            chunk = next(chunks, None)
            if chunk is None:
                packer.finish()
            else:
                packer.feed(chunk)
        if not samples.step.num_samples:
            return
        _, input_ids, labels, document_ids = samples.arrays(0, 1)
        yield Sample(
            index=index,
            source=source,
            input_ids=input_ids[0],
            labels=labels[0],
            document_ids=document_ids[0],
            cursor=samples.cursor,
        )
        index += 1
