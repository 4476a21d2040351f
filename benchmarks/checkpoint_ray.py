"""Ray Train's asynchronous checkpoint, as `benchmarks.checkpoint` compares it: the same model, optimizer and
steps in a `TorchTrainer` of two workers, whose rank 0 writes its state to a temporary folder (`torch.save`,
as in Ray's documents) and reports it with `CheckpointUploadMode.ASYNC`, which copies it to the storage in a
thread.

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

from benchmarks.checkpoint_ranks import FOUND, new_state, rounds, state_dict
from orchestrator.trainer.state.train_state import TrainState

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
    """A worker's loop, as that of `checkpoint_ranks`."""
    torch.set_num_threads(1)
    state = new_state(spec)
    found = rounds(state, [RayAsync(state, Path(spec["folder"]))], spec)
    if dist.get_rank() == 0:
        Path(spec["folder"], FOUND).write_text(json.dumps(found))


class RayAsync:
    """Rank 0 gives its state, the others take part."""

    name = "ray_async"

    def __init__(self, state: TrainState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._own = folder

    def begin(self, number: int) -> None:
        """See `Way`."""
        from ray import train as ray_train

        checkpoint = None
        if dist.get_rank() == 0:
            self._own = Path(tempfile.mkdtemp(dir=self._folder))  # on the disk of the storage
            torch.save(state_dict(self._state), self._own / "state.pt")
            checkpoint = ray_train.Checkpoint.from_directory(str(self._own))
        ray_train.report(
            {"round": number},
            checkpoint=checkpoint,
            checkpoint_upload_mode=ray_train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    def before_write(self) -> None:
        """See `Way`."""

    def applied(self) -> None:
        """See `Way`."""

    def durable(self) -> float:
        """When it is uploaded, and Ray has taken away the folder that was reported; nothing is synced."""
        while dist.get_rank() == 0 and self._own.exists():
            time.sleep(_LOOK_S)
        return time.monotonic()

    def tidy(self) -> None:
        """Ray does."""

    def close(self) -> None:
        """See `Way`."""


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
