"""What an epoch holds whatever its order: the second half of an audit, which needs neither order nor packer.

It compares contents, not places: two documents with equal tokens are one and the same to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from xxhash import xxh3_64

from orchestrator.data.spec import DataSpec
from orchestrator.records import BAD, EMPTY, Cursor, TokenChunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """`documents` are those with text; `digest` is the sum modulo 2^64 of the xxh3_64 of each one's tokens
    (BOS and EOS included, little-endian int32).
    """

    documents: int = 0
    empty: int = 0
    bad: int = 0
    tokens: int = 0
    digest: int = 0

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.empty:,} empty and {self.bad:,} bad ones, {self.tokens:,} "
            f"tokens, sum of digests {self.digest:016x}"
        )


class Tallies:
    """The tallies of the epochs of a stream whose chunks come by, from the stream's begin on."""

    def __init__(self) -> None:
        self._epochs: dict[int, Tally] = defaultdict(Tally)
        self._hasher: Any = xxh3_64()

    def watch(self, chunks: Iterable[TokenChunk]) -> Iterator[TokenChunk]:
        """The same chunks, counted."""
        for chunk in chunks:
            self._count(chunk)
            yield chunk

    def of(self, epoch: int) -> Tally:
        """What of this epoch has come by."""
        return self._epochs[epoch]

    def _count(self, chunk: TokenChunk) -> None:
        documents = digest = start = 0
        tokens = np.ascontiguousarray(chunk.tokens, dtype="<i4")
        for length, is_last, kind in zip(
            chunk.num_tokens.tolist(), chunk.last_piece.tolist(), chunk.kind.tolist(), strict=True
        ):
            if kind in (BAD, EMPTY):
                continue
            self._hasher.update(tokens[start : start + length])
            start += length
            if is_last:
                documents += 1
                digest += self._hasher.intdigest()
                self._hasher = xxh3_64()
        so_far = self._epochs[chunk.epoch]
        self._epochs[chunk.epoch] = Tally(
            documents=so_far.documents + documents,
            empty=so_far.empty + int((chunk.kind == EMPTY).sum()),
            bad=so_far.bad + int((chunk.kind == BAD).sum()),
            tokens=so_far.tokens + len(tokens),
            digest=(so_far.digest + digest) % 2**64,
        )


def tally_files(spec: DataSpec) -> Tally:
    """One epoch, read in the order of the files. Raises as the stream does where a file cannot be read."""
    settings = replace(spec.settings, shuffle="none", num_epochs=1)
    tallies = Tallies()
    for _ in tallies.watch(replace(spec, settings=settings).chunks(Cursor())):
        pass
    return tallies.of(0)
