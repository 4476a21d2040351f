"""One Ray Train run on one node, without Ray's helper processes that we do not need.

It replaces private parts of Ray 2.60. Only a node's agent imports it, because it loads Ray Train's controller
side. The controller runs in the agent's own process, so both end together, and a group starts one process
earlier. Where a Ray does not allow a replacement, Ray Train's own way stays: its helpers' processes belong to
the agent and end with it, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

from orchestrator.cluster.private_ray import NullActor, replace
from orchestrator.cluster.ray_inventory import (
    BARRIER,
    CALLBACKS,
    CONTROLLER,
    NODE_GROUPS,
    REPLACED_ALONE,
    REPLACED_TOGETHER,
    SCALING,
    TRAINER,
)


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

    `ray_storage` is a folder for Ray Train's own bookkeeping, which nobody reads. Empty: one of this node,
    which is removed with the group.

    Ray replaces a worker that dies, without a limit. Our own failure budget (elastic.failure) sets the
    limit, because it has the progress. Raises what Ray Train raises when the group cannot continue, and
    `ResourceError` for a Ray that cannot start one.
    """
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
        methods["_initialize_and_run_controller"] = lambda _, **arguments: _run(controller[0](**arguments))
    return type("LeanTrainer", trainer, methods)


def _run(controller: Any) -> Any:
    """Runs Ray Train's controller in this process. Returns its result."""
    asyncio.run(controller.run())
    return controller.get_result()
