"""Checks whether a job fits where it would run: memory, CPUs, GPUs, disk and object store.

This is the driver's side, which queries a connected cluster. `elastic.supervision.policy` and `capacity`
decide what is enough. The memory is estimated from the configuration of the model: that of the job, or of the
folder whose weights it continues. If there is none, the model is tried, and its size measured. Importing this
module loads neither Ray nor torch.

The machines are this machine, the nodes of a cluster, or those that an earlier attempt recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.connection import address_of, gpu_memories, nodes, starts_local_ray
from orchestrator.cluster.machine import gpu_memory_here, memory_here
from orchestrator.config.schema import JobConfig
from orchestrator.elastic.supervision.policy import NodeFacts
from orchestrator.errors import ConfigError, ResourceError
from orchestrator.history.journal.journal_reader import newest_choice
from orchestrator.launch.capacity.capacity import KnownMachines
from orchestrator.launch.capacity.resource_estimate import (
    ResourceEstimate,
    count_parameters,
    needs_of,
    of_measured,
)
from orchestrator.planning.state.memory import Machine
from orchestrator.storage.files import Storage
from orchestrator.trainer.dry_run.model_dry_run import ModelFacts, is_to_try, try_model

if TYPE_CHECKING:
    from orchestrator.elastic.supervision.policy import LaunchLimits
    from orchestrator.launch.on_ray.node_disks import NodeDisks
    from orchestrator.planning.resume.resume_plan import ResumePlan
    from orchestrator.planning.state.memory import ParallelChoice


def with_known_shape(job: JobConfig, before: tuple[int, ParallelChoice] | None = None) -> JobConfig:
    """The job, with `model.config` filled from `config.json` of `model.pretrained`.

    If that does not show the size of the model, as of one with adapters, the size that an earlier attempt
    recorded is used. Unchanged if none is known.
    """
    shape = None if job.model.lora is not None else job.model.config
    if shape is None and job.model.pretrained is not None and job.model.lora is None:
        shape = _read(Path(job.model.pretrained))
    if before is not None and before[1].size.parameters and not count_parameters(shape or {}):
        shape = of_measured(before[1].size)
    return _with_frozen_shapes(_of_shape(job, shape))


def _with_frozen_shapes(job: JobConfig) -> JobConfig:
    """The job, with the `config` of each frozen model filled from `config.json` of its `pretrained`."""
    if not job.model.frozen:
        return job
    frozen = {
        name: each.model_copy(update={"config": _read(Path(each.pretrained))}) if each.pretrained else each
        for name, each in job.model.frozen.items()
    }
    return job.model_copy(update={"model": job.model.model_copy(update={"frozen": frozen})})


def measured(
    job: JobConfig, plan: ResumePlan | None, before: tuple[int, ParallelChoice] | None
) -> tuple[JobConfig, ModelFacts | None]:
    """`with_known_shape`, or if the model's size is still not known, the facts measured by trying the model.

    `before`: what an attempt of the run recorded (with its number); it applies to the model of the run's
    point. Raises `ConfigError` as `try_model`, but not for the model of a point, nor without a plan.
    """
    is_new = plan is not None and is_to_try(plan)
    known = with_known_shape(job, None if is_new else before)
    if count_parameters(known.model.config or {}):
        return known, None
    try:
        facts = try_model(job)
    except ConfigError:
        if is_new:
            raise
        return known, None
    return (known if facts.size is None else _of_shape(known, of_measured(facts.size))), facts


def _read(folder: Path) -> dict[str, object] | None:
    """The configuration in a folder. None if there is no readable one: the code that builds the model reports
    that.
    """
    try:
        shape = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return shape if isinstance(shape, dict) else None


def _of_shape(job: JobConfig, shape: dict[str, object] | None) -> JobConfig:
    if shape is job.model.config:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"config": shape})})


# --------------------------------------------------------------------------------------- whether the job fits
_FREED_S = 10.0  # how long a start waits for resources of an earlier launch


def limits_of(job: JobConfig) -> LaunchLimits:
    """A job's requirements for a cluster, and for each of its workers."""
    from orchestrator.elastic.supervision.policy import LaunchLimits

    cluster = job.cluster
    return LaunchLimits(
        start_workers=cluster.start_workers,
        min_workers=cluster.min_workers,
        max_workers=cluster.max_workers,
        cpus_per_worker=float(cluster.cpus_per_worker),
        gpus_per_worker=1.0 if cluster.use_gpu else 0.0,
        num_tokenizers=job.data.num_tokenizers,
        wait_s=cluster.wait_s,
    )


def divided_here(job: JobConfig, limits: LaunchLimits) -> ParallelChoice | None:
    """How the state is divided if a Ray is started on this machine, else None: the cluster's machines are not
    yet known.

    Raises `ResourceError` if it does not fit.
    """
    if not starts_local_ray(job):
        return None
    choice, problems = _divide(job, limits, machines_here(job.cluster.use_gpu), "")
    _refuse(problems)
    return choice


