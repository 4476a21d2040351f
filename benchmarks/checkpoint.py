"""`python -m benchmarks.checkpoint --json`: what a save costs training, and how it compares.

GPT-2 (124M parameters) with AdamW, 1.49 GB of state, on 2 ranks of one thread each that train in one run and
save in turn: by torch's `dcp.save`, by `dcp.async_save` with one stager that is kept (torchtitan's way), and
by this package; then the same sharded by FSDP2, with saves; then with a memory point after every step, which
the other rank borrows as both are on one machine (`memory`), and which is sent to it as if it were on another
node (`memory_sent`: what two nodes would do is done by the two cores); then Ray Train's asynchronous
checkpoint, in a run of its own on the same machine and disk. A step is forward and backward of one sample of
`--seq-len` tokens per rank, gradients summed over the ranks, AdamW.

Every figure is the median over rounds that alternate (`--rounds`, of memory points twice as many; one more
before them warms up and does not count), of the slower rank. A round is `--steps` steps without a save, as
many that begin with one (FSDP2: two at most), and the wait until that is durable. It says what it does as it
goes; `--only ddp` and so on run parts alone. On two cores with nothing else on them it takes twelve minutes.
`samples` in the last line are all measured values.

`blocked_s`: for how long training stands in a save, until the optimizer has written. `slowdown_s`: how much
longer the steps of a round with a save take than those right before without one. `durable_s`: from the save's
begin until it is durable on all ranks (here: COMMIT is). `…_over_…` are ratios; the time of a way that blocks
less than 0.1 ms counts as 0.1 ms in them, the resolution of what is measured.

The last line of the output is one JSON object. Keys of parts that did not run are absent, and the text above
it says which.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_commit import commit
from benchmarks.checkpoint_ranks import FOUND
from benchmarks.common import ROOT, Samples, medians, owned_processes

WORLD_SIZE = 2
RESOLUTION_S = 1e-4
FSDP2_STEPS = 2
KEYS = {
    "blocked_ddp_s": "saves of a replicated state",
    "blocked_fsdp2_s": "saves of a sharded state",
    "slowdown_s": "saves of a replicated state",
    "ray_async_over_ours": "Ray Train's checkpoints, and saves",
    "dcp_stager_over_ours": "saves of a replicated state",
    "durable_over_dcp": "saves of a replicated state",
    "bytes_over_torch_save": "saves of a replicated state",
    "load_verified_over_dcp": "loading that verifies",
    "load_peak_over_state": "loading that verifies",
    "manifest_10k_bytes": "points of 10,000 ranks",
    "commit_10k_s": "points of 10,000 ranks",
    "memory_every_step_overhead": "memory points",
    "memory_sent_every_step_overhead": "memory points",
}

SLOWDOWNS = {
    "slowdown_s": "ours",
    "fsdp2_slowdown_s": "fsdp2",
    "dcp_slowdown_s": "dcp",
    "dcp_stager_slowdown_s": "dcp_stager",
    "ray_async_slowdown_s": "ray_async",
}
PARTS = ("commit", "ddp", "fsdp2", "memory", "ray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--size", choices=["124m", "small"], default="124m")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of a round, with a save and without")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where the saves go; a temporary folder")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="these parts alone")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-", dir=asked.folder) as folder,
        owned_processes(),
    ):
        samples, found = measure(Path(folder), asked)
    report = {**found, "size": asked.size, "rounds": asked.rounds, "steps": asked.steps}
    report |= {"medians": medians(samples), "samples": samples, "cpus": os.cpu_count()}
    for key, part in KEYS.items():
        print(f"{key:28s} {found[key]:.4g}" if key in found else f"{key:28s} absent: {part} not measured")
    if asked.json:
        print(json.dumps(report))


def measure(folder: Path, asked: argparse.Namespace) -> tuple[Samples, dict[str, float]]:
    """All samples, and the figures made of them."""
    samples: Samples = {}
    spec = {"world_size": WORLD_SIZE, "size": asked.size, "rounds": asked.rounds}
    spec |= {"steps": asked.steps, "seq_len": asked.seq_len}
    for name, part in (
        ("commit", _commit),
        ("ddp", _ddp),
        ("fsdp2", _fsdp2),
        ("memory", _memory),
        ("ray", ray),
    ):
        if name in asked.only:
            began = time.monotonic()
            print(f"{name} begins", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
                samples |= part(Path(own), spec)
            print(f"{name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return samples, figures(samples)


def _ddp(folder: Path, spec: dict[str, Any]) -> Samples:
    return ranks(folder, {**spec, "ways": ["dcp", "dcp_stager", "ours"]})


def _fsdp2(folder: Path, spec: dict[str, Any]) -> Samples:
    """Its steps take longer, so that a save ends within two."""
    steps = min(spec["steps"], FSDP2_STEPS)
    return ranks(folder, {**spec, "steps": steps, "sharded": True, "ways": ["fsdp2"]})


def _memory(folder: Path, spec: dict[str, Any]) -> Samples:
    """In twice as many rounds: what it costs is less than steps differ by."""
    rounds = 2 * spec["rounds"]
    return ranks(folder, {**spec, "rounds": rounds, "sharded": True, "ways": ["memory", "memory_sent"]})


def ranks(folder: Path, spec: dict[str, Any]) -> Samples:
    """What the two ranks find."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.checkpoint_ranks",
                str(rank),
                str(store.port),
                str(folder),
                json.dumps(spec),
            ],
            stdout=sys.stderr,  # what rank 0 says as it goes
            stderr=(folder / f"rank{rank}.log").open("w"),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD_SIZE)
    ]
    if any([process.wait() for process in processes]):  # of all, whichever failed
        logs = [(folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(WORLD_SIZE)]
        raise RuntimeError("a rank failed:\n" + "\n".join(logs))
    found: Samples = json.loads((folder / FOUND).read_text())
    return found


def ray(folder: Path, spec: dict[str, Any]) -> Samples:
    """What a run of Ray Train finds."""
    log = folder / "ray.log"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint_ray", str(folder), json.dumps(spec)],
        stdout=sys.stderr,
        stderr=log.open("w"),
        cwd=ROOT,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError("the run of Ray Train failed:\n" + log.read_text()[-3000:])
    found: Samples = json.loads((folder / FOUND).read_text())
    return found


def _commit(folder: Path, _: dict[str, Any]) -> Samples:
    return commit(folder)


def figures(samples: Samples) -> dict[str, float]:
    """The figures that these samples give."""
    found: dict[str, float] = {}
    middle: dict[str, Any] = {name: statistics.median(values) for name, values in samples.items() if values}

    def ratio(key: str, above: str, below: str, least: float = 0.0) -> None:
        if above in middle and below in middle:
            found[key] = max(middle[above], least) / max(middle[below], least)

    for ours, key in (("ours", "blocked_ddp_s"), ("fsdp2", "blocked_fsdp2_s")):
        if f"{ours}_blocked_s" in middle:
            found[key] = middle[f"{ours}_blocked_s"]
    for key, way in SLOWDOWNS.items():
        if f"{way}_steps_s" in samples:
            found[key] = statistics.median(with_one - without for with_one, without in _beside(samples, way))
    ratio("dcp_stager_over_ours", "dcp_stager_blocked_s", "ours_blocked_s", RESOLUTION_S)
    ratio("ray_async_over_ours", "ray_async_blocked_s", "ours_blocked_s", RESOLUTION_S)
    ratio("durable_over_dcp", "ours_durable_s", "dcp_durable_s")
    ratio("bytes_over_torch_save", "ours_bytes", "torch_save_bytes")
    ratio("load_verified_over_dcp", "ours_load_s", "dcp_load_s")
    for way in ("memory", "memory_sent"):
        if f"{way}_steps_s" in samples:
            overheads = [it / without - 1 for it, without in _beside(samples, way)]
            found[f"{way}_every_step_overhead"] = statistics.median(overheads)
    for key in ("load_peak_over_state", "manifest_10k_bytes", "commit_10k_s"):
        if key in middle:
            found[key] = middle[key]
    return found


def _beside(samples: Samples, way: str) -> Iterator[tuple[float, float]]:
    """Of each round the steps with a save, and those right before without."""
    return zip(samples[f"{way}_steps_s"], samples[f"{way}_none_steps_s"], strict=True)


if __name__ == "__main__":
    main()
