"""Plain Ray Train at the same task: TorchTrainer, DDP over gloo, a checkpoint every n steps, FailureConfig.

It is Ray's documented way to survive failures, and knows nothing of this package but the benchmark's model.
Its tokens are random numbers that need no reading and no tokenizing, which favours it.
`python -m benchmarks.plain_ray <folder of step logs> <storage folder> <max_failures>` trains until killed.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SAVE_EVERY,
    SEQ_LEN,
    VOCAB_SIZE,
    Command,
    Samples,
    Step,
    StepLog,
    kill_descendants,
    make_model,
    say,
)

_LAST_STEP = 1_000_000


def measure(folder: Path, repeats: int) -> Samples:
    """Start, and SIGKILL of one worker of two, as `recovery` does them with this package."""
    samples: Samples = {
        "plain_sigkill_s": [],
        "plain_steps_lost": [],
        "plain_start_s": [],
        "plain_start_cpu_s": [],
    }
    log = StepLog(folder / "plain-steps")
    failures = str(max(3, repeats))
    arguments = ["-m", "benchmarks.plain_ray", str(log.folder), str(folder / "plain-storage"), failures]
    command = Command(arguments, folder / "plain.log")
    first, cpu_s = command.first_step(log)
    samples["plain_start_s"].append(first.time - command.began)
    samples["plain_start_cpu_s"].append(cpu_s)
    for number in range(repeats):
        command.fault_time(log)
        old = {step.pid for step in log.read()}
        struck = time.monotonic()
        os.kill(log.training()[number % 2], signal.SIGKILL)

        def new_step(old: set[int] = old) -> Step | None:
            return next((step for step in log.read() if step.pid not in old), None)

        new = command.wait_for(new_step, "the first step after the kill")
        made = max(step.label for step in log.read() if step.pid in old)
        one_step = command.wait_for(functools.partial(log.step_s, new), "steps after the kill")
        samples["plain_sigkill_s"].append(new.time - struck - one_step)
        samples["plain_steps_lost"].append(made - (new.label - 1))
        say(f"plain {number + 1}", samples)
    kill_descendants()
    return samples


def main() -> None:
    logs, storage, max_failures = sys.argv[1:]
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, 3),
        include_dashboard=False,
        object_store_memory=256 << 20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    TorchTrainer(
        train,
        train_loop_config={"logs": logs},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="plain", storage_path=storage, failure_config=FailureConfig(max_failures=int(max_failures))
        ),
    ).fit()


def train(config: dict[str, Any]) -> None:
    """The function of each worker."""
    import torch
    from ray import train as ray_train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = prepare_model(make_model(config["logs"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    first = _load(model, optimizer)
    for step in range(first, _LAST_STEP):
        tokens = torch.Generator().manual_seed(step * world + rank)
        for _ in range(GLOBAL_BATCH // MICRO_BATCH // world):
            ids = torch.randint(VOCAB_SIZE, (MICRO_BATCH, SEQ_LEN), generator=tokens)
            (model(input_ids=ids, labels=ids).loss / (GLOBAL_BATCH // MICRO_BATCH // world)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            _report(model, optimizer, step + 1, rank)


def _load(model: Any, optimizer: Any) -> int:
    """How many steps the newest checkpoint holds."""
    import torch
    from ray import train as ray_train

    checkpoint = ray_train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "state.pt"))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _report(model: Any, optimizer: Any, step: int, rank: int) -> None:
    import torch
    from ray import train as ray_train

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, os.path.join(folder, "state.pt"))
            checkpoint = ray_train.Checkpoint.from_directory(folder)
        ray_train.report({"step": step}, checkpoint=checkpoint)


if __name__ == "__main__":
    main()
