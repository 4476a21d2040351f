"""Chooses which rank keeps the copy of each memory point: one on another node if there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def neighbours(nodes: Sequence[str]) -> tuple[int, ...]:
    """Returns the rank that keeps the copy of each rank's shard. `nodes[rank]` is the node of a rank.

    Empty for a world of one, which has no rank to give a copy to. Every rank keeps exactly one copy and never
    its own. No copy is on the giver's own node if no node has more than half of the ranks. Otherwise 2·k - W
    copies are, where k is the number of ranks of that node: they survive a lost process, but not a lost node.
    The algorithm shifts the ranks in the order of their nodes by k.
    """
    if len(nodes) < 2:
        return ()
    by_node = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    largest = max(Counter(nodes).values())
    shift = largest if largest < len(nodes) else 1  # on a single node the next rank
    keeper = {rank: by_node[(at + shift) % len(nodes)] for at, rank in enumerate(by_node)}
    return tuple(keeper[rank] for rank in range(len(nodes)))
