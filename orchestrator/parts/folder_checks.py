"""Which nodes may get workers while a launch with `resume.node_folder` goes on: those on which that folder is
there or could be made. A node that comes later may lack the variable or the disk, and must not end a run that
trains well without it.

Pure: no Ray, no clock (seconds of one monotonic clock). Who asks the nodes, and when they answer, is the
business of others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

ASK_AGAIN_S = 30.0  # a node whose folder was wrong: its disk may be mounted meanwhile


class FolderChecks:
    """What the nodes of one launch have answered. A node that was right once stays so: what fails later fails
    a save, which is tried again.
    """

    def __init__(self, right: Iterable[str] = ()) -> None:
        """`right`: the nodes whose folders the start has made."""
        self._right = set(right)
        self._not_before: dict[str, float] = {}  # when a node is asked again; inf: it was asked, no answer
        self._told: dict[str, str] = {}

    def to_ask(self, nodes: Iterable[str], now: float) -> list[str]:
        """Which of these nodes are to be asked now; they count as asked."""
        due = [n for n in nodes if n not in self._right and self._not_before.get(n, -math.inf) <= now]
        self._not_before.update(dict.fromkeys(due, math.inf))
        return due

    def is_right(self, node: str) -> None:
        """The node has answered: workers can write there."""
        self._right.add(node)
        self._not_before.pop(node, None)

    def is_wrong(self, node: str, reason: str, now: float) -> bool:
        """The node has answered: they cannot. Whether that is to be told: each reason once."""
        self._not_before[node] = now + ASK_AGAIN_S
        new = self._told.get(node) != reason
        self._told[node] = reason
        return new

    def is_silent(self, node: str) -> None:
        """The node has not answered: it is just coming, or going. It is asked again at once."""
        self._not_before.pop(node, None)

    def held_back(self, nodes: Collection[str]) -> frozenset[str]:
        """Those of these nodes that get no workers now."""
        return frozenset(nodes) - self._right
