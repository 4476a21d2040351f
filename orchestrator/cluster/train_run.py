"""One Ray Train run on one node, without the processes of it that we do not need.

It replaces private parts of Ray 2.60 and knows nothing of training. Only a node's agent imports it: it loads
Ray Train's controller side. The controller runs in the agent's own process, so the agent's death is the
group's, and a group comes up a process earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import state, worker_group
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from orchestrator.cluster.backend import InPlaceConfig
from orchestrator.cluster.null_actor import NullActor

# Each costs a process or about a CPU second at start and does nothing for us: we hand Ray Train no datasets,
# and placement groups are removed by `remove_orphaned_placement_groups` (measured: with or without Ray's
# cleaner a killed agent leaks one).
_UNUSED_CALLBACKS = (
    "PlacementGroupCleanerCallback",
    "DatasetsCallback",
    "ControllerMetricsCallback",
    "WorkerMetricsCallback",
)


class _PinnedPolicy(FixedScalingPolicy):
    """Asks no autoscaling actor for room: the group is pinned to a node that has it."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Nothing to register."""

    def _maybe_send_resource_request(self) -> None:
        """Nothing to ask for."""


class _NoBarrier:
    """Made as Ray makes its synchronization actor, where workers meet who report to Ray; ours never do."""

    @classmethod
    def options(cls, **_: Any) -> type[_NoBarrier]:
        """Nothing to choose."""
        return cls

    @classmethod
    def remote(cls, **_: Any) -> NullActor:
        """No process is started."""
        return NullActor()


class _LeanTrainer(DataParallelTrainer):
    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ not in _UNUSED_CALLBACKS]

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Result:
        controller = TrainController(**controller_init_kwargs)
        asyncio.run(controller.run())  # type: ignore[no-untyped-call]
        return controller.get_result()


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

    Ray replaces a worker that dies, without end: how often is too often is decided by our own failure budget
    (policy.py), which knows about progress. Raises what Ray Train raises when the group cannot go on.
    """
    setattr(data_parallel_trainer, "create_scaling_policy", _PinnedPolicy)  # noqa: B010
    setattr(worker_group, "SynchronizationActor", _NoBarrier)  # noqa: B010
    setattr(state, "_shutdown_sync_actor", lambda actor: None)  # noqa: ARG005, B010
    _LeanTrainer(
        train_function,
        train_loop_config=config,
        backend_config=InPlaceConfig(),
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu="GPU" in resources_per_worker,
            resources_per_worker=resources_per_worker,
            label_selector={"ray.io/node-id": node_id},  # type: ignore[call-arg]
        ),
        run_config=RunConfig(
            name=name, storage_path=ray_storage, failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()
