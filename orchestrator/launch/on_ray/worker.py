"""The code of each Ray Train worker: the training loop, connected to coordinator and feeder by remote calls.

It makes no decision about membership, data or points. It repeats calls until they are answered and passes the
answers to the loop. Before it asks to join, it checks its machine: the run's storage, packages and clock.
Importing this file does not import torch, so that a machine without torch can report that.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from typing_extensions import override

from orchestrator import __version__
from orchestrator.checkpoint.points.run_file import RUN_FILE, read_run
from orchestrator.cluster.shield import end_without_raylet, expose_forks
from orchestrator.config.schema import JobConfig
from orchestrator.errors import MachineError, OrchestratorError, StorageError, report_of
from orchestrator.launch.member.coordinator_calls import Calls, UnansweredError
from orchestrator.paused_gc import paused_gc
from orchestrator.planning.schedule import Budgets
from orchestrator.records.membership import MachineProof, StillWaiting, Unfit
from orchestrator.records.run_status import MemberInfo
from orchestrator.storage.files import Storage
from orchestrator.storage.open import PROBE, open_storage

if TYPE_CHECKING:
    from orchestrator.checkpoint.node_local.remote_nodes import ReachedNodes
    from orchestrator.checkpoint.points.store import CommittedFiles
    from orchestrator.trainer.evaluation import EvalPart
    from orchestrator.trainer.interfaces.loop_interface import TrainJob

# With another version of one of these, a worker may train something else, or not understand the others.
COMPARED = ("torch", "transformers", "tokenizers")
STORAGE, PACKAGES = "machine.storage", "machine.packages"


def packages_here(adapters: bool = True) -> dict[str, str]:
    """The versions that must be equal on all machines of a run, without packages that are not installed.

    That of peft counts if the run has `adapters`.
    """
    found = {"orchestrator": __version__}
    for name in (*COMPARED, *(("peft",) if adapters else ())):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def require_packages(wanted: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises `MachineError` if a package of the driver has another version `here`, or is missing.

    The builds of a version (`2.5.1+cu124`, `2.5.1+cpu`) may differ.
    """
    differ = [
        f"{name} {here.get(name, 'is not installed')} (the driver has {theirs})"
        for name, theirs in wanted.items()
        if here.get(name, "").partition("+")[0] != theirs.partition("+")[0]
    ]
    if differ:
        raise MachineError(
            f"this machine has other packages than the driver: {', '.join(differ)}; install the driver's "
            "versions on it",
            code=PACKAGES,
        )


def require_storage(storage: Storage, run_id: str, ask: Callable[[MachineProof], Unfit | None]) -> None:
    """Raises `MachineError` if `storage` is not the run's on this machine, or cannot be written.

    Also raises it if the coordinator, which `ask` queries, finds the machine unfit. Writes nothing before
    run.json was read: an empty folder in place of a missing mount stays empty. `run_id`: that of run.json;
    "": the run has none.
    """
    run = read_run(storage)
    if run is None:
        raise MachineError(
            f"{storage.root} has no {RUN_FILE} on this machine, but the driver sees the run there; mount the "
            "run's storage on it",
            code=STORAGE,
        )
    if run_id and run.id != run_id:
        raise MachineError(
            f"{storage.root} holds another run on this machine ({RUN_FILE} has id {run.id}, the run has "
            f"{run_id}); mount the run's storage on it",
            code=STORAGE,
        )
    folder, token = f"{PROBE}{secrets.token_hex(8)}", secrets.token_hex(16)
    probe = f"{folder}/probe"
    try:
        storage.create(probe, token.encode())
        verdict = ask(MachineProof(probe=probe, token=token, unix_s=time.time()))
    except StorageError as error:
        raise MachineError(
            f"{storage.root} cannot be written on this machine: {error}; give the worker's user the right to "
            "write there",
            code=STORAGE,
        ) from error
    finally:
        with suppress(OrchestratorError):
            storage.delete_folder(folder)
    if verdict is not None:
        raise MachineError(verdict.text, code=verdict.code)


# ------------------------------------------------------------------------------------------------- the worker
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
    weights_by_name: bool = True  # see `TrainJob`
    fault_plan: str = ""  # JSON of faults.FaultPlan, "" outside tests
    until_tokens: int | None = None  # see `TrainJob`
    nodes: Any = None  # a `ReachedNodes`: whose disks may have parts of points
    run_id: str = ""  # run.json's
    packages: Mapping[str, str] = field(default_factory=dict)  # versions on the driver
    sources: Mapping[int, str] = field(default_factory=dict)  # their names by number
    eval_data: bytes | None = None  # `pinned`: the data of each part that is evaluated


class RayCalls(Calls):
    """`launch.member.coordinator_calls.Calls` to a Ray actor.

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
    from orchestrator.checkpoint.node_local.node_folder import PartsOnNode
    from orchestrator.checkpoint.node_local.node_storage import run_storage
    from orchestrator.checkpoint.points.run_file import folder_on_nodes
    from orchestrator.checkpoint.points.store import CommittedFiles

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


def _parts(task: WorkerTask) -> list[EvalPart]:
    """What this worker evaluates. It reads and tokenizes all of it, and evaluates its share."""
    if task.eval_data is None:
        return []
    from orchestrator.launch.member.eval_feeds import open_parts

    return open_parts(ray.get(ray.cloudpickle.loads(task.eval_data)))


def _job(task: WorkerTask) -> TrainJob:
    """The part of the task that the loop needs."""
    from orchestrator.trainer.interfaces.loop_interface import TrainJob

    return TrainJob(
        model=task.config.model,
        train=task.config.train,
        resume=task.config.resume,
        eval=task.config.eval,
        seq_len=task.config.sample_len,
        rows_per_sample=task.config.data.rows_per_sample,
        document_attention=task.config.pack.attends_by_document,
        budgets=task.budgets,
        config_digest=task.config_digest,
        device="cuda" if task.config.cluster.use_gpu else "cpu",
        digest_every_steps=task.config.monitor.digest_every_steps,
        num_shards=task.num_shards,
        weights_by_name=task.weights_by_name,
        until_tokens=task.until_tokens,
        run_uri=task.storage,
        sources=task.sources,
        document_losses=task.config.monitor.document_losses or 0,
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
            from orchestrator.trainer.model.blocks import compiles

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
        if compiles(job.train, job.device == "cuda", job.invariant):
            from orchestrator.trainer.model.compiled_kernels import take

            if kernels := _ask(task, "offered_kernels"):
                take(kernels)
        train(
            job,
            membership,
            RayFeed(task.feeder, task.launch),
            files,
            faults=hook(task.fault_plan),
            parts=_parts(task),
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
