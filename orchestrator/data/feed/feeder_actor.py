"""Runs the feeder of a launch as a Ray actor: its name, its creation, and its access to the run's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from orchestrator.cluster.shield import end_without_raylet, outlive_sigterm
from orchestrator.data.feed.feeder import STALL_S, Feeder
from orchestrator.data.feed.memory import MemoryShares
from orchestrator.data.feed.pipeline_thread import TokenizerPool
from orchestrator.data.spec import DataSpec

# The maximum number of concurrent calls of ranks and tokenizers.
MAX_CALLS = 20_000


def feeder_name(launch: str) -> str:
    """The actor's name within the launch's namespace."""
    return f"feeder-{launch}"


def start_feeder(
    launch: str,
    spec: DataSpec,
    *,
    tokenizers: TokenizerPool,
    replay_bytes: int,
    stall_s: float = STALL_S,
    memory: MemoryShares | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Creates the launch's feeder and returns its handle. The actor lives as long as the handle's owner.

    `options`: more options for Ray's `.options`. The feeder itself reserves no CPUs. `memory`: what each part
    of the feed may hold; None: only the bounds of the data rules.

    `spec` is put into Ray's object store once. The feeder and every tokenizer read it from there and hold it
    in memory, so it must fit into both.
    """
    wanted: dict[str, Any] = {
        "name": feeder_name(launch),
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,  # the ranks retry themselves
        "max_concurrency": MAX_CALLS,
        **(options or {}),
    }
    arguments = (tokenizers, replay_bytes, stall_s, memory)
    return ray.remote(FeederActor).options(**wanted).remote(launch, pinned(spec), *arguments)


class FeederActor(Feeder):
    """The feeder in a process that Ray started. The process outlives that Ray for a while, because members
    that save need the batch that they are training.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        outlive_sigterm()
        end_without_raylet(lambda: False)


def pinned(spec: object) -> bytes:
    """Puts `spec`, the data of a run, into Ray's object store and returns a small value that leads to it.

    The object stays as long as this process is connected. A reference that is pickled by itself pins its
    object. Passed as an actor argument it would not, and a restarted actor needs its arguments again. The
    actor's class, which Ray also stores, has room for only 95 MiB.
    """
    value: bytes = ray.cloudpickle.dumps(ray.put(spec))  # type: ignore[no-untyped-call]
    return value
