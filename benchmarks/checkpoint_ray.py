"""Ray Train's asynchronous checkpoint, as `benchmarks.checkpoint` compares it: the same model, optimizer and
steps in a `TorchTrainer` of two workers, whose rank 0 writes its state to a temporary folder (`torch.save`,
as in Ray's documents) and reports it with `CheckpointUploadMode.ASYNC`, which copies it to the storage in a
thread.

`python -m benchmarks.checkpoint_ray FOLDER SPEC`; the last line is what was found, as JSON.
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

from benchmarks.checkpoint_ranks import gradients, new_state, state_dict

FOUND = "ray_async_blocked_s"


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
        log_to_driver=False,
    )
    TorchTrainer(
        train,
        train_loop_config={**spec, "found": f"{folder}/found.json"},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=spec["world_size"]),
        run_config=RunConfig(
            name="plain", storage_path=f"{folder}/ray", checkpoint_config=CheckpointConfig(num_to_keep=1)
        ),
    ).fit()
    print(Path(folder, "found.json").read_text())
    ray.shutdown()


def train(spec: dict[str, Any]) -> None:
    """A worker's loop: as `checkpoint_ranks` does it, one round after the other."""
    import torch
    import torch.distributed as dist
    from ray import train as ray_train

    torch.set_num_threads(1)
    state = new_state(spec)
    trained = [tensor for tensor in state.model.parameters() if tensor.requires_grad]
    blocked: list[float] = []
    for number in range(spec["rounds"] + 1):
        dist.barrier()
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if dist.get_rank() == 0:
                torch.save(state_dict(state), f"{folder}/state.pt")
                checkpoint = ray_train.Checkpoint.from_directory(folder)
            ray_train.report(
                {"round": number},
                checkpoint=checkpoint,
                checkpoint_upload_mode=ray_train.CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=True,
            )
            slowest = torch.tensor([time.monotonic() - began], dtype=torch.float64)
            for _ in range(spec["steps"]):
                gradients(state, trained, spec)
                state.apply(1e-4)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if number:
            blocked.append(float(slowest))
    if dist.get_rank() == 0:
        Path(spec["found"]).write_text(json.dumps({FOUND: blocked}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
