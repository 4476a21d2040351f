"""Node groups: one Ray Train run per node, in an agent actor on that node.

So a node's death ends only its own group. The caller supplies the function that the workers run. Ray replaces
a dead worker of a group in place because the backend says `has_replica_groups`. The rendezvous decides who
trains with whom.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.machine import ProcessLook, look_at_process, process_state
from orchestrator.cluster.ray_inventory import PLACEMENT_GROUPS
from orchestrator.cluster.shield import end_without_raylet, outlive_sigterm
from orchestrator.paused_gc import paused_gc

# Interval at which Ray Train's controller polls its workers. It determines how soon a dead worker's
# replacement is started.
_CONTROLLER_POLL_S = "0.2"
_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": _CONTROLLER_POLL_S,
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Off by default with replica groups; it only adds an actor.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # the controller's own way
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """A node group: `num_workers` processes with `resources_per_worker` on `node_id`. `name` is unique within
    the storage folder.
    """

    name: str
    node_id: str
    num_workers: int
    resources_per_worker: dict[str, float]
    ray_storage: str  # a folder for Ray Train's own bookkeeping, never read by us; see `run_group`


class NodeAgent:
    """The agent of one node: an actor whose life is the group's (kill it and its workers end at once)."""

    def run(
        self, spec: GroupSpec, train_function: Callable[[dict[str, Any]], None], config: dict[str, Any]
    ) -> None:
        """Runs the group until all its workers' functions returned. Raises what Ray Train raises when the
        group cannot continue.
        """
        outlive_sigterm()
        is_done = threading.Event()
        end_without_raylet(is_done.is_set)
        os.environ.update(_TRAIN_ENVIRONMENT)
        # imported here: the agent's process is the only one that needs Ray Train's controller side
        with paused_gc():
            from orchestrator.cluster.train_run import run_group

        try:
            run_group(
                name=spec.name,
                num_workers=spec.num_workers,
                resources_per_worker=spec.resources_per_worker,
                node_id=spec.node_id,
                ray_storage=spec.ray_storage,
                train_function=train_function,
                config=config,
            )
        finally:
            is_done.set()

    def kill_process(self, pid: int) -> bool:
        """SIGKILLs a member of this node that was left out of a generation; False if there is no such
        process.
        """
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def look_at(self, pids: Sequence[int]) -> dict[int, str]:
        """The state of each of these processes of this node; see `cluster.machine.process_state`."""
        return {pid: process_state(pid) for pid in pids}

    def cpu_time_of(self, pids: Sequence[int]) -> dict[int, ProcessLook | None]:
        """The time that each of these processes of this node has run and waited for a CPU so far."""
        return {pid: look_at_process(pid, time.monotonic()) for pid in pids}


@cache
def _agent_class() -> Any:
    """The agent's class, one for all groups. Ray sends each new class to its GCS and waits for that, which
    must not delay a group that is started later.
    """
    return ray.remote(num_cpus=0)(NodeAgent)


class NodeGroup:
    """A started group, seen from the supervisor: its agent and its future end."""

    def __init__(
        self, spec: GroupSpec, train_function: Callable[[dict[str, Any]], None], config: dict[str, Any]
    ) -> None:
        """Starts the agent on the node and returns at once."""
        self.spec = spec
        options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": 4}
        there = NodeAffinitySchedulingStrategy(node_id=spec.node_id, soft=False)
        self._agent = _agent_class().options(scheduling_strategy=there, **options).remote()
        self._end: Any = self._agent.run.remote(spec, train_function, config)

    def ended(self) -> str | None:
        """None while it runs; then "" for a good end, else the reason of the failure."""
        if not ray.wait([self._end], timeout=0, fetch_local=False)[0]:
            return None
        try:
            ray.get(self._end)
        except Exception as error:  # noqa: BLE001  whatever ended the group is a fact for the policy, named in the journal
            cause = getattr(error, "cause", None) or error  # Ray's own text of it is coloured, and says where
            return f"{type(cause).__name__}: {cause}"
        return ""

    def kill_member(self, pid: int) -> None:
        """Asks the agent to SIGKILL one process of its node; does not wait."""
        self._agent.kill_process.remote(pid)

    def look_at(self, pids: Sequence[int]) -> Any:
        """Asks the agent for the states of its processes; a reference to the answer."""
        return self._agent.look_at.remote(list(pids))

    def cpu_time_of(self, pids: Sequence[int]) -> Any:
        """Asks the agent for the CPU time of its processes; a reference to the answer."""
        return self._agent.cpu_time_of.remote(list(pids))

    def stop(self) -> None:
        """Ends agent, controller and workers at once, and gives their resources back."""
        ray.kill(self._agent, no_restart=True)


def remove_orphaned_placement_groups() -> int:
    """Removes this job's placement groups whose creator (a Ray Train controller) is dead. Returns their
    number.

    Ray removes them only when the whole job ends (2.60: once creator *and* job are dead), so a stopped or
    lost node group would keep its CPUs until then. That also happens if Ray's table of them, the only one
    with creators, is missing.
    """
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    found = PLACEMENT_GROUPS.found()
    if found is None:
        return 0
    connect, table_type, read = found[:3]
    job, removed = ray.get_runtime_context().get_job_id(), 0
    for row in read(connect()):
        table = table_type.FromString(row)
        if table.creator_job_id.hex() != job or not table.creator_actor_dead:
            continue
        if table.state != table_type.REMOVED:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(table.placement_group_id)))
            removed += 1
    return removed
