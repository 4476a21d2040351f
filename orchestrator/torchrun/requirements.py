"""Checks the requirements of a group under torchrun: GPUs, memory, the run's folder, one disk.

Each machine's ranks check their machine. Rank 0 checks what all ranks must agree on. Importing this module
loads no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.checkpoint.node_local.node_folder import expanded, make_node
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.errors import OrchestratorError, RefusedError, ResourceError, text_of
from orchestrator.history.metrics.loggers import require_loggers
from orchestrator.launch.start import run_preparation as starting

if TYPE_CHECKING:
    from orchestrator.planning.state.memory import ParallelChoice
    from orchestrator.torchrun.store_rendezvous import StoreRendezvous


def require_gpus() -> None:
    """Raises `ResourceError` if this machine has fewer GPUs than ranks."""
    import torch

    needed, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if needed > there:
        raise ResourceError(
            f"cluster.use_gpu=true with {needed} ranks on this machine, but torch sees {there} GPUs; "
            f"start at most {there} ranks here (--nproc-per-node), or set cluster.use_gpu=false",
            code="machine.too_few_gpus",
        )


def require_memory(job: JobConfig) -> ParallelChoice:
    """Returns how the state is divided, if the ranks on this machine have memory for it. Raises
    `ResourceError`.

    Each rank reads the data itself, which is not counted.
    """
    from orchestrator.launch.capacity.capacity import (
        Workers,
        capacity_problems,
        choose_parallel,
        without_memory_points,
    )
    from orchestrator.launch.capacity.cluster_inventory import machines_here
    from orchestrator.launch.capacity.placement_check import measured, with_known_shape

    # one rank of a machine measures for all of it
    judges = os.environ.get("LOCAL_RANK", "0") == "0"
    job = without_memory_points(measured(job, None, None)[0] if judges else with_known_shape(job))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = int(os.environ.get("WORLD_SIZE", str(num_ranks)))
    workers = Workers(num_workers=num_ranks, world_size=world_size, with_feed=False)
    here = machines_here(job.cluster.use_gpu)
    choice = choose_parallel(job, workers, here)
    if problems := capacity_problems(job, choice.num_shards, workers, here):
        raise ResourceError("\n".join(problems), code="cluster.too_small")
    return choice


def say_disk(rendezvous: StoreRendezvous, folder: str | None) -> None:
    """Publishes which disk this rank sees, for `require_group`. Every rank calls it."""
    if folder is not None:
        try:
            said = [make_node(expanded(folder), "").id, ""]
        except OrchestratorError as error:
            said = ["", text_of(error)]
        rendezvous.store.set(f"disk/{rendezvous.rank}", json.dumps(said))


def require_group(
    rendezvous: StoreRendezvous, job: JobConfig, store: RunStore, say: Callable[[str], None]
) -> None:
    """Rank 0: raises what refuses the start before the run is read."""
    if lacks := starting.check_writable(store.storage):
        say(f"note: {lacks}")
    _require_one_disk(rendezvous, job.resume.node_folder)
    require_loggers(job.monitor.loggers)


def _require_one_disk(rendezvous: StoreRendezvous, folder: str | None) -> None:
    """Rank 0: raises `RefusedError` if ranks have different node folders, because no rank could reach them
    all.
    """
    if folder is None:
        return
    found = [json.loads(rendezvous.store.get(f"disk/{rank}")) for rank in range(rendezvous.world_size)]
    if wrong := [text for _, text in found if text]:
        raise ResourceError(
            f"resume.node_folder={folder} cannot be used: {'; '.join(dict.fromkeys(wrong))}",
            code="storage.node_folder_unusable",
        )
    if (num_disks := len({node for node, _ in found})) > 1:
        raise RefusedError(
            f"resume.node_folder={folder}: the {rendezvous.world_size} ranks of this group see {num_disks} "
            "disks there, and under torchrun a rank cannot read another machine's disk; start the run with "
            "`orchestrator train` on Ray, on one machine, or without the key",
            code="storage.several_node_disks",
        )
