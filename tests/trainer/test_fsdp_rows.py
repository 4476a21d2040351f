"""FSDP2 and HSDP themselves, on groups that are only said to be there, hold the rows that `state_layout`
says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.planning.state.state_layout import Layout, shard_rows


@pytest.fixture
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_group_left")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(num_shards=1, num_replicas=2),
        Layout(num_shards=3, num_replicas=1),
        Layout(num_shards=5, num_replicas=1),
        Layout(num_shards=2, num_replicas=3),
        Layout(num_shards=4, num_replicas=2),
    ],
    ids=lambda layout: f"{layout.num_shards} shards x {layout.num_replicas}",
)
def test_fully_shard_gives_each_rank_the_rows_of_its_shard(layout: Layout) -> None:
    for rank in range(layout.world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        mesh = init_device_mesh(
            "cpu", (layout.num_replicas, layout.num_shards), mesh_dim_names=("replicate", "shard")
        )
        for num_rows in (1, 2, 6, 7, 8, 13):
            module = nn.Linear(3, num_rows)
            whole = {name: p.detach().clone() for name, p in module.named_parameters()}
            fully_shard(module, mesh=mesh)
            rows = shard_rows(num_rows, layout.num_shards, layout.shard_of(rank))
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter.to_local(), whole[name][rows.start : rows.stop])
        dist.destroy_process_group()
