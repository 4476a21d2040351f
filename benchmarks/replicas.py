"""`python -m benchmarks.replicas --json`: what it costs to compare replicas at each save.

The training state has the shapes of GPT-2 (124M) with AdamW: three float32 tensors for each parameter, 1.49
GB. `sum_s` is the time in which one rank sums it (`trainer.saving.staging`); `copy_s` the time in
which it copies the same state to memory that is allocated already, which every save does, too; `hash_s` the
time in which BLAKE3, which a save writes beside its parts, reads it once. One thread each, one after the
other in each of `--repeats` rounds, so that a busy machine slows all three. `sum_to_copy` and `sum_to_hash`
are the medians of the rounds' ratios. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from blake3 import blake3

from benchmarks.common import Samples, medians, say
from orchestrator.planning.state.state_layout import Layout
from orchestrator.trainer.saving.staging import replica_digests, shared_rows
from orchestrator.trainer.weights.state_tensors import whole_item

WIDTH, LAYERS, VOCAB, POSITIONS = 768, 12, 50_257, 1024
BLOCK = (  # the parameters of one layer
    *((WIDTH,) for _ in range(6)),
    (WIDTH, 3 * WIDTH),
    (3 * WIDTH,),
    (WIDTH, WIDTH),
    (WIDTH, 4 * WIDTH),
    (4 * WIDTH,),
    (4 * WIDTH, WIDTH),
)
SHAPES = ((VOCAB, WIDTH), (POSITIONS, WIDTH), *BLOCK * LAYERS, (WIDTH,), (WIDTH,))


def timed(work: Callable[[], object]) -> float:
    """Seconds of wall time."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(repeats: int) -> Samples:
    """The seconds of each round, by figure."""
    torch.set_num_threads(1)
    tensors = [torch.randn(shape) for _ in range(3) for shape in SHAPES]
    staged = [torch.empty_like(tensor) for tensor in tensors]
    items = [whole_item("model", str(i), tensor, sharded=True) for i, tensor in enumerate(tensors)]
    rows = shared_rows(items, Layout(num_shards=1, num_replicas=2))

    def copy() -> None:
        for target, tensor in zip(staged, tensors, strict=True):
            target.copy_(tensor)

    def hash_all() -> None:
        for tensor in tensors:
            blake3(tensor.view(-1).view(torch.uint8).numpy().data)

    copy()  # so that the memory is there
    figures: dict[str, Callable[[], object]] = {
        "sum_s": lambda: replica_digests(rows.sums()),
        "copy_s": copy,
        "hash_s": hash_all,
    }
    samples: Samples = {name: [] for name in (*figures, "sum_to_copy", "sum_to_hash")}
    for _ in range(repeats):
        seconds = {name: timed(work) for name, work in figures.items()}
        seconds["sum_to_copy"] = seconds["sum_s"] / seconds["copy_s"]
        seconds["sum_to_hash"] = seconds["sum_s"] / seconds["hash_s"]
        for name, value in seconds.items():
            samples[name].append(value)
        say("round", samples)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats is at least 1")
    figures: dict[str, Any] = medians(measure(options.repeats))
    figures |= {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
