"""Machines of given memory, and the sizes of a large model."""

from __future__ import annotations

from orchestrator.planning.state.memory import Machine

GIB = 1 << 30
LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}


def machines(number: int, gib: float, *gpu_gib: float) -> list[Machine]:
    gpus = tuple(int(size * GIB) for size in gpu_gib)
    return [Machine(host=f"m{n}", memory_bytes=int(gib * GIB), gpu_bytes=gpus) for n in range(number)]
