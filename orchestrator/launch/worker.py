"""What runs in each Ray Train worker: the training loop, joined to the coordinator and the feeder by remote
calls.

It holds no decision about membership, data or points: it repeats calls until they are answered and hands the
answers to the loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError

from orchestrator.config.schema import JobConfig
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.paused_gc import paused_gc
from orchestrator.planning.schedule import Budgets

if TYPE_CHECKING:
    from orchestrator.parts.reached_nodes import ReachedNodes
    from orchestrator.resume.committed import CommittedFiles
    from orchestrator.trainer.job import TrainJob


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTask:
    """All that a worker needs to take part in a launch; it crosses the process border by pickle, written and
    read by this package.
    """

    launch: str
    coordinator: Any  # actor handles
    feeder: Any
    config: JobConfig
    budgets: Budgets
    config_digest: str
    storage: str  # as `open_storage` takes it
    num_shards: int | None = 1  # see `TrainJob`
    fault_plan: str = ""  # JSON of faults.FaultPlan, "" outside tests
    until_tokens: int | None = None  # see `TrainJob`
    nodes: Any = None  # a `ReachedNodes`: on whose disks parts of points may lie


class RayCalls:
    """`remote_membership.Calls` to a Ray actor. Ray's own retries are off, because a repeated `join` would
    carry an old step and a dead address.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        """See `Calls`."""
        from orchestrator.launch.remote_membership import UnansweredError

        try:
            return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=limit_s)
        except (ActorUnavailableError, ActorDiedError, RayActorError, GetTimeoutError) as error:
            raise UnansweredError(f"{type(error).__name__}: {error}") from error


def _files(task: WorkerTask, address: str) -> CommittedFiles:
    """Where points are read, and where this worker's parts of them go."""
    from orchestrator.parts.node_storage import run_storage
    from orchestrator.parts.parts_on_node import PartsOnNode
    from orchestrator.resume.committed import CommittedFiles
    from orchestrator.resume.run_file import folder_on_nodes

    storage, folder = run_storage(task.storage, task.nodes), task.config.resume.node_folder
    if folder is None:
        return CommittedFiles(storage)
    say = logging.getLogger(__name__).warning
    announce_workers(task.nodes, say)  # before this one joins: the others' copies may come here
    return CommittedFiles(storage, PartsOnNode(folder, folder_on_nodes(storage), address, task.nodes, say))


def announce_workers(nodes: ReachedNodes, say: Callable[[str], None]) -> None:
    """Offers this node's disk for copies of the other nodes' parts; without an answer none come here."""
    try:
        nodes.workers_came()
    except StorageError as error:
        say(f"no copies of other nodes' resume points come to this node ({error}); training continues")


def _job(task: WorkerTask) -> TrainJob:
    """What the loop needs of it."""
    from orchestrator.trainer.job import TrainJob

    return TrainJob(
        model=task.config.model,
        train=task.config.train,
        resume=task.config.resume,
        seq_len=task.config.pack.seq_len,
        document_attention=task.config.pack.attends_by_document,
        budgets=task.budgets,
        config_digest=task.config_digest,
        device="cuda" if task.config.cluster.use_gpu else "cpu",
        digest_every_steps=task.config.monitor.digest_every_steps,
        num_shards=task.num_shards,
        until_tokens=task.until_tokens,
    )


def train_function(config: dict[str, Any]) -> None:
    """The Ray Train function of every worker. An error of ours is reported to the coordinator, which ends the
    run; any other is raised too, so that Ray replaces the process.
    """
    task: WorkerTask = config["task"]
    # Few threads and no telemetry in a process of which a machine runs many.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with paused_gc():
        from orchestrator.data.feed.remote_feed import RayFeed
        from orchestrator.faults import hook
        from orchestrator.launch.remote_membership import Place, RemoteMembership
        from orchestrator.trainer.loop import train

    job = _job(task)
    context = ray.get_runtime_context()
    place = Place(
        actor_id=context.get_actor_id() or "",
        node_id=context.get_node_id(),
        host=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
    )
    membership = RemoteMembership(RayCalls(task.coordinator), task.launch, place)
    try:
        train(
            job,
            membership,
            RayFeed(task.feeder, task.launch),
            _files(task, place.host),
            faults=hook(task.fault_plan),
        )
    except OrchestratorError as error:
        membership.failed(error)
    except BaseException as error:
        with suppress(OrchestratorError):  # who does not answer learns it from Ray
            membership.failed(error)
        raise
