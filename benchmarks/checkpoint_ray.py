"""Ray Train's asynchronous checkpoint, as `benchmarks.checkpoint` compares it: the same model, optimizer and
steps in a `TorchTrainer` of two workers, whose rank 0 writes its state to a temporary folder (`torch.save`,
as in Ray's documents) and reports it with `CheckpointUploadMode.ASYNC`, which copies it to the storage in a
thread. Rounds with and without alternate.

`python -m benchmarks.checkpoint_ray FOLDER SPEC`; what was found is written as JSON into the folder.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_ranks import FOUND, gradients, new_state, said, said_round, state_dict
from orchestrator.trainer.state import TrainState

RAY, NONE = "ray_async", "ray_none"
_LOOK_S = 0.01


def main(folder: str, spec: dict[str, Any]) -> None:
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, spec["world_size"] + 1),
        include_dashboard=False,
        object_store_memory=256 << 20,
        logging_level=logging.ERROR,
        log_to_driver=True,  # what rank 0 says
    )
    TorchTrainer(
        train,
        train_loop_config={**spec, "folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=spec["world_size"]),
        run_config=RunConfig(
            name="plain", storage_path=f"{folder}/ray", checkpoint_config=CheckpointConfig(num_to_keep=1)
        ),
    ).fit()
    ray.shutdown()


def train(spec: dict[str, Any]) -> None:
    """A worker's loop: as `checkpoint_ranks` does it, one round after the other."""
    torch.set_num_threads(1)
    state = new_state(spec)
    trained = [tensor for tensor in state.model.parameters() if tensor.requires_grad]
    found: dict[str, list[float]] = {}
    said(f"{spec['rounds']} rounds of {NONE}, {RAY}, and one before that does not count")
    for number in range(spec["rounds"] + 1):
        for name in (NONE, RAY) if number % 2 else (RAY, NONE):
            own = Path(tempfile.mkdtemp(dir=spec["folder"]))
            dist.barrier()
            began = time.monotonic()
            if name == RAY:
                _report(state, number, own)
            blocked_s = time.monotonic() - began
            for _ in range(spec["steps"]):
                gradients(state, trained, spec)
                state.apply(1e-4)
            figures = {"blocked_s": blocked_s, "steps_s": time.monotonic() - began}
            _wait_uploaded(name, own)
            figures["durable_s"] = time.monotonic() - began  # uploaded; nothing is synced
            worst = torch.tensor(list(figures.values()), dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            values = dict(zip(figures, worst.tolist(), strict=True))
            said_round(number, name, values)
            for figure, value in values.items() if number else ():
                found.setdefault(f"{name}_{figure}", []).append(value)
    if dist.get_rank() == 0:
        Path(spec["folder"], FOUND).write_text(json.dumps(found))


def _report(state: TrainState, number: int, own: Path) -> None:
    """Rank 0 gives its state, as Ray's documents say; the others take part."""
    from ray import train as ray_train

    checkpoint = None
    if dist.get_rank() == 0:
        torch.save(state_dict(state), own / "state.pt")
        checkpoint = ray_train.Checkpoint.from_directory(str(own))
    ray_train.report(
        {"round": number},
        checkpoint=checkpoint,
        checkpoint_upload_mode=ray_train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def _wait_uploaded(name: str, own: Path) -> None:
    """Until Ray has taken away the folder that was reported."""
    while name == RAY and dist.get_rank() == 0 and own.exists():
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
