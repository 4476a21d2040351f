"""The number of parts of a launch's state, and the machines on which that choice is based.

An attempt's journal stores these values.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.planning.state.memory import ModelSize
from orchestrator.planning.state.state_layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine for workers: its total memory (0: unknown), and that of each of its GPUs.

    `gpu_bytes` is empty if it has none or they are unknown. A 0 is a GPU whose memory is unknown.
    """

    host: str
    memory_bytes: int = 0
    gpu_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelChoice:
    """The result of `train.parallel`.

    `num_shards`: as in `state_layout.layout_of` (1: replicate, None: a shard for each worker), for the given
    `reason`.
    `machines`: those that were considered.
    `cluster`: the address of the Ray that has them (empty: one that was started for the launch, or none).
    `size`: the model's size that the choice is based on.
    """

    num_shards: int | None
    reason: str
    machines: tuple[Machine, ...] = ()
    cluster: str = ""
    size: ModelSize = ModelSize()


def choice_text(num_shards: int | None) -> str:
    """Returns a number of shards as written in the configuration."""
    if num_shards is None:
        return "shard"
    return "replicate" if num_shards == 1 else f"{{shard: {num_shards}}}"


def layout_text(layout: Layout) -> str:
    """Describes the layout of a state on a group, for people."""
    if layout.num_shards == 1:
        return "replicate: each holds the whole state"
    if layout.num_replicas == 1:
        return f"shard: the state in {layout.num_shards} parts"
    return f"{layout.num_replicas} times the state in {layout.num_shards} parts"
