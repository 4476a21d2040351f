"""The run's place in its data, as stored in points and journal."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCursor:
    """The place of one source's next input token, and counts of what was passed.

    The place is in normal form (data rule 2). `block` is the position in the epoch's order, `window` counts
    within the block, `record` is the position in the window's order, `token` counts within the piece.
    `prefix_digest` is the xxh3_64 (16 hex digits) of the piece's earlier `token` tokens as little-endian
    int32. A resume that does not reproduce them is refused. `earlier_tokens` and `earlier_digest` are the
    same for the document's earlier pieces (0 and empty in its first piece, and in cursors of versions before
    these fields). Counts rise when the cursor passes a record.

    Under `pack.mode: bestfit` and `pad` it names the begin of a window (record, piece and token are 0) and
    how many of that window's packs were taken: `packs`, of `pack_seq_len` positions each (0 if none was),
    whose tokens have digest `prefix_digest`. Counts rise when all packs of the window are taken.
    `unpacked_documents` had no target. `long_documents` were longer than a sample and skipped.

    A record may produce several documents (`data.transforms`): `output` is the number of the current one, and
    counts are of produced documents. `filtered_documents` are those that a transform dropped,
    `held_out_documents` the records of `data.holdout`.
    """

    epoch: int = 0
    block: int = 0
    window: int = 0
    record: int = 0
    output: int = 0
    piece: int = 0
    token: int = 0
    prefix_digest: str = ""
    documents: int = 0
    empty_documents: int = 0
    bad_documents: int = 0
    special_texts: int = 0
    earlier_tokens: int = 0
    earlier_digest: str = ""
    packs: int = 0
    pack_seq_len: int = 0
    unpacked_documents: int = 0
    long_documents: int = 0
    filtered_documents: int = 0
    held_out_documents: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureShare:
    """One source's share in a mixture (`planning.mixture`).

    `weight`: its weight as a whole number (0: it was removed).
    `count`: the units charged to it since the weights or the live sources last changed.
    `ended`: the limit of epochs at which it ended (0: it is live).
    `samples` and `tokens` (positions): everything that was drawn from it.
    """

    weight: int
    count: int = 0
    ended: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The run's place in its data.

    `consumed_samples` counts the trained samples, `skipped_samples` those that were drawn and not trained
    (`resume.data: skip`). A sample's index is the number of samples drawn before it. `consumed_tokens` counts
    positions that had a real input token, under `pack.mode: bestfit` and `pad` all positions of a sample.
    `target_tokens` counts those with a label. `skipped_tokens` are the positions of the skipped samples.
    `mixture` is empty for one source.
    """

    consumed_samples: int = 0
    consumed_tokens: int = 0
    target_tokens: int = 0
    sources: dict[str, SourceCursor] = field(default_factory=dict)
    skipped_samples: int = 0
    mixture: dict[str, MixtureShare] = field(default_factory=dict)
    skipped_tokens: int = 0

    @property
    def drawn_samples(self) -> int:
        """Samples drawn so far on the lineage: the index of the next one (data rule 3)."""
        return self.consumed_samples + self.skipped_samples

    def drawn_from(self, sources: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Returns (samples, positions) drawn from each of `sources`, all that the run has had."""
        if not self.mixture and len(self.sources) <= 1:
            only = next(iter(self.sources), sources[0])  # the others are added now
            drawn = self.drawn_samples, self.consumed_tokens + self.skipped_tokens
            return {name: drawn if name == only else (0, 0) for name in sources}
        none = MixtureShare(weight=0)
        shares = {name: self.mixture.get(name, none) for name in sources}
        return {name: (share.samples, share.tokens) for name, share in shares.items()}

    def agrees_with(self, other: Cursor) -> bool:
        """Whether both are one place with one history, as far as both know.

        A cursor without the digest of the document's earlier pieces does not contradict one with it.
        """
        mine, others = {**self.sources}, {**other.sources}
        for name in mine.keys() & others.keys():
            if not (mine[name].earlier_digest and others[name].earlier_digest):
                for each in (mine, others):
                    each[name] = dataclasses.replace(each[name], earlier_tokens=0, earlier_digest="")
        return dataclasses.replace(self, sources=mine) == dataclasses.replace(other, sources=others)
