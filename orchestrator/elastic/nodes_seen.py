"""The newest look at the cluster's nodes, in the light of what is known beside it.

Pure: no Ray, no clock (seconds of one monotonic clock). What follows from it, the policy decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from orchestrator.elastic.policy import NodeFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesSeen:
    """`nodes` as they were seen by a look that began at `began`.

    A node that was about to be taken away stays so, whatever is seen of it later: nobody calls a drain back,
    and Ray forgets it (2.60) a moment before it calls the node dead. `going` says when each goes. A node
    whose group ended after the look began is in `unknown`: what the look says of it, also that it is there,
    is older than that end.
    """

    nodes: tuple[NodeFacts, ...] = ()
    began: float = 0.0
    going: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)  # when the newest group of a node did

    @property
    def unknown(self) -> frozenset[str]:
        """On these nothing may be started before the next look."""
        return frozenset(node for node, at in self.ended.items() if at >= self.began)

    def looked(self, nodes: tuple[NodeFacts, ...], began: float, now: float) -> NodesSeen:
        """A look that began at `began` has been answered."""
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
        """The group of a node has ended."""
        return replace(self, ended={**self.ended, node_id: now})
