"""`python -m benchmarks.checkpoint --json`: what a save costs training, and how it compares.

GPT-2 (124M parameters) with AdamW, 1.49 GB of state, on 2 ranks of one thread each that train in one run and
save in turn: not at all, by torch's `dcp.save`, by `dcp.async_save` with one stager that is kept
(torchtitan's way), and by this package; then Ray Train's asynchronous checkpoint, in a run of its own on the
same machine. Every figure is the median over rounds that alternate (`--rounds`; the first of each way warms
it up and does not count), of the slower rank. `samples` in the last line are all measured values.

`blocked_s`: for how long training stands in a save, until the optimizer has written. `slowdown_s`: how much
longer the steps of a round with a save take than those of the round beside it without one. `durable_s`: from
the save's begin until it is durable on all ranks (here: COMMIT is). `…_over_…` are ratios; the time of a way
that blocks less than 0.1 ms counts as 0.1 ms in them, the resolution of what is measured.

The last line of the output is one JSON object. Keys of what this version does not have are absent, and the
text above it says which.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_commit import commit
from benchmarks.common import ROOT, Samples, medians, say

WORLD_SIZE = 2
RESOLUTION_S = 1e-4
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--size", choices=["124m", "small"], default="124m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each round; its first begins with the save")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where the saves go; a temporary folder")
    parser.add_argument("--only", nargs="*", default=["commit", "ddp", "fsdp2", "ray"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=asked.folder) as folder:
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
    for name, part in (("commit", _commit), ("ddp", _ddp), ("fsdp2", _fsdp2), ("ray", ray)):
        if name in asked.only:
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder) as own:
                samples |= part(Path(own), spec)
            say(name, samples)
    return samples, figures(samples)


def _ddp(folder: Path, spec: dict[str, Any]) -> Samples:
    return ranks(folder, {**spec, "ways": ["dcp", "dcp_stager", "ours"]})


def _fsdp2(folder: Path, spec: dict[str, Any]) -> Samples:
    """Its rounds without a save are called otherwise than those of a replicated state."""
    found = ranks(folder, {**spec, "sharded": True, "ways": ["fsdp2"]})
    return {name.replace("none_", "fsdp2_none_"): values for name, values in found.items()}


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
            stdout=subprocess.PIPE,
            stderr=(folder / f"rank{rank}.log").open("w"),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD_SIZE)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        logs = [(folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(WORLD_SIZE)]
        raise RuntimeError("a rank failed:\n" + "\n".join(logs))
    found: Samples = json.loads(outputs[0].splitlines()[-1])
    return found


def ray(folder: Path, spec: dict[str, Any]) -> Samples:
    """What a run of Ray Train finds."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint_ray", str(folder), json.dumps(spec)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    found: Samples = json.loads(done.stdout.splitlines()[-1])
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
    if "ours_steps_s" in samples:
        pairs = zip(samples["ours_steps_s"], samples["none_steps_s"], strict=True)
        found["slowdown_s"] = statistics.median(with_one - without for with_one, without in pairs)
    ratio("dcp_stager_over_ours", "dcp_stager_blocked_s", "ours_blocked_s", RESOLUTION_S)
    ratio("ray_async_over_ours", "ray_async_blocked_s", "ours_blocked_s", RESOLUTION_S)
    ratio("durable_over_dcp", "ours_durable_s", "dcp_durable_s")
    ratio("bytes_over_torch_save", "ours_bytes", "torch_save_bytes")
    ratio("load_verified_over_dcp", "ours_load_s", "dcp_load_s")
    for key in ("load_peak_over_state", "manifest_10k_bytes", "commit_10k_s", "memory_every_step_overhead"):
        if key in middle:
            found[key] = middle[key]
    return found


if __name__ == "__main__":
    main()
