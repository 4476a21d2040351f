"""Node groups: one Ray Train run per node, in an agent actor on that node.

So a node's death ends only its own group. The caller supplies the function that the workers run. Ray replaces
a dead worker of a group in place because the backend says `has_replica_groups`. The rendezvous decides who
trains with whom.

A run has no helper processes of Ray's that we do not need: this replaces private parts of Ray 2.60. Only a
node's agent loads Ray Train's controller side. The controller runs in the agent's own process, so both end
together, and a group starts one process earlier. Where a Ray does not allow a replacement, Ray Train's own
way stays: its helpers' processes belong to the agent and end with it, too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.machine import ProcessLook, look_at_process, process_state
from orchestrator.cluster.private_ray import NullActor, replace
from orchestrator.cluster.ray_inventory import (
    BARRIER,
    CALLBACKS,
    CONTROLLER,
    NODE_GROUPS,
    PLACEMENT_GROUPS,
    REPLACED_ALONE,
    REPLACED_TOGETHER,
    SCALING,
    TRAINER,
)
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


# ------------------------------------------------------------------------------------------ one Ray Train run
class _NoBarrier:
    """A replacement for Ray's synchronization actor, where workers that report to Ray wait for each other.
    Ours never report to it.
    """

    @classmethod
    def options(cls, **_: Any) -> type[_NoBarrier]:
        """Accepts any options."""
        return cls

    @classmethod
    def remote(cls, **_: Any) -> NullActor:
        """Returns a stand-in. No process is started."""
        return NullActor()


class _Unasked:
    """A stand-in for a worker that must not be queried."""

    def is_active(self) -> bool:
        """See Ray's `ReplicaGroup`."""
        return False


def asking_nobody(replace_one: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """Changes Ray's replacement of one worker of a group, so that no other worker is queried.

    Ray's own lets all others forget what they have reported, and ends the group if one of these is dead, too.
    Ours report nothing.
    """

    def replaced(group: Any, index: int) -> None:
        all_of_it = group._replica_groups
        group._replica_groups = [one if n == index else _Unasked() for n, one in enumerate(all_of_it)]
        try:
            replace_one(group, index)
        finally:
            new = group._replica_groups[index]
            group._replica_groups = [new if n == index else one for n, one in enumerate(all_of_it)]

    return replaced


def run_group(
    name: str,
    num_workers: int,
    resources_per_worker: dict[str, float],
    node_id: str,
    ray_storage: str,
    train_function: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
) -> None:
    """Runs `num_workers` workers on the node until their functions have returned; blocks until then.

    `ray_storage` is a folder for Ray Train's own bookkeeping, which is never read. Empty: a folder of this
    node, which is removed with the group.

    Ray replaces a worker that dies, without a limit. Our own failure budget (elastic.failure) sets the
    limit, because it has the progress. Raises what Ray Train raises when the group cannot continue, and
    `ResourceError` for a Ray that cannot start one.
    """
    with paused_gc():  # imported here: only a node's agent needs Ray Train's controller side
        NODE_GROUPS.require()
        REPLACED_ALONE.found()  # only for the message: Ray's own way is the fallback
        from ray.train import FailureConfig, RunConfig, ScalingConfig

        from orchestrator.cluster.backend import InPlaceConfig

    trainer, backend = lean_trainer(), "backend_config"
    if trainer is None:
        from ray.train.torch import TorchTrainer

        trainer, backend = TorchTrainer, "torch_config"
    chosen: dict[str, Any] = {backend: InPlaceConfig()}
    own = nullcontext(ray_storage) if ray_storage else TemporaryDirectory(prefix="orchestrator-ray-")
    with own as folder:
        trainer(
            train_function,
            train_loop_config=config,
            scaling_config=ScalingConfig(
                num_workers=num_workers,
                use_gpu="GPU" in resources_per_worker,
                resources_per_worker=resources_per_worker,
                label_selector={"ray.io/node-id": node_id},  # type: ignore[call-arg]
            ),
            run_config=RunConfig(
                name=name, storage_path=folder, failure_config=FailureConfig(max_failures=-1)
            ),
            **chosen,
        ).fit()


def lean_trainer() -> Any:
    """Ray Train's trainer for any framework, without the helpers that do nothing for us, as far as this Ray
    lets us replace them. None if it has no such trainer.

    Each helper costs a process or about a CPU second at start: we give Ray Train no datasets, placement
    groups are removed by `remove_orphaned_placement_groups` (measured: with or without Ray's cleaner a killed
    agent leaks one), and a group that is pinned to a node needs no autoscaler.
    """
    trainer = TRAINER.found()
    if trainer is None:
        return None
    if (scaling := SCALING.found()) is not None:
        silent = dict.fromkeys(("after_controller_start", "_maybe_send_resource_request"), lambda *_: None)
        replace(SCALING, [type("PinnedPolicy", (scaling[1],), silent)])
    replace(BARRIER, [_NoBarrier, lambda *_: None])
    if (replacing := REPLACED_TOGETHER.found()) is not None:
        replace(REPLACED_TOGETHER, [asking_nobody(*replacing)])
    methods: dict[str, Any] = {}
    if (callbacks := CALLBACKS.found()) is not None:
        create, *unused = callbacks
        methods["_create_default_callbacks"] = lambda self: [
            callback for callback in create(self) if type(callback) not in unused
        ]
    if (controller := CONTROLLER.found()) is not None:
        methods["_initialize_and_run_controller"] = lambda _, **named: _result_of(controller[0](**named))
    return type("LeanTrainer", trainer, methods)


def _result_of(controller: Any) -> Any:
    """Runs Ray Train's controller in this process. Returns its result."""
    asyncio.run(controller.run())
    return controller.get_result()
