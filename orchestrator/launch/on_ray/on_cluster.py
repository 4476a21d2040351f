"""Runs one launch on a cluster: starts, supervises and ends coordinator, feeder and node groups.

This is the driver's side. Whether a launch may begin, and from which point, is decided before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.checkpoint.points.model_folders import with_paths
from orchestrator.cluster.job_server import job_stop_s
from orchestrator.cluster.ray_inventory import JOB_COPIES
from orchestrator.cluster.ray_state import cause_of_death, told_of
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.process import CoordinatorActor
from orchestrator.data.dataset import eval_specs
from orchestrator.data.feed.feeder import feeder_name, pinned, start_feeder
from orchestrator.data.feed.memory import memory_of
from orchestrator.data.feed.pipeline_thread import TokenizerPool
from orchestrator.data.feed.remote_feed import notes_of
from orchestrator.data.spec import DataSpec
from orchestrator.elastic.formation import GroupSize
from orchestrator.elastic.supervision.policy import LaunchLimits, NodeFacts, tokenizer_node
from orchestrator.elastic.supervision.supervisor import SupervisedLaunch, Supervisor
from orchestrator.errors import code_of, text_of
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import asker
from orchestrator.launch.branch.rewind import is_rewind
from orchestrator.launch.capacity.placement_check import node_facts
from orchestrator.launch.on_ray.node_disks import NodeDisks
from orchestrator.launch.on_ray.worker import WorkerTask, packages_here, train_function
from orchestrator.launch.process.launch_report import say_end, wait_for_points, why_done
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.process.stop_signals import SignalledError, stop_on_signals
from orchestrator.launch.start import run_preparation as starting
from orchestrator.launch.start.attempt_claim import LaunchContext
from orchestrator.launch.start.preview import is_damaged_load
from orchestrator.records.cursor import Cursor
from orchestrator.records.run_status import Loss, RunStatus, Stall
from orchestrator.storage.open import absolute

SETTLE_ANSWER_S = 30.0  # a live coordinator answers sooner
GIVE_UP_S = 2.0  # how long a coordinator may take to record the end of a launch that has not trained


def supervise(
    context: LaunchContext, attempt: Attempt, spec: DataSpec, limits: LaunchLimits, disks: NodeDisks
) -> RunStatus:
    """Starts what the attempt needs and waits until the run has ended. Everything started here ends here.

    `spec` are the frozen data. `disks`: of the nodes, where parts of points may be.
    """
    job, progress = context.job, context.progress
    if not limits.feed_cpus:
        progress.say(
            f"note: the workers leave fewer than data.num_tokenizers={limits.num_tokenizers} CPUs free: the "
            "tokenizers take no CPU of their own and run beside the workers, at the lowest priority"
        )
    # On the driver's node, which the launch cannot outlive: the death of another node then costs only
    # workers. Not soft: Ray 2.60 ignores a soft affinity of actors without CPUs.
    own_node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node_id=own_node, soft=False)
    start = starting.coordinator_start(
        job,
        attempt,
        context.storage.root,
        GroupSize(
            min_workers=limits.min_workers, max_workers=limits.max_workers, expected=limits.max_workers
        ),
        context.fault_plan,
        stop_by=asker() if context.until_tokens is not None else "",
        nodes=disks.nodes,
    )
    coordinator = _start_coordinator(start, here)
    # the same value for starting tokenizers and workers, because free resources change between queries
    roomy = tokenizer_node(node_facts(), limits)
    try:
        feeder = _start_feeder(job, attempt, spec, limits, here, roomy)
    except BaseException as error:
        _give_up(coordinator, error)
        raise
    progress.named("coordinator", partial(told_of, coordinator))
    progress.named("feeder", partial(told_of, feeder), partial(_note_feeder_death, coordinator))
    eval_data = pinned(parts) if (parts := eval_specs(job, spec)) else None
    task = replace(
        _task(context, attempt, coordinator, feeder, disks),
        eval_data=eval_data,
        sources={each.number: each.name for each in spec.sources},
    )
    launch = _launch(context, task, limits, roomy)
    show = _shower(progress, limits, feeder)
    stalled = partial(_say_stall, progress, coordinator)
    look = partial(_look, disks)
    supervisor = Supervisor(launch, coordinator, look, show, stalled, progress.say, own_node)
    try:
        stop, save = partial(_ask_stop, supervisor), supervisor.ask_save
        with stop_on_signals(stop, save, progress.say, lambda: supervisor.has_trained):
            try:
                status = supervisor.run()
            except SignalledError as error:
                if not supervisor.has_trained:
                    _give_up(coordinator, error, "stopped")
                raise
            if status.ended != "failed":
                wait_for_points(partial(_settled, coordinator), progress.say)
        if is_damaged_load(status) or is_rewind(job, status):
            return status  # the start continues an older point
        if status.ended == "done":
            why = why_done(job, attempt.budgets, status.last_step)
            status = replace(status, reason=f"{status.reason}: {why}")
        return say_end(progress, job, status, context.store, attempt.run_id)
    finally:
        for handle in (feeder, coordinator):
            ray.kill(handle, no_restart=True)


def _look(disks: NodeDisks) -> tuple[NodeFacts, ...]:
    return disks.with_room(node_facts())


def _ask_stop(supervisor: Supervisor, by: str) -> None:
    """A signal requests a stop. Ray sends SIGTERM to a job shortly before it kills it."""
    supervisor.ask_stop(by, job_stop_s() if by.startswith("SIGTERM") else math.inf)


def _task(
    context: LaunchContext, attempt: Attempt, coordinator: Any, feeder: Any, disks: NodeDisks
) -> WorkerTask:
    return WorkerTask(
        launch=attempt.launch,
        coordinator=coordinator,
        feeder=feeder,
        config=_with_absolute_weights(context, attempt),
        budgets=attempt.budgets,
        config_digest=starting.config_digest(context.job),
        storage=context.storage.root,
        fault_plan=context.fault_plan,
        until_tokens=context.until_tokens,
        num_shards=starting.num_shards(attempt),
        weights_by_name=attempt.weights_by_name,
        nodes=disks.nodes,
        run_id=attempt.run_id,
        packages=packages_here(adapters=context.job.model.lora is not None),
    )


def _with_absolute_weights(context: LaunchContext, attempt: Attempt) -> JobConfig:
    """The job for workers, whose current folder is another one than this process's.

    A path in a Ray job's copy of its working directory stays as it is: each node has its own copy, which is
    the workers' current folder.
    """
    job = starting.reading_job(context.job, context.store, attempt.point.name if attempt.point else None)

    def placed(path: str) -> str:
        place = absolute(path)
        return path if JOB_COPIES in PurePath(place).parts else place

    return job.model_copy(update={"model": with_paths(job.model, placed)})


def _launch(
    context: LaunchContext, task: WorkerTask, limits: LaunchLimits, roomy: str | None
) -> SupervisedLaunch:
    """The data that the supervisor needs to start workers that do `task`."""
    job, folder = context.job, context.storage.folder
    gpus = {"GPU": 1.0} if job.cluster.use_gpu else {}
    return SupervisedLaunch(
        name=f"{job.run.name}-{task.launch[:6]}",
        train_function=train_function,
        worker_config={"task": task},
        resources_per_worker={"CPU": limits.cpus_per_worker, **gpus},
        ray_storage="" if folder is None else str(folder / "ray"),
        limits=limits,
        tokenizer_node=roomy,
    )


def _give_up(coordinator: Any, error: BaseException, outcome: str = "failed") -> None:
    """Ends a launch before a worker has trained. Its coordinator, if it has begun, records that."""
    with suppress(RayError):
        ray.get(coordinator.end.remote(outcome, text_of(error), code_of(error)), timeout=GIVE_UP_S)
    ray.kill(coordinator, no_restart=True)


def _settled(coordinator: Any, limit_s: float) -> bool | None:
    """Waits until the coordinator has nothing left to verify or delete; False after `limit_s`, None if it
    does not answer.
    """
    try:
        return bool(ray.get(coordinator.settle.remote(limit_s), timeout=limit_s + SETTLE_ANSWER_S))
    except RayError:  # also `GetTimeoutError`
        return None


def _shower(progress: Progress, limits: LaunchLimits, feeder: Any) -> Callable[[RunStatus], None]:
    """Shows each status, lost workers and joined ones. Notifies the feeder of commits, so that it can drop
    steps.
    """
    committed, said = 0, tuple[Loss, ...]()
    failures = set[tuple[int, str]]()

    def show(status: RunStatus) -> None:
        nonlocal committed, said
        for change in status.changes:
            progress.say(sentences.group_change(change, heard=said))
            said = ()
        lost = tuple(loss for loss in status.lost if loss not in said)
        if lost and (status.waiting_since is not None or status.ended == "failed"):
            said = status.lost
            over = status.ended is not None
            waits = sentences.waiting(lost, limits.min_workers, limits.wait_s)
            lost = tuple(sentences.untold(lost, status.reason)) if over else lost
            if lost:
                progress.say(sentences.losses(lost) if over else waits)
        for step, what in set(status.failures) - failures:
            progress.note(f"failure after step {step}: {what}")  # the full text, also a traceback
        failures.update(status.failures)
        progress.show(status)
        if status.committed.consumed_samples > committed:
            committed = status.committed.consumed_samples
            feeder.committed.remote(committed)

    return show


def _say_stall(progress: Progress, coordinator: Any, stall: Stall) -> None:
    for line in sentences.stall(stall):
        progress.say(line)
        coordinator.note.remote(EventKind.UNRESPONSIVE, {"reason": line})


def _note_feeder_death(coordinator: Any, pid: int, host: str, text: str) -> None:
    """Notes the feeder's death. `text` is Ray's message. Does not wait."""
    reason = cause_of_death({"DeathCause": text})
    coordinator.note.remote(EventKind.FEEDER_DIED, {"pid": pid, "host": host, "reason": reason})


def _start_feeder(
    job: JobConfig, attempt: Attempt, spec: DataSpec, limits: LaunchLimits, here: Any, roomy: str | None
) -> Any:
    """The launch's feeder, an actor on the node of `here`, opened where the attempt begins. Its tokenizers
    run on the node `roomy`.
    """
    feeder = start_feeder(
        attempt.launch,
        spec,
        tokenizers=TokenizerPool(
            num=job.data.num_tokenizers, node_id=roomy, cpus=limits.tokenizer_cpus
        ),
        replay_bytes=job.data.replay_bytes,
        memory=memory_of(job, spec),
        options={"scheduling_strategy": here},
    )
    # opened before the workers exist, so that their first batch is ready when they are
    cursor = attempt.point.cursor if attempt.point else Cursor()
    feeder.open.remote(attempt.launch, (attempt.number, 0), cursor)
    return feeder


def _start_coordinator(start: CoordinatorStart, here: Any) -> Any:
    """The launch's coordinator, an actor on the node of `here`."""
    launch = start.attempt.launch
    options: dict[str, Any] = {
        "scheduling_strategy": here,
        "name": f"coordinator-{launch}",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 20_000,
    }
    notes = partial(notes_of, feeder_name(launch))
    return ray.remote(CoordinatorActor).options(**options).remote(start, notes)
