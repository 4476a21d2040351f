"""Bytes of a worker, against sums over all the rows that it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.state.memory import ModelSize, worker_memory
from orchestrator.planning.state.state_layout import Layout, StateTensor, held_rows, layout_of, written_rows

ONE = Layout(num_shards=1, num_replicas=1)


def test_replicate_holds_weights_gradients_and_two_moments_of_everything():
    found = worker_memory(
        ModelSize(parameters=1000, block=100, rest=200), Layout(num_shards=1, num_replicas=4), 4, 4
    )
    assert (found.weights, found.gradients, found.moments, found.gathered) == (4000, 4000, 8000, 0)
    assert found.training == found.peak == 16_000
    assert found.staged == 3000, "each of four replicas writes a quarter"


def test_a_shard_holds_its_part_and_whole_blocks_for_a_moment():
    size = ModelSize(parameters=1000, block=100, rest=200)
    found = worker_memory(size, Layout(num_shards=4, num_replicas=2), 4, 2)
    assert (found.weights, found.gradients, found.moments) == (1000, 1000, 2000)
    assert found.gathered == 2 * 300 * 2
    assert found.staged == 1500


def test_what_was_held_before_counts_while_a_group_re_forms():
    size = ModelSize(parameters=1000, block=1, rest=1)
    from_four = worker_memory(size, layout_of(3, None), 4, 4, before=layout_of(4, None))
    assert from_four.reforming == 3 * 250 * 4
    assert from_four.peak == from_four.weights + from_four.moments + from_four.reforming
    assert worker_memory(size, ONE, 4, 4, before=ONE).reforming == 0, "replicate leaves it in place"


@pytest.mark.parametrize("weight_bytes", [2, 4])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 8))
def test_a_worker_holds_at_least_its_share_of_the_rows_and_writes_no_more_than_it_stages(
    weight_bytes, rows, world_size, num_shards
):
    layout = layout_of(world_size, num_shards)
    tensors = [
        StateTensor(group="model", name=str(n), shape=(num,), itemsize=weight_bytes, sharded=True)
        for n, num in enumerate(rows)
    ]
    found = worker_memory(ModelSize(parameters=sum(rows)), layout, weight_bytes, weight_bytes)
    held = [
        sum(len(held_rows(t, layout.num_shards, layout.shard_of(rank))) for t in tensors) * weight_bytes
        for rank in range(world_size)
    ]
    assert found.weights <= max(held), "a lower bound: uneven rows make shard 0 larger"
    assert found.weights * layout.num_shards >= sum(rows) * weight_bytes
    written = sum(
        len(range_) * weight_bytes
        for rank in range(world_size)
        for range_ in written_rows(tensors, layout, rank)
    )
    assert found.staged * world_size >= 3 * written
