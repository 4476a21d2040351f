"""The cluster's nodes in the form for the policy."""

from __future__ import annotations

from orchestrator.cluster.connection import nodes
from orchestrator.elastic.supervision.policy import NodeFacts


def node_facts() -> tuple[NodeFacts, ...]:
    """The nodes for placing and preflight."""
    return tuple(
        NodeFacts(
            node_id=node.node_id,
            host=node.host,
            is_head=node.is_head,
            cpus=node.cpus,
            gpus=node.gpus,
            free_cpus=node.free_cpus,
            free_gpus=node.free_gpus,
            object_store_bytes=node.object_store_bytes,
            grace_s=node.grace_s,
        )
        for node in nodes()
    )
