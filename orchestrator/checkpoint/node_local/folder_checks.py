"""Tracks which nodes may get workers in a launch with `resume.node_folder`.

Workers are placed only on nodes where that folder exists or could be made. A node that joins later may lack
the variable or the disk, and must not end a run that trains well without it. Pure: times are seconds of one
monotonic clock. The caller asks the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

ASK_AGAIN_S = 30.0  # a node whose folder was wrong: its disk may be mounted meanwhile


class FolderChecks:
    """The answers of the nodes of one launch.

    A node that was right once stays right. A later failure there fails a save, which is retried.
    """

    def __init__(self, right: Iterable[str] = ()) -> None:
        """`right`: the nodes whose folders the start has made."""
        self._right = set(right)
        # when a node is asked again; inf: it was asked and has not answered
        self._not_before: dict[str, float] = {}
        self._told: dict[str, str] = {}

    def to_ask(self, nodes: Iterable[str], now: float) -> list[str]:
        """Returns which of these nodes are to be asked now. They count as asked."""
        due = [n for n in nodes if n not in self._right and self._not_before.get(n, -math.inf) <= now]
        self._not_before.update(dict.fromkeys(due, math.inf))
        return due

    def is_right(self, node: str) -> None:
        """The node has answered: workers can write there."""
        self._right.add(node)
        self._not_before.pop(node, None)

    def is_wrong(self, node: str, reason: str, now: float) -> bool:
        """The node has answered: workers cannot write there. Returns whether to report it, once for each
        reason.
        """
        self._not_before[node] = now + ASK_AGAIN_S
        new = self._told.get(node) != reason
        self._told[node] = reason
        return new

    def is_silent(self, node: str) -> None:
        """The node has not answered, because it is just starting or ending. It is asked again at once."""
        self._not_before.pop(node, None)

    def held_back(self, nodes: Collection[str]) -> frozenset[str]:
        """Returns those of these nodes that get no workers now."""
        return frozenset(nodes) - self._right