def fitting(
    job: JobConfig, limits: LaunchLimits, storage: Storage, here: ParallelChoice | None, disks: NodeDisks
) -> tuple[ParallelChoice, LaunchLimits]:
    """How the state is divided on the cluster (`here`, if already determined), and the limits with which the
    job fits.

    Raises `ResourceError`.
    """
    problems: list[str] = []
    if here is None:
        here, problems = _divide(job, limits, machines_of_cluster(job.cluster.use_gpu), address_of(job))
    needs = needs_of(job, here.num_shards, limits.start_workers)
    limits = _preflight(job, needs, limits, storage, problems)
    disks.require_room(_kept_points(job) * needs.point_bytes)
    return here, limits


def require_disk(job: JobConfig, storage: Storage) -> None:
    """Raises `ResourceError` if this machine's disk has no room for the points that the run keeps."""
    from orchestrator.elastic.supervision.policy import disk_problems

    _refuse(disk_problems(*_disk_bytes(job, needs_of(job), storage)), "storage.no_room")


def _divide(
    job: JobConfig, limits: LaunchLimits, machines: Sequence[Machine], cluster: str
) -> tuple[ParallelChoice, list[str]]:
    """How the state is divided on these machines, of the Ray at the address `cluster`, and why it does not
    fit.

    What other jobs use now is not subtracted, because they may end.
    """
    from orchestrator.launch.capacity.capacity import Workers, capacity_problems, choose_parallel

    workers = Workers(num_workers=limits.start_workers)
    choice = choose_parallel(job, workers, machines, cluster)
    return choice, capacity_problems(job, choice.num_shards, workers, machines)


def _refuse(problems: Sequence[str], code: str = "cluster.too_small") -> None:
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ResourceError(f"the job does not fit:\n{listed}", code=code)


def _preflight(
    job: JobConfig, needs: ResourceEstimate, limits: LaunchLimits, storage: Storage, memory: Sequence[str]
) -> LaunchLimits:
    """The limits with which the job fits: with a CPU for each tokenizer, else without.

    Raises `ResourceError` with everything that is missing. `memory` are problems found before.
    """
    from orchestrator.elastic.supervision.policy import preflight, without_tokenizer_cpus

    def look(nodes: tuple[NodeFacts, ...], limits: LaunchLimits) -> list[str]:
        free, needed = _disk_bytes(job, needs, storage)
        return [*memory] + preflight(
            nodes,
            limits,
            disk_free_bytes=free,
            disk_needed_bytes=needed,
            object_store_needed_bytes=needs.object_store_bytes,
        )

    problems: list[str] = []
    for asked in (limits, without_tokenizer_cpus(limits)):
        # The processes of a killed launch keep their CPUs until Ray notices its end: wait if it would then
        # fit.
        deadline = time.monotonic() + _FREED_S
        while problems := look(nodes := node_facts(), asked):
            empty = tuple(replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes)
            if look(empty, asked) or time.monotonic() > deadline:
                break
            time.sleep(0.25)
        if not problems:
            return asked
    _refuse(problems)
    return limits


def _disk_bytes(job: JobConfig, needs: ResourceEstimate, storage: Storage) -> tuple[int | None, int]:
    """Free bytes at the run's storage, and bytes needed for the points that it keeps and one more.

    Free is None if it is not known: in a bucket, or if parts of points are elsewhere.
    """
    from orchestrator.cluster.machine import free_disk_bytes

    elsewhere = storage.folder is None or job.resume.node_folder is not None
    free = None if elsewhere else free_disk_bytes(str(storage.folder))
    return free, _kept_points(job) * needs.point_bytes


def _kept_points(job: JobConfig) -> int:
    return job.resume.keep_latest + job.resume.keep_best + 1


# --------------------------------------------------------------------------------------------------- machines
def machines_here(use_gpu: bool) -> tuple[Machine, ...]:
    """This machine."""
    ((host, num_bytes),) = memory_here()
    return (Machine(host=host, memory_bytes=num_bytes, gpu_bytes=gpu_memory_here() if use_gpu else ()),)


def machines_of_cluster(use_gpu: bool) -> tuple[Machine, ...]:
    """The nodes of the Ray that this process is connected to.

    Ray knows their memory. With `use_gpu`, a task on each node reports its GPUs; for a node that does not
    answer in time they are not known.
    """
    found = nodes()
    asked = [node.node_id for node in found if node.gpus] if use_gpu else []
    gpus = gpu_memories(asked)
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


def node_facts() -> tuple[NodeFacts, ...]:
    """The cluster's nodes in the form for the policy: for placing and preflight."""
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
