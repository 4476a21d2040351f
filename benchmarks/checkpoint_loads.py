"""Loading a checkpoint into a state that is there, as `benchmarks.checkpoint` compares it: `dcp.load`, which
verifies nothing, and this package's, which compares every byte with its digest. All files are in the page
cache.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint_ranks import said_round, state_dict
from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.points.store import CommittedFiles
from orchestrator.storage.files import Storage
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import load


def loads(state: TrainState, dcp_folder: Path, ours: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of the slower rank, in turn; the first round of each does not count. And how much memory each
    takes at most, over the size of the state.
    """
    storage = Storage(str(ours))
    point = PointFiles(storage).point_names()[-1]
    newest = max(dcp_folder.iterdir(), key=lambda folder: int(folder.name))
    acts: dict[str, Callable[[], None]] = {
        "dcp_load": lambda: dcp.load(state_dict(state), checkpoint_id=str(newest)),
        "ours_load": lambda: load(state.items(), point, CommittedFiles(storage)),
    }
    num_bytes = sum(item.tensor.nbytes for item in state.items())
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in acts if number % 2 else [*acts][::-1]:
            _settle()
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # what is the peak from here on
            dist.barrier()
            began = time.monotonic()
            acts[name]()
            took_s = time.monotonic() - began
            beyond = max(0, _memory("VmHWM") - before)
            worst = torch.tensor([took_s, 1 + beyond / num_bytes], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            said_round(number, name, {"load_s": float(worst[0]), "peak_over_state": float(worst[1])})
            if number:
                found.setdefault(f"{name}_s", []).append(float(worst[0]))
                found.setdefault(f"{name}_peak_over_state", []).append(float(worst[1]))
    found["load_peak_over_state"] = found.pop("ours_load_peak_over_state")
    state.filled()
    return found


def _settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _memory(field: str) -> int:
    """Bytes of resident memory, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field} in /proc/{os.getpid()}/status")
