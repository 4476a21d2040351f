"""One rank of `benchmarks.checkpoint`: trains GPT-2, and saves in turn in each of several ways.

`python -m benchmarks.checkpoint_ranks RANK PORT FOLDER SPEC`; rank 0 says what it does as it goes, and writes
what it found as JSON into the folder. The step is the same for all ways: forward and backward of one
micro-batch on one thread, gradients summed over the ranks, AdamW. What a way does at the begin of a save, and
what it waits for before the optimizer writes, differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.config.sections import ModelConfig, TrainConfig
from orchestrator.records.membership import GenerationView
from orchestrator.trainer.comm.group import Group
from orchestrator.trainer.state.sharded_state import ShardedState
from orchestrator.trainer.state.train_state import TrainState

SHAPES: dict[str, dict[str, int]] = {
    "124m": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "small": {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 8192},
}
FOUND = "found.json"  # in the folder: all measured values


class Way(Protocol):
    """A way to save. Each of these may make training wait."""

    name: str

    def begin(self, number: int) -> None:
        """Begin the `number`-th save of the state as it is now."""

    def before_write(self) -> None:
        """The optimizer is about to write."""

    def applied(self) -> None:
        """The optimizer has written."""

    def durable(self) -> float:
        """Returns when the save is durable on all ranks: the moment (`time.monotonic`)."""

    def tidy(self) -> None:
        """Take away all saves but the newest."""

    def close(self) -> None:
        """No save follows."""


def main(rank: int, port: int, folder: Path, spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec["world_size"])
    state = formed(new_state(spec), rank, spec["world_size"])
    from benchmarks.checkpoint_ways import ways

    all_ways = ways(state, folder, port, spec["ways"])
    found = rounds(state, all_ways, spec)
    found |= _sizes(state, folder, all_ways)
    if {"dcp", "ours"} <= set(spec["ways"]):
        from benchmarks.checkpoint_loads import loads

        found |= loads(state, folder / "dcp", folder / "ours", spec["rounds"])
    dist.barrier()
    if rank == 0:
        (folder / FOUND).write_text(json.dumps(found))
    os._exit(0)  # libraries' threads would be waited for


def new_state(spec: dict[str, Any]) -> TrainState:
    """GPT-2 and AdamW, as the product holds them."""
    shape = SHAPES[spec["size"]]
    model = ModelConfig(
        config={
            "model_type": "gpt2",
            "use_cache": False,
            "n_positions": 1024,
            "bos_token_id": None,
            "eos_token_id": None,
            **shape,
        }
    )
    train = TrainConfig(global_batch_size=2, micro_batch_size=1, lr=1e-4)
    device = torch.device("cpu")
    if spec.get("sharded"):
        return ShardedState(model, train, device, num_shards=None)
    return TrainState(model, train, device, invariant=False)


def formed(state: TrainState, rank: int, world_size: int) -> TrainState:
    """With first weights, in a group of so many ranks."""
    state.form(Group(view_of(rank, world_size), limit_s=600.0))
    state.initialise()
    state.formed()
    return state


def view_of(rank: int, world_size: int) -> GenerationView:
    """The only generation."""
    return GenerationView(
        attempt=1,
        generation=1,
        rank=rank,
        world_size=world_size,
        members=tuple(map(str, range(world_size))),
        host="127.0.0.1",
        port=0,
        parent=None,
        source_rank=None,
        point=None,
        cursor=None,
        step=0,
        launch="benchmark",
    )


def state_dict(state: TrainState) -> dict[str, Tensor]:
    """All its tensors by name."""
    return {f"{item.group}/{item.name}": item.tensor for item in state.items()}


def rounds(state: TrainState, ways: list[Way], spec: dict[str, Any]) -> dict[str, list[float]]:
    """By `<way>_<figure>` the values of each round but the first, which warms up. Right before the steps that
    begin with a save as many steps are made without one: `<way>_none_steps_s`.
    """
    found: dict[str, list[float]] = {}
    said(f"{spec['rounds']} rounds of {', '.join(way.name for way in ways)}, and one that does not count")
    for number in range(spec["rounds"] + 1):
        for way in ways if number % 2 else ways[::-1]:
            figures = {"none_steps_s": _steps(state, spec, lambda: None, lambda: None)} if number else {}
            dist.barrier()
            began = time.monotonic()
            way.begin(number)
            blocked = [time.monotonic() - began]
            waits = partial(_before_write, way, blocked)
            figures["steps_s"] = blocked[0] + _steps(state, spec, waits, way.applied)
            figures |= {"blocked_s": sum(blocked), "durable_s": way.durable() - began}
            worst = torch.tensor(list(figures.values()), dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            way.tidy()
            figures = dict(zip(figures, worst.tolist(), strict=True))
            said_round(number, way.name, figures)
            for figure, value in figures.items() if number else ():
                found.setdefault(f"{way.name}_{figure}", []).append(value)
    for way in ways:
        way.close()
    return found


def _steps(
    state: TrainState, spec: dict[str, Any], before_write: Callable[[], None], applied: Callable[[], None]
) -> float:
    """The steps of a round; their seconds."""
    began = time.monotonic()
    for _ in range(spec["steps"]):
        gradients(state, spec)
        before_write()
        state.apply(1e-4, num_units=1)
        applied()
    return time.monotonic() - began


def _before_write(way: Way, blocked: list[float]) -> None:
    began = time.monotonic()
    way.before_write()
    blocked.append(time.monotonic() - began)


def _sizes(state: TrainState, folder: Path, ways: list[Way]) -> dict[str, list[float]]:
    """Bytes of what `torch.save` writes of the same state, and of our point."""
    ours = next((way for way in ways if way.name == "ours"), None)
    if ours is None or dist.get_rank() != 0:
        return {}
    path = folder / "torch_save.pt"
    torch.save(state_dict(state), path)
    size = path.stat().st_size
    path.unlink()
    return {"torch_save_bytes": [float(size)], "ours_bytes": [float(ours.num_bytes())]}  # type: ignore[attr-defined]


def said(text: str) -> None:
    """For who waits: rank 0 says it."""
    if dist.get_rank() == 0:
        print(f"  {text}", flush=True)


def said_round(number: int, name: str, figures: dict[str, float]) -> None:
    """What a round took."""
    values = ", ".join(f"{figure} {value:.4f}" for figure, value in figures.items())
    said(f"round {number}, {name}: {values}")


def gradients(state: TrainState, spec: dict[str, Any]) -> None:
    """Those of one micro-batch of random tokens, summed over the ranks."""
    trained = [tensor for tensor in state.model.parameters() if tensor.requires_grad]
    tokens = torch.randint(0, SHAPES[spec["size"]]["vocab_size"], (1, spec["seq_len"]))
    if isinstance(state, ShardedState):  # FSDP2 sums them itself
        state.forget_gradients()
        state.model(input_ids=tokens, labels=tokens).loss.backward()
        state.take_gradients()
        return
    for tensor in trained:
        tensor.grad = None
    state.model(input_ids=tokens, labels=tokens).loss.backward()
    for tensor in trained:
        assert tensor.grad is not None
        dist.all_reduce(tensor.grad)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
