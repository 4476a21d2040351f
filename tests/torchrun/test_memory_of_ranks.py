"""Whether the ranks that torchrun starts on a machine have memory for the job."""

from __future__ import annotations

import json

import pytest

from orchestrator.config.schema import JobConfig
from orchestrator.errors import ResourceError
from orchestrator.launch.capacity.placement_check import machines_here
from orchestrator.launch.capacity.resource_estimate import needs_of
from orchestrator.torchrun.member import require_memory
from tests.planning.jobs import job
from tests.raising import raises

RANKS = 4
SMALLEST = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "vocab_size": 8,
    "num_attention_heads": 8,
}


def sharded(num_layers: int) -> JobConfig:
    model = "model=" + json.dumps({"config": {**SMALLEST, "num_hidden_layers": num_layers}})
    batch = ["pack.seq_len=1", "train.micro_batch_size=1"]
    return job(model, *batch, "train.parallel=shard", f"cluster.num_workers={RANKS}")


def worker_bytes(num_layers: int) -> int:
    """Of a worker that makes memory points."""
    return needs_of(sharded(num_layers), None, RANKS, one_machine=True).worker_bytes


def test_memory_points_that_torchrun_does_not_make_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS))
    (here,) = machines_here(use_gpu=False)
    a_layer = worker_bytes(2) - worker_bytes(1)
    one_too_many = (here.memory_bytes // RANKS - worker_bytes(0)) // a_layer + 1
    assert RANKS * worker_bytes(one_too_many) > here.memory_bytes
    assert require_memory(sharded(one_too_many)).num_shards is None
    with raises(ResourceError, "cluster.too_small", "4 workers") as refused:
        require_memory(sharded(10 * one_too_many))
    assert "memory_every_steps" not in str(refused.value)
