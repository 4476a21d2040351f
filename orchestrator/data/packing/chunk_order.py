"""Checks the order of the chunks that a packer is fed, and the shares of bad documents.

Every packer of a source passes each chunk to it. It checks shares at the ends of windows and epochs.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.data.common.settings import BAD_SHARE_RECORDS, StreamSettings
from orchestrator.data.packing.segments import Counts
from orchestrator.data.tokens.token_chunk import TokenChunk
from orchestrator.errors import DataError, FeedError
from orchestrator.records.cursor import SourceCursor


class ChunkOrder:
    """The order of one source's chunks from a cursor on.

    `num_blocks` returns the number of blocks of an epoch. The source ends before epoch `num_epochs` (None: it
    has no end).
    """

    def __init__(
        self,
        start: SourceCursor,
        source: str,
        num_blocks: Callable[[int], int],
        settings: StreamSettings,
        num_epochs: int | None,
    ) -> None:
        self.source, self.num_epochs = source, num_epochs
        self._num_blocks, self._settings = num_blocks, settings
        # (epoch, block, window) of the chunk that must come next
        self.expected = (start.epoch, start.block, start.window)
        self._inside_window = False
        place = (start.block, start.window, start.record, start.output, start.piece, start.token, start.packs)
        self._epoch_tokens = 2 if any(place) else 0  # tokens fed of the current epoch, counted up to 2
        self.finished = False

    @property
    def epoch_begins(self) -> bool:
        """Whether no token of the epoch has come yet."""
        return self._epoch_tokens == 0

    def require_next(self, chunk: TokenChunk) -> None:
        """Raises `FeedError` if another chunk is due."""
        found = (chunk.epoch, chunk.block, chunk.window)
        if self.finished or found != self.expected or chunk.source != self.source:
            raise FeedError(
                f"a packer got the chunk of source {chunk.source}, epoch {found[0]}, block {found[1]}, "
                f"window {found[2]}, expected is that of source {self.source}, {self.expected}"
                f"{' (after the end)' if self.finished else ''}",
                code="feed.chunk_order",
            )

    def go_on(self, chunk: TokenChunk, num_tokens: int, counts: Counts) -> bool:
        """Advances past a chunk with `num_tokens` new tokens. Returns whether the chunk ends the epoch.

        `counts` are those after the chunk. Raises `DataError` if too many documents are bad or the epoch has
        fewer than two tokens.
        """
        self._epoch_tokens = min(2, self._epoch_tokens + num_tokens)
        epoch, block, window = self.expected
        self._inside_window = not chunk.ends_window
        if chunk.ends_block:
            block, window = block + 1, 0
        elif chunk.ends_window:
            window += 1
        ends_epoch = block == self._num_blocks(epoch)
        if ends_epoch:
            if self._epoch_tokens < 2 and not self._settings.held_out:
                raise DataError(
                    f"epoch {epoch} of source {self.source} has {self._epoch_tokens} tokens, at least 2 are "
                    f"needed ({_of(counts)}); check the source in data.sources: its path, fields, transforms "
                    "and holdout",
                    code="data.nothing_to_train",
                )
            epoch, block = epoch + 1, 0
            self._epoch_tokens = 0
        self.expected = (epoch, block, window)
        if chunk.ends_window:
            self._judge_bad_share(ends_epoch, counts)
        return ends_epoch

    def finish(self) -> None:
        """Ends the data: no chunk will follow. Raises `FeedError` if an epoch was not read to its end."""
        epoch, block, window = self.expected
        at_border = (block, window, self._inside_window) == (0, 0, False)
        # a cursor after the last epoch has nothing to read, at any place
        if not (at_border if self.num_epochs is None else epoch >= self.num_epochs):
            raise FeedError(
                f"the chunks of source {self.source} ended before the end of epoch {epoch}, block {block}, "
                f"window {window}; a part of the data was not delivered",
                code="feed.ended_early",
            )
        self.finished = True

    def _judge_bad_share(self, ends_epoch: bool, counts: Counts) -> None:
        """Checks the share of bad documents. The places of this check do not depend on where the stream was
        opened or how chunks were cut.
        """
        if self._settings.held_out:
            return  # a few records of a run whose other records are checked
        documents, empty, bad, _, filtered, _ = counts
        seen = documents + empty + bad + filtered
        if (ends_epoch or seen >= BAD_SHARE_RECORDS) and bad > self._settings.max_bad_share * seen:
            raise DataError(
                f"{bad} of the first {seen} documents of source {self.source} are bad, more than "
                f"data.max_bad_share={self._settings.max_bad_share}; fix them, or allow a larger share",
                code="data.too_many_bad",
            )


def _of(counts: Counts) -> str:
    """Counts of a source's records by outcome, for messages."""
    documents, empty, bad, _, filtered, held_out = counts
    return (
        f"its records so far: {documents} documents, {empty} empty or without a target, {bad} bad, "
        f"{filtered} dropped by transforms, {held_out} held out"
    )
