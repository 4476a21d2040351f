"""The feeder of a launch as a Ray actor: how it is named, made, and given the run's data.

It knows nothing of what a feeder does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from orchestrator.cluster.shield import end_without_raylet, outlive_sigterm
from orchestrator.data.feed.feeder import STALL_S, Feeder
from orchestrator.data.feed.memory import MemoryShares
from orchestrator.data.feed.pipeline_thread import SLOTS_PER_DATASET
from orchestrator.data.spec import DataSpec

# Waiting calls at one time: the ranks' and the tokenizers'.
MAX_CALLS = 20_000


def feeder_name(launch: str) -> str:
    """The actor's name within the launch's namespace."""
    return f"feeder-{launch}"


def start_feeder(
    launch: str,
    spec: DataSpec,
    *,
    num_tokenizers: int,
    replay_bytes: int,
    stall_s: float = STALL_S,
    slots_per_dataset: int = SLOTS_PER_DATASET,
    tokenizer_node: str | None = None,
    tokenizer_cpus: float = 1.0,
    memory: MemoryShares | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Creates the launch's feeder and returns its handle; it lives as long as the handle's owner. `options`:
    more for Ray's `.options`. `tokenizer_node`: where its tokenizers run while that node lives;
    `tokenizer_cpus`: logical CPUs that each of them takes. It uses none itself. `memory`: what each part of
    the feed may hold; None: what the data rules bound alone.

    `spec` goes into Ray's object store once, and from there to the feeder and to every tokenizer; it must fit
    there, and each of these processes holds it in memory.
    """
    wanted: dict[str, Any] = {
        "name": feeder_name(launch),
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,  # the ranks ask again themselves
        "max_concurrency": MAX_CALLS,
        **(options or {}),
    }

    arguments = (
        num_tokenizers,
        replay_bytes,
        stall_s,
        slots_per_dataset,
        tokenizer_node,
        tokenizer_cpus,
        memory,
    )
    return ray.remote(FeederActor).options(**wanted).remote(launch, pinned(spec), *arguments)


class FeederActor(Feeder):
    """The feeder in a process that Ray started, which outlives that Ray for a while: members that save need
    the batch that they train.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        outlive_sigterm()
        end_without_raylet(lambda: False)


def pinned(spec: DataSpec) -> bytes:
    """Puts it into Ray's object store, where it stays as long as this process is connected, and returns a
    small value that leads to it.

    A reference that is pickled on its own pins what it refers to. As an argument of the actor it would not,
    and an actor that is started again needs its arguments once more; in the actor's class, where Ray
    keeps things, too, there is room for 95 MiB.
    """
    value: bytes = ray.cloudpickle.dumps(ray.put(spec))  # type: ignore[no-untyped-call]
    return value
