"""Random documents in windows, as chunks, and the samples that the package packs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.packing.stream import Stream, StreamSource
from orchestrator.planning.batches import next_range
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import BAD, EMPTY, PIECE, TokenChunk

Row = tuple[list[int], list[int], list[int]]
Documents = list[tuple[list[int], list[bool]]]  # tokens, and which of them are targets


def chunks_of(windows: Sequence[Documents], cuts: int, source: str = "made") -> list[TokenChunk]:
    """One epoch, a block for each window; documents in pieces of at most five tokens, chunks of `cuts`
    entries. Every seventh record is an empty, every ninth a bad one.
    """
    found = []
    for block, documents in enumerate(windows):
        entries: list[tuple[int, int, list[int], list[bool], int, bool]] = []
        for record, (tokens, loss) in enumerate(documents):
            if record % 7 == 6:
                entries.append((record, 0, [], [], EMPTY, True))
            if record % 9 == 8:
                entries.append((record, 0, [], [], BAD, True))
            parts = [slice(i, i + 5) for i in range(0, max(1, len(tokens)), 5)]
            for piece, part in enumerate(parts):
                last = piece == len(parts) - 1
                entries.append((record, piece, tokens[part], loss[part], PIECE, last))
        slices = [entries[i : i + cuts] for i in range(0, len(entries), cuts)] or [[]]
        for number, held in enumerate(slices):
            ends = number == len(slices) - 1
            records = np.array([e[0] for e in held], np.int32)
            masks = [each for e in held for each in e[3]]
            found.append(
                TokenChunk(
                    source=source,
                    epoch=0,
                    block=block,
                    window=0,
                    tokens=np.array([t for e in held for t in e[2]], np.int32),
                    record=records,
                    piece=np.array([e[1] for e in held], np.int32),
                    num_tokens=np.array([len(e[2]) for e in held], np.int32),
                    kind=np.array([e[4] for e in held], np.int32),
                    last_piece=np.array([e[5] for e in held], np.int32),
                    special_texts=0 * records,
                    file=0 * records,
                    place=records.astype(np.int64),
                    loss=None if all(masks) else np.array(masks, np.bool_),
                    bad_reasons=tuple(f"record {e[0]}" for e in held if e[4] == BAD),
                    ends_window=ends,
                    ends_block=ends,
                )
            )
    return found


def settings_of(mode: str, seq_len: int, long_document: str = "split", **more: Any) -> StreamSettings:
    return StreamSettings(
        pack_mode=mode,
        seq_len=seq_len,
        long_document=long_document,
        **{"max_bad_share": 1.0, "max_long_share": 1.0, **more},
    )


@dataclass(frozen=True)
class Drawn:
    rows: list[Row]
    cursors: list[Cursor]  # after each step
    inside: list[Cursor]  # after each sample
    reasons: list[str]


def draw_all(
    windows: Sequence[Documents],
    how: StreamSettings,
    batches: Sequence[int],
    cuts: int,
    cursor: Cursor | None = None,
    stop_tokens: int | None = None,
) -> Drawn:
    cursor = cursor or Cursor()
    at = cursor.sources.get("made", SourceCursor())
    chunks = iter(c for c in chunks_of(windows, cuts) if c.block >= at.block and at.epoch == 0)
    source = StreamSource(name="made", number=0, num_blocks=lambda _: len(windows), num_epochs=1)
    stream, rows, turn = Stream(cursor, [source], how), list[Row](), 0
    cursors, inside, reasons = list[Cursor](), list[Cursor](), list[str]()
    while True:
        step = next_range(
            cursor.consumed_samples, cursor.consumed_tokens, batches[turn % len(batches)], how.seq_len,
            stop_tokens,
        )  # fmt: skip
        if step is None:
            break
        turn += 1
        while (drawn := stream.draw(step, with_cursors=True)) is None:
            # a feed that keeps a step's positions buffered brings the next chunk, too
            assert stream.buffered_tokens("made") < step.num_tokens + 1
            chunk = next(chunks, None)
            if chunk is None:
                stream.finish("made")
            else:
                stream.feed(chunk)
        reasons += [text for _, text in drawn.bad_reasons]
        num = drawn.step.num_samples
        _, *tables = drawn.arrays(0, num)
        rows += list(zip(*(table.tolist() for table in tables), strict=True))
        inside += [drawn.cursor_after(i + 1) for i in range(num)]
        cursor = drawn.cursor
        if num:
            cursors.append(cursor)
        if drawn.end_of_data:
            break
    return Drawn(rows, cursors, inside, reasons)


WINDOWS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 23), st.sampled_from(["all", "none", "some", "rare"])),
        min_size=0,
        max_size=14,
    ),
    min_size=1,
    max_size=4,
)


def documents(windows: list[list[tuple[int, str]]]) -> list[Documents]:
    """Tokens that all differ."""
    counter = iter(range(1, 1 << 20))
    made = []
    for window in windows:
        here: Documents = []
        for length, mask in window:
            tokens = [next(counter) for _ in range(length)]
            every = {"all": 1, "some": 3, "rare": 11}.get(mask)
            here.append((tokens, [every is not None and t % every == 0 for t in tokens]))
        made.append(here)
    if not any(len(tokens) > 1 and loss[1] for window in made for tokens, loss in window):
        made[0].insert(0, ([next(counter), next(counter)], [True, True]))
    return made


def hand_made(
    entries, epoch: int, block: int, window: int, ends_window: bool, ends_block: bool, number: int
) -> TokenChunk:
    table = np.array(entries, np.int32).reshape(len(entries), 5)
    tokens = 1000 * number + np.arange(int(table[:, 2].sum()), dtype=np.int32)
    return TokenChunk(
        source="made", epoch=epoch, block=block, window=window, tokens=tokens, record=table[:, 0],
        piece=table[:, 1], num_tokens=table[:, 2], kind=table[:, 3], last_piece=table[:, 4],
        special_texts=table[:, 0] % 2, file=np.zeros(len(entries), np.int32),
        place=table[:, 0].astype(np.int64), bad_reasons=("bad",) * int((table[:, 3] == BAD).sum()),
        ends_window=ends_window, ends_block=ends_block,
    )  # fmt: skip
