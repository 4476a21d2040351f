"""Divides the reading of common data among several readers. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence


def even_runs(sizes: Sequence[int], num_runs: int) -> tuple[range, ...]:
    """Returns `num_runs` contiguous runs that together are all positions of `sizes`, in order.

    A run may be empty. Each position belongs to the run in whose equal part of the sum its middle is. No run
    thus has more than its equal part plus the largest size. O(len(sizes) + num_runs).
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
    """Returns the ranks of `needy` among which `rank` divides the common reading, in order.

    `rank` is one of them. The group has one rank of each machine, because a second reader on a machine finds
    the data in memory. `machines[r]` is that of rank r. All ranks are thus divided into as many groups as the
    largest number on one machine.
    """
    counts: dict[int, int] = {}
    places = []
    for each in needy:
        places.append(counts.get(machines[each], 0))
        counts[machines[each]] = places[-1] + 1
    own = places[list(needy).index(rank)]
    return [each for each, place in zip(needy, places, strict=True) if place == own]
