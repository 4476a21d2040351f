"""Which rank keeps the copy of whose memory point: one on another node wherever there is one.

Pure; it knows no address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def neighbours(nodes: Sequence[str]) -> tuple[int, ...]:
    """The rank that keeps the copy of each rank's shard; `nodes[rank]` is the node of a rank. Empty for a
    world of one, which has nobody to give a copy to.

    Every rank keeps exactly one copy and never its own. A copy lies on the giver's own node only where it
    must: no copy does if no node has more than half of the ranks; else 2·k - W copies do, k being the ranks
    of that node: they outlive a lost process, not the lost node. The ranks in the order of their nodes,
    shifted by k.
    """
    if len(nodes) < 2:
        return ()
    by_node = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    largest = max(Counter(nodes).values())
    shift = largest if largest < len(nodes) else 1  # on a single node the next rank
    keeper = {rank: by_node[(at + shift) % len(nodes)] for at, rank in enumerate(by_node)}
    return tuple(keeper[rank] for rank in range(len(nodes)))
