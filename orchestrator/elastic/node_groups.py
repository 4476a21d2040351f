"""Node groups: one Ray Train run per node, called from an agent actor on that node, so that a node's death
ends only its own group.

It starts and stops processes and knows nothing of training: which function the workers run is handed in. Ray
replaces a dead worker of
a group in place because the backend says `has_replica_groups`; who trains with whom is decided by the
rendezvous, not here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Ray Train's controller polls its workers this often: it decides how soon a dead worker's replacement is
# started.
_CONTROLLER_POLL_S = "0.2"
_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": _CONTROLLER_POLL_S,
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Off by default with replica groups; it only adds an actor.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
# Helpers of Ray Train that cost a process or about a CPU second each at start and do nothing for us: we hand
# it no datasets, and its
# placement groups are removed by `remove_orphaned_placement_groups` (measured: with or without Ray's cleaner
# a killed agent leaks one).
_UNUSED_CALLBACKS = (
    "PlacementGroupCleanerCallback",
    "DatasetsCallback",
    "ControllerMetricsCallback",
    "WorkerMetricsCallback",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """What a node group is: `num_workers` processes with `resources_per_worker` on `node_id`; `name` is
    unique within the storage folder.
    """

    name: str
    node_id: str
    num_workers: int
    resources_per_worker: dict[str, float]
    ray_storage: str  # a folder for Ray Train's own bookkeeping, never read by us


class NodeAgent:
    """The agent of one node: an actor whose life is the group's life (kill it and its controller and workers
    end at once).
    """

    def run(
        self, spec: GroupSpec, train_function: Callable[[dict[str, Any]], None], config: dict[str, Any]
    ) -> None:
        """Runs the group until all its workers' functions returned. Raises what Ray Train raises when the
        group cannot go on.
        """
        os.environ.update(_TRAIN_ENVIRONMENT)
        # Imported here: the agent's process is the only one that needs Ray Train's controller side.
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.backend import Backend, BackendConfig
        from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
        from ray.train.v2.api import data_parallel_trainer
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        class PinnedPolicy(FixedScalingPolicy):
            """Asks no autoscaling actor for room: the group is pinned to a node that has it."""

            def after_controller_start(self, train_run_context: Any) -> None:
                """Nothing to register."""

            def _maybe_send_resource_request(self) -> None:
                """Nothing to ask for."""

        class InPlaceBackend(Backend):
            """Sets up no process group; says that a worker may be replaced alone."""

            has_replica_groups = True

        class InPlaceConfig(BackendConfig):
            """Ray asks for the class of the backend here."""

            backend_cls = property(lambda self: InPlaceBackend)

        class LeanTrainer(DataParallelTrainer):
            """Ray's trainer without the helpers that we do not use."""

            def _create_default_callbacks(self) -> list[Any]:
                return [
                    c
                    for c in super()._create_default_callbacks()
                    if type(c).__name__ not in _UNUSED_CALLBACKS
                ]

        setattr(data_parallel_trainer, "create_scaling_policy", PinnedPolicy)  # noqa: B010
        LeanTrainer(
            train_function,
            train_loop_config=config,
            backend_config=InPlaceConfig(),
            scaling_config=ScalingConfig(
                num_workers=spec.num_workers,
                use_gpu="GPU" in spec.resources_per_worker,
                resources_per_worker=spec.resources_per_worker,
                label_selector={"ray.io/node-id": spec.node_id},  # type: ignore[call-arg]
            ),
            # How often is too often is decided by our own failure budget (policy.py), which knows about
            # progress.
            run_config=RunConfig(
                name=spec.name, storage_path=spec.ray_storage, failure_config=FailureConfig(max_failures=-1)
            ),
        ).fit()

    def kill_process(self, pid: int) -> bool:
        """SIGKILLs a member of this node that was left out of a generation; False if there is no such
        process.
        """
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


class NodeGroup:
    """A started group, seen from the supervisor: its agent and the end that it will come to."""

    def __init__(
        self, spec: GroupSpec, train_function: Callable[[dict[str, Any]], None], config: dict[str, Any]
    ) -> None:
        """Starts the agent on the node and returns at once."""
        self.spec = spec
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 4}
        there = NodeAffinitySchedulingStrategy(node_id=spec.node_id, soft=False)
        agent: Any = ray.remote(NodeAgent).options(scheduling_strategy=there, **options)
        self._agent = agent.remote()
        self._end: Any = self._agent.run.remote(spec, train_function, config)

    def ended(self) -> str | None:
        """None while it runs; then "" for a good end, else the reason of the failure."""
        if not ray.wait([self._end], timeout=0, fetch_local=False)[0]:
            return None
        try:
            ray.get(self._end)
        except Exception as error:  # noqa: BLE001  whatever ended the group is a fact for the policy, named in the journal
            return f"{type(error).__name__}: {error}"
        return ""

    def kill_member(self, pid: int) -> None:
        """Asks the agent to SIGKILL one process of its node; does not wait."""
        self._agent.kill_process.remote(pid)

    def stop(self) -> None:
        """Ends agent, controller and workers at once, and gives their resources back."""
        ray.kill(self._agent, no_restart=True)


def remove_orphaned_placement_groups() -> int:
    """Removes this job's placement groups whose creator (a Ray Train controller) is dead; returns how many.

    Ray removes them only when the whole job ends (2.60: a placement group goes when creator *and* job are
    dead), so a stopped or lost
    node group would keep its CPUs for ever.
    """
    from ray._private.state import state
    from ray.core.generated import gcs_pb2
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    accessor, table_type = state._connect_and_get_accessor(), getattr(gcs_pb2, "PlacementGroupTableData")  # noqa: B009
    job, removed = ray.get_runtime_context().get_job_id(), 0
    for row in accessor.get_placement_group_table():
        table = table_type.FromString(row)
        if table.creator_job_id.hex() != job or not table.creator_actor_dead:
            continue
        if table.state != table_type.REMOVED:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(table.placement_group_id)))
            removed += 1
    return removed
