"""`python -m benchmarks.exact --json`: whether a run that is killed ends in the bits of one that is not.

For each way to compute (`WAYS`) two runs of the same job train without Ray, on one device. One of them gets a
SIGKILL in the middle and is started again. `equal`: the digests of the last weights are equal, and so are all
losses. `exactly_once`: the audit of the killed run. `first_step_s`: from the start of its first process to
its first step. The last line is one JSON object {device, ways: {way: {…}}}. The exit code is 1 if one of them
is not equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orchestrator
from benchmarks.common import ROOT
from benchmarks.step import Bench, device_name
from benchmarks.step_loops import SIZES
from benchmarks.step_turns import GPU

STEPS, KILLED_AT, SAVE_EVERY = 24, 15, 6
_LIMIT_S = 900.0
WAYS: dict[str, Sequence[str]] = {
    "fast": (),
    "invariant": ("train.numerics=invariant", "train.precision=float32"),
    "compiled": ("train.compile=blocks",),
    "compiled and recomputed": ("train.compile=blocks", "train.activation_checkpointing=blocks"),
    "shard": ("train.parallel=shard",),
    "shard, compiled and recomputed": (
        "train.parallel=shard",
        "train.compile=blocks",
        "train.activation_checkpointing=blocks",
    ),
    "documents": ("pack.document_attention=true",),
    "compiled documents": ("pack.document_attention=true", "train.compile=blocks"),
}


def examine(bench: Bench, way: str) -> dict[str, Any]:
    """Returns the row of one way."""
    name = way.replace(" ", "-").replace(",", "")
    saves = (f"train.max_steps={STEPS}", f"resume.every_steps={SAVE_EVERY}", "resume.keep_latest=9")
    changes = [*WAYS[way], *saves]
    _to_end(bench, f"{name}-whole", changes)
    (worker,) = bench.product(f"{name}-killed", changes)
    try:
        worker.first_step()
        worker.turn(KILLED_AT - 1)
    finally:
        worker.kill()
    _to_end(bench, f"{name}-killed", changes)
    runs = bench.folder / "runs"
    whole, killed = (orchestrator.open(runs / f"{name}-{kind}") for kind in ("whole", "killed"))
    digests = [run.list_points()[-1]["weights_digest"] for run in (whole, killed)]
    losses = [[record.loss for record in run.records()] for run in (whole, killed)]
    return {
        "equal": digests[0] == digests[1] and losses[0] == losses[1],
        "exactly_once": bool(killed.audit()["exactly_once"]),
        "attempts": killed.records()[-1].attempt,
        "first_step_s": round(worker.first_step_s, 1),
    }


def _to_end(bench: Bench, name: str, changes: Sequence[str]) -> None:
    """Runs the product until it ends. Raises `RuntimeError` with its output if it fails."""
    path, environment = bench.written(name, rank=0, world=1)
    command = [sys.executable, str(ROOT / "jobs" / "torchrun_train.py"), str(path), *changes]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{name} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--size", choices=SIZES, default="mini" if GPU else "tiny")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    options = parser.parse_args()
    found: dict[str, Any] = {"device": device_name(), "ways": {}}
    with tempfile.TemporaryDirectory(prefix="exact-") as folder:
        bench = Bench(Path(folder), SIZES[options.size], [], turn_steps=1, turns=1)
        for way in options.ways.split(";"):
            try:
                found["ways"][way] = examine(bench, way)
            except Exception as error:  # noqa: BLE001  the other ways are examined all the same
                found["ways"][way] = {"equal": False, "error": f"{type(error).__name__}: {error}"[-1500:]}
            if not options.json:
                print(way, json.dumps(found["ways"][way]), flush=True)
    print(json.dumps(found))
    sys.exit(not all(row["equal"] for row in found["ways"].values()))


if __name__ == "__main__":
    main()
