"""The code of each Ray Train worker: the training loop, connected to coordinator and feeder by remote calls.

It makes no decision about membership, data or points. It repeats calls until they are answered and passes the
answers to the loop.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from typing_extensions import override

from orchestrator.cluster.shield import end_without_raylet, expose_forks
from orchestrator.config.schema import JobConfig
from orchestrator.errors import OrchestratorError, StorageError, report_of
from orchestrator.launch.member.calls import Calls, UnansweredError
from orchestrator.launch.on_ray.machine_check import packages_here, require_packages, require_storage
from orchestrator.paused_gc import paused_gc
from orchestrator.planning.schedule import Budgets
from orchestrator.records.membership import StillWaiting
from orchestrator.records.run_status import MemberInfo
from orchestrator.storage.open import open_storage

if TYPE_CHECKING:
    from orchestrator.checkpoint.node_local.remote_nodes import ReachedNodes
    from orchestrator.checkpoint.points.rank_files import CommittedFiles
    from orchestrator.trainer.interfaces.job import TrainJob

_ASK_S = 60.0  # a live coordinator answers sooner


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTask:
    """All data that a worker needs to take part in a launch.

    It is pickled across the process border, written and read only by this package.
    """

    launch: str
    coordinator: Any  # actor handles
    feeder: Any
    config: JobConfig
    budgets: Budgets
    config_digest: str
    storage: str  # for `open_storage`
    num_shards: int | None = 1  # see `TrainJob`
    fault_plan: str = ""  # JSON of faults.FaultPlan, "" outside tests
    until_tokens: int | None = None  # see `TrainJob`
    nodes: Any = None  # a `ReachedNodes`: whose disks may have parts of points
    run_id: str = ""  # run.json's
    packages: Mapping[str, str] = field(default_factory=dict)  # versions on the driver


class RayCalls(Calls):
    """`launch.member.calls.Calls` to a Ray actor.

    Ray's own retries are off, because a repeated `join` would carry an old step and a dead address.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    @override
    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        try:
            return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=limit_s)
        except (ActorUnavailableError, ActorDiedError, RayActorError, GetTimeoutError) as error:
            raise UnansweredError(f"{type(error).__name__}: {error}") from error


def _files(task: WorkerTask, address: str) -> CommittedFiles:
    """Where points are read, and where this worker's parts of them are written."""
    from orchestrator.checkpoint.node_local.node_storage import run_storage
    from orchestrator.checkpoint.points.rank_files import CommittedFiles, PartsOnNode
    from orchestrator.checkpoint.points.run_file import folder_on_nodes

    storage, folder = run_storage(task.storage, task.nodes), task.config.resume.node_folder
    if folder is None:
        return CommittedFiles(storage)
    say = logging.getLogger(__name__).warning
    announce_workers(task.nodes, say)  # before this one joins: the others' copies may be sent here
    return CommittedFiles(storage, PartsOnNode(folder, folder_on_nodes(storage), address, task.nodes, say))


def announce_workers(nodes: ReachedNodes, say: Callable[[str], None]) -> None:
    """Offers this node's disk for copies of the other nodes' parts. Without an answer none are sent here."""
    try:
        nodes.workers_came()
    except StorageError as error:
        say(f"no copies of other nodes' resume points come to this node ({error}); training continues")


def _job(task: WorkerTask) -> TrainJob:
    """The part of the task that the loop needs."""
    from orchestrator.trainer.interfaces.job import TrainJob

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
    """The Ray Train function of every worker.

    An error is reported to the coordinator, which decides whether it ends the run. If it does not, it is
    raised, so that Ray replaces the process.
    """
    task: WorkerTask = config["task"]
    expose_forks()
    is_done = threading.Event()
    is_orphaned = end_without_raylet(is_done.is_set)
    # few threads and no telemetry, because a machine runs many of these processes
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context, membership = ray.get_runtime_context(), None
    here = MemberInfo(
        member=os.urandom(6).hex(),
        actor_id=context.get_actor_id() or "",
        node_id=context.get_node_id(),
        pid=os.getpid(),
        host=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
    )
    try:
        _require_machine(task)
        with paused_gc():
            from orchestrator.data.feed.remote_feed import RayFeed
            from orchestrator.faults import hook
            from orchestrator.launch.member.remote_membership import (
                MemberAddress,
                RemoteMembership,
                keep_in_storage,
            )
            from orchestrator.trainer.loop import train

        job = _job(task)
        place = MemberAddress(actor_id=here.actor_id, node_id=here.node_id, host=here.host)
        files = _files(task, place.host)
        membership = RemoteMembership(
            RayCalls(task.coordinator),
            task.launch,
            place,
            keep_vote=partial(keep_in_storage, files.storage),
            is_orphaned=is_orphaned,
        )
        train(
            job,
            membership,
            RayFeed(task.feeder, task.launch),
            files,
            faults=hook(task.fault_plan),
        )
    except BaseException as error:
        replaced = True
        with suppress(OrchestratorError, RayError):  # otherwise the coordinator learns it from Ray
            if membership is not None:
                replaced = membership.failed(error)
            else:
                replaced = _ask(task, "failed", here.member, *report_of(error), (), here)
        if replaced or not isinstance(error, OrchestratorError):
            raise
    finally:
        is_done.set()


def _require_machine(task: WorkerTask) -> None:
    """Raises `MachineError` if this machine cannot take part in the run."""
    require_packages(task.packages, packages_here())
    require_storage(open_storage(task.storage), task.run_id, partial(_ask, task, "check_machine"))


def _ask(task: WorkerTask, method: str, *arguments: Any) -> Any:
    """A call to the coordinator before there is a membership, repeated until it is answered.

    Raises `RayError` if the coordinator is away: Ray then starts another worker.
    """
    while True:
        answer = ray.get(getattr(task.coordinator, method).remote(task.launch, *arguments), timeout=_ASK_S)
        if not isinstance(answer, StillWaiting):
            return answer
