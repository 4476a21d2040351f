"""The newest list of the cluster's nodes, combined with other known facts about them.

Pure: times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from orchestrator.elastic.supervision.policy import NodeFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesSeen:
    """The `nodes` as returned by a query that began at `began`.

    A node that was about to be removed keeps this status, whatever later queries return. Drains are never
    cancelled, and Ray forgets a drain (2.60) a moment before it declares the node dead. `going` has the time
    at which each goes. A node whose group ended after the query began is in `unknown`: everything that the
    query returned about it, including its existence, is older than that end.
    """

    nodes: tuple[NodeFacts, ...] = ()
    began: float = 0.0
    going: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)  # node -> when its newest group ended

    @property
    def unknown(self) -> frozenset[str]:
        """The nodes on which nothing may be started before the next query."""
        return frozenset(node for node, at in self.ended.items() if at >= self.began)

    def looked(self, nodes: tuple[NodeFacts, ...], began: float, now: float) -> NodesSeen:
        """Updates from the answer to a query that began at `began`."""
        there = {node.node_id for node in nodes}
        going = {node_id: at for node_id, at in self.going.items() if node_id in there}
        going |= {node.node_id: now + node.grace_s for node in nodes if node.grace_s is not None}
        return NodesSeen(
            nodes=tuple(
                replace(node, grace_s=max(0.0, going[node.node_id] - now))
                if node.grace_s is None and node.node_id in going
                else node
                for node in nodes
            ),
            began=began,
            going=going,
            ended={node: at for node, at in self.ended.items() if at >= began},
        )

    def group_ended(self, node_id: str, now: float) -> NodesSeen:
        """Records that a node's group has ended."""
        return replace(self, ended={**self.ended, node_id: now})
