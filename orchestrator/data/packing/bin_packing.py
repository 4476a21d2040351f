"""Arranges the documents of a window into packs: which stretch of which document goes into which sample.

Pure functions of lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from orchestrator.records.arrays import Int64Array

# With at least this many packs in a window, best-fit decreasing fills 98 % or more of them (data rule 21).
MIN_PACKS = 64
_BYTES_PER_TOKEN = 4


def few_packs(source: str, window_bytes: int, seq_len: int) -> tuple[str, ...]:
    """A note if a window of `window_bytes` of text has too few documents to fill its packs."""
    packs = window_bytes // (_BYTES_PER_TOKEN * seq_len)
    if packs >= MIN_PACKS:
        return ()
    return (
        f"source {source} has about {packs} packs of pack.seq_len={seq_len} in a window (at "
        f"{_BYTES_PER_TOKEN} bytes for a token): bestfit packs within windows and fills 98 % from "
        f"{MIN_PACKS} packs on; more documents, or a larger data.window_bytes in a new run, fill more",
    )


def stretches(lengths: Int64Array, seq_len: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Returns (document, first token, positions) of the stretches of documents with `lengths` tokens, at
    least two.

    A document of n tokens has n - 1 positions, each with the next token as its label. If these are more than
    `seq_len`, its stretches have `seq_len` positions each, and the last one has the rest. So each token but
    the first is a target once.
    """
    positions = lengths - 1
    parts = -(-positions // seq_len)
    document = np.repeat(np.arange(len(lengths)), parts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = part * seq_len
    return document, first, np.minimum(positions[document] - first, seq_len)


def best_fit(sizes: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Arranges stretches into packs of at most `capacity` positions.

    Returns the numbers of the stretches in each pack, ascending. Packs are ordered by their first stretch.

    Best-fit decreasing (Johnson 1973; for training "Fewer Truncations Improve Language Modeling", Ding et al.
    2024): the longest first, ties in their order, each into the pack with the least room that takes it, of
    equal ones the oldest. O(n log n) comparisons.
    """
    open_packs: list[tuple[int, int]] = []  # (room, number), sorted
    packs: list[list[int]] = []
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        assert size <= capacity, f"a stretch of {size} positions, packs hold {capacity}"
        at = bisect_left(open_packs, (size, -1))
        if at < len(open_packs):
            room, number = open_packs.pop(at)
            packs[number].append(item)
        else:
            room, number = capacity, len(packs)
            packs.append([item])
        if room > size:
            insort(open_packs, (room - size, number))
    return sorted(sorted(pack) for pack in packs)
