"""Chooses the source of the next sample: whole-number weights, counts stored in the cursor, one rule.

See data rule 20. The caller passes how long a sample is and which source has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal

from orchestrator.records.cursor import MixtureShare

__all__ = ["Mixture", "MixtureShare", "whole_weights"]


def whole_weights(weights: Mapping[str, Decimal]) -> dict[str, int]:
    """Returns the weights as the smallest whole numbers in the same ratio.

    The ratio is exact: 0.9 and 0.1 are 9 and 1.
    """
    places = max((-_exponent(weight) for weight in weights.values()), default=0)
    scaled = {name: int(weight.scaleb(max(0, places))) for name, weight in weights.items()}
    assert all(weight > 0 for weight in scaled.values()), f"weights {weights} are not all above 0"
    divisor = math.gcd(*scaled.values())
    return {name: weight // divisor for name, weight in scaled.items()}


def _exponent(weight: Decimal) -> int:
    exponent = weight.as_tuple().exponent
    assert isinstance(exponent, int), f"weight {weight} is no number"
    return exponent


class Mixture:
    """The rule that selects sources, from given counts on.

    Let c be the units charged to a source of weight w, W and t the sums of both over all live sources (W of
    weights, t of units), and L the units of a sample. Eligible are the sources with c·W < w·(t+L). Of these
    the one with the least (c+L)/w is next, ties by name. At every prefix each count is within one sample of
    its share (the rule of the largest deficit reaches 1.19). Units are positions, or with `by` samples one
    for each sample.
    """

    def __init__(self, shares: Mapping[str, MixtureShare], by: str = "tokens") -> None:
        """A share of weight 0 belongs to a source that was removed: its totals are kept."""
        assert by in ("tokens", "samples"), f"shares by {by}"
        self._by = by
        self._shares = dict(shares)
        self._counts = {n: share.count for n, share in shares.items() if share.weight and not share.ended}
        self._samples = {name: share.samples for name, share in shares.items()}
        self._tokens = {name: share.tokens for name, share in shares.items()}
        self._sum()

    @classmethod
    def at(
        cls,
        weights: Mapping[str, int],
        limits: Mapping[str, int | None],
        before: Mapping[str, MixtureShare],
        by: str = "tokens",
    ) -> Mixture:
        """Builds the mixture of sources of these `weights` and `limits` (epochs; None: endless) from the
        state `before`.

        Counts continue if the same sources with the same weights are live. Otherwise they begin at 0, because
        a source whose weight rose would be drawn alone until it has caught up. A source that had ended stays
        ended while its limit is the one at which it did.
        """
        had = {name: share for name, share in before.items() if share.weight}
        live = {name for name, share in had.items() if not share.ended}
        ended = {
            name
            for name, share in had.items()
            if share.ended and name in weights and limits[name] == share.ended
        }
        same = {name: share.weight for name, share in had.items()} == dict(weights)
        same = same and live == weights.keys() - ended
        shares = {name: replace(share, weight=0, count=0, ended=0) for name, share in before.items()}
        for name, weight in weights.items():
            old = before.get(name) or MixtureShare(weight=weight)
            shares[name] = replace(
                old,
                weight=weight,
                count=old.count if same else 0,
                ended=old.ended if name in ended else 0,
            )
        return cls(shares, by)

    @property
    def live(self) -> tuple[str, ...]:
        """The sources that have not ended, by name."""
        return tuple(self._names)

    @property
    def shares(self) -> dict[str, MixtureShare]:
        """The shares to store in the cursor."""
        return {
            name: replace(
                share, count=self._counts.get(name, 0), samples=self._samples[name], tokens=self._tokens[name]
            )
            for name, share in sorted(self._shares.items())
        }

    def copy(self) -> Mixture:
        """Returns another mixture in the same state."""
        return Mixture(self.shares, self._by)

    def next(self, seq_len: int) -> str | None:
        """Returns the source of the next sample, of `seq_len` positions; None: all have ended."""
        best: str | None = None
        best_count = best_weight = 0
        length = 1 if self._by == "samples" else seq_len
        limit = self._total + length
        for name in self._names:
            count, weight = self._counts[name], self._shares[name].weight
            if count * self._weight >= weight * limit:
                continue
            # (c+L)/w is less than the best one's; names are in order, so a tie stays with the first
            if best is None or (count + length) * best_weight < (best_count + length) * weight:
                best, best_count, best_weight = name, count, weight
        assert best is not None or not self._counts, "counts add up to their total, so one is below its share"
        return best

    def charge(self, source: str, num_positions: int) -> None:
        """Records that a sample of `num_positions` was drawn from a live source."""
        units = 1 if self._by == "samples" else num_positions
        self._counts[source] += units
        self._total += units
        self._samples[source] += 1
        self._tokens[source] += num_positions

    def end(self, source: str, limit: int) -> None:
        """Ends a source at its limit of epochs. The counts of the others restart."""
        assert limit > 0, f"source {source} ended at a limit of {limit} epochs"
        del self._counts[source]
        self._counts = dict.fromkeys(self._counts, 0)
        self._shares[source] = replace(self._shares[source], ended=limit)
        self._sum()

    def _sum(self) -> None:
        self._names = sorted(self._counts)
        self._weight = sum(self._shares[name].weight for name in self._names)
        self._total = sum(self._counts.values())
