"""The machines that workers may run on, with their memory and that of their GPUs.

They are this machine, the nodes of a cluster, or those that an earlier attempt recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.connection import address_of, nodes, starts_local_ray
from orchestrator.cluster.machine import gpu_memory_here, memory_here
from orchestrator.config.schema import JobConfig
from orchestrator.elastic.supervision.policy import NodeFacts
from orchestrator.history.journal.journal_reader import newest_choice
from orchestrator.launch.capacity.capacity import KnownMachines
from orchestrator.planning.state.memory import Machine

_log = logging.getLogger(__name__)
_LOOK_S = 20.0  # how long the nodes may take to report their GPUs


def machines_here(use_gpu: bool) -> tuple[Machine, ...]:
    """This machine."""
    ((host, num_bytes),) = memory_here()
    return (Machine(host=host, memory_bytes=num_bytes, gpu_bytes=gpu_memory_here() if use_gpu else ()),)


def machines_of_cluster(use_gpu: bool) -> tuple[Machine, ...]:
    """The nodes of the Ray that this process is connected to.

    Ray knows their memory. With `use_gpu`, a task on each node reports its GPUs; for a node that does not
    answer in time they are not known.
    """
    from orchestrator.cluster.connection import nodes

    found = nodes()
    asked = [node.node_id for node in found if node.gpus] if use_gpu else []
    gpus = _gpu_memories(asked)
    return tuple(
        Machine(
            host=node.host,
            # Ray divides the available memory between these two; tokens in the object store need memory, too
            memory_bytes=node.memory_bytes and node.memory_bytes + node.object_store_bytes,
            gpu_bytes=gpus.get(node.node_id) or (0,) * (int(node.gpus) if use_gpu else 0),
        )
        for node in found
    )


def known_machines(job: JobConfig, store: RunStore) -> KnownMachines:
    """The machines known without a cluster. Raises `StorageError`.

    They are this machine, if a start would start a Ray on it; else those that the newest attempt on the same
    cluster recorded.
    """
    before = newest_choice(store.storage, store.claim_numbers())
    if starts_local_ray(job):
        source = "this machine, on which a start would start Ray"
        return KnownMachines(machines=machines_here(job.cluster.use_gpu), source=source, before=before)
    known = noted_machines(store)
    same = known.before is not None and known.before[1].cluster == address_of(job)
    return known if same else KnownMachines(before=before)


def noted_machines(store: RunStore) -> KnownMachines:
    """The machines that the run's newest attempt recorded, on any cluster. Raises `StorageError`."""
    before = newest_choice(store.storage, store.claim_numbers())
    if before is None or not before[1].machines:
        return KnownMachines(before=before)
    source = f"the machines that attempt {before[0]} found; a start looks anew"
    return KnownMachines(machines=before[1].machines, source=source, before=before)


def _gpu_memories(node_ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
    if not node_ids:
        return {}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(gpu_memory_here)
    there = {node_id: NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids}
    calls = {look.options(scheduling_strategy=there[node_id]).remote(): node_id for node_id in node_ids}
    done, late = ray.wait([*calls], num_returns=len(calls), timeout=_LOOK_S)
    found = {}
    for call in done:
        try:
            found[calls[call]] = ray.get(call)
        except ray.exceptions.RayError as error:
            _log.warning("the GPUs of node %s could not be queried: %s", calls[call], error)
    for call in late:
        ray.cancel(call, force=True)
    return found


# The cluster's nodes in the form for the policy.
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
