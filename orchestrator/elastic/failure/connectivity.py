"""Finds members that can form a group although some pairs of them cannot reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

# Up to this many undecided members are searched exactly (a few thousand branches at most). Of more, the
# member with the most failures is left out first.
EXACT = 24


def largest_reaching(
    members: Sequence[str], failed: Collection[tuple[str, str]], holders: Iterable[Collection[str]]
) -> frozenset[str]:
    """Returns the largest set of `members` in which all reach each other.

    It contains no pair of `failed`, and at least one of each of `holders`. Pairs count in either direction.
    Empty if there is no such set. Among equals the set that keeps the first in `members` is chosen. Exact up
    to `EXACT` members with failures.
    """
    order = {member: place for place, member in enumerate(members)}
    needed = [frozenset(of_one) for of_one in holders]
    pairs = {frozenset(pair) for pair in failed if set(pair) <= set(order) and len(set(pair)) == 2}

    def best(kept: frozenset[str], left: set[frozenset[str]]) -> frozenset[str]:
        """Returns the best set after leaving out as few as possible; empty if holders are lost."""
        if not all(kept & of_one for of_one in needed):
            return frozenset()
        if not left:
            return kept
        degree = Counter(member for pair in left for member in pair)
        worst = max(degree, key=lambda m: (degree[m], order[m]))
        others = frozenset(m for pair in left if worst in pair for m in pair if m != worst)
        without = best(kept - {worst}, {pair for pair in left if worst not in pair})
        if without and len(degree) > EXACT:
            return without
        instead = best(kept - others, {pair for pair in left if not pair & others})
        return max(without, instead, key=lambda s: (len(s), sorted(-order[m] for m in s)[::-1]))

    return best(frozenset(members), pairs)
