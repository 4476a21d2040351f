"""Who of several readers reads which part of what all of them need. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence


def even_runs(sizes: Sequence[int], num_runs: int) -> tuple[range, ...]:
    """`num_runs` runs of neighbours that together are all positions of `sizes`, in order; a run may be empty.

    Each position goes to the run in whose equal part of the sum its middle lies: so no run has more than its
    equal part and the largest size. O(len(sizes) + num_runs).
    """
    assert num_runs > 0, "somebody must read"
    total, before, at = sum(sizes), 0, 0
    ends = [0] * num_runs
    for number, size in enumerate(sizes):
        if total:
            at = max(at, min(num_runs - 1, (2 * before + size) * num_runs // (2 * total)))
        before += size
        ends[at] = number + 1
    runs, first = [], 0
    for end in ends:
        runs.append(range(first, max(first, end)))
        first = runs[-1].stop
    return tuple(runs)


def readers_with(rank: int, needy: Sequence[int], machines: Sequence[int]) -> list[int]:
    """With which of `needy` (ranks, `rank` among them) `rank` divides the reading of what all of them need,
    in their order: one of each machine, for on one machine a second reader finds it in memory.
    `machines[r]` is that of rank r.

    So all are divided into groups, as many as the most on one machine, and each has its own rank.
    """
    counts: dict[int, int] = {}
    places = []
    for each in needy:
        places.append(counts.get(machines[each], 0))
        counts[machines[each]] = places[-1] + 1
    own = places[list(needy).index(rank)]
    return [each for each, place in zip(needy, places, strict=True) if place == own]
