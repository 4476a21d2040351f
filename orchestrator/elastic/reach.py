"""Which members can form a group when some pairs of them cannot reach each other.

Pure: names and pairs; it knows neither how reaching was tried nor what a group is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

# So many undecided members are searched in full (a few thousand branches at most); of more, who fails most is
# left out first.
EXACT = 24


def largest_reaching(
    members: Sequence[str], failed: Collection[tuple[str, str]], holders: Iterable[Collection[str]]
) -> frozenset[str]:
    """The largest set of `members` without a pair of `failed` (in either direction) in it, and with at least
    one of each of `holders`; empty if there is none.

    Among equals the one that keeps who comes first in `members`. Exact up to `EXACT` members with failures.
    """
    order = {member: place for place, member in enumerate(members)}
    needed = [frozenset(of_one) for of_one in holders]
    pairs = {frozenset(pair) for pair in failed if set(pair) <= set(order) and len(set(pair)) == 2}

    def best(kept: frozenset[str], left: set[frozenset[str]]) -> frozenset[str]:
        """Of what is left after leaving out as few as possible; empty if holders do not stay."""
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
