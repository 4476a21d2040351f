"""Into how many parts a launch cuts the state, and the machines by whose memory that was decided: values that
an attempt's journal keeps.

They decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.planning.memory import ModelSize
from orchestrator.planning.state_layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine for workers: its memory in all (0: not known), and that of each of its GPUs (empty: it has
    none, or nobody knows; a 0: one is there, and its memory is not known).
    """

    host: str
    memory_bytes: int = 0
    gpu_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelChoice:
    """What `train.parallel` came to: `num_shards` as in `state_layout.layout_of` (1: replicate, None: a shard
    for each worker), and why. `machines` are those that were looked at, `cluster` the address of the Ray that
    has them (empty: one that was started for the launch, or none). `size`: by what the model was judged.
    """

    num_shards: int | None
    reason: str
    machines: tuple[Machine, ...] = ()
    cluster: str = ""
    size: ModelSize = ModelSize()


def choice_text(num_shards: int | None) -> str:
    """A number of shards as the configuration names it."""
    if num_shards is None:
        return "shard"
    return "replicate" if num_shards == 1 else f"{{shard: {num_shards}}}"


def layout_text(layout: Layout) -> str:
    """How a state lies on a group, for people."""
    if layout.num_shards == 1:
        return "replicate: each holds the whole state"
    if layout.num_replicas == 1:
        return f"shard: the state in {layout.num_shards} parts"
    return f"{layout.num_replicas} times the state in {layout.num_shards} parts"
