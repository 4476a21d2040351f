"""Which rows a rank holds and writes, against definitions that share nothing with the arithmetic."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.state import state_layout
from orchestrator.planning.state.state_layout import (
    Layout,
    StateTensor,
    flat_shard,
    layout_of,
    writing_replicas,
)
from tests.planning.states import LAYOUTS, cut, tensors


def check_rows(shard_rows=state_layout.shard_rows):
    for num_rows, num_shards in product(range(40), range(1, 12)):
        found = [list(shard_rows(num_rows, num_shards, shard)) for shard in range(num_shards)]
        assert found == cut(num_rows, num_shards), f"{num_rows} rows on {num_shards} shards"


def test_rows_are_divided_as_torch_chunk_divides_them():
    check_rows()


def floored(num_rows, num_shards, shard):
    """Planted: the last shard takes what is left."""
    chunk = num_rows // num_shards
    return range(shard * chunk, num_rows if shard == num_shards - 1 else (shard + 1) * chunk)


def even(num_rows, num_shards, shard):
    """Planted: as even as can be, which is not how FSDP2 divides."""
    return range(shard * num_rows // num_shards, (shard + 1) * num_rows // num_shards)


def unbounded(num_rows, num_shards, shard):
    """Planted: the last shards reach past the end."""
    chunk = -(-num_rows // num_shards)
    return range(shard * chunk, (shard + 1) * chunk)


@pytest.mark.parametrize("wrong", [floored, even, unbounded])
def test_other_ways_to_divide_are_caught(wrong):
    with pytest.raises(AssertionError):
        check_rows(wrong)


@given(LAYOUTS)
def test_ranks_are_numbered_as_a_device_mesh_of_replicas_and_shards_numbers_them(layout):
    mesh = np.arange(layout.world_size).reshape(layout.num_replicas, layout.num_shards)
    for replica, shard in product(range(layout.num_replicas), range(layout.num_shards)):
        rank = int(mesh[replica, shard])
        assert (layout.replica_of(rank), layout.shard_of(rank)) == (replica, shard)


@pytest.mark.parametrize(
    ("world", "asked", "shards", "replicas"),
    [(8, 1, 1, 8), (8, None, 8, 1), (8, 4, 4, 2), (6, 4, 6, 1), (3, 4, 3, 1), (1, 1, 1, 1), (1, 4, 1, 1)],
)
def test_the_layout_of_a_world_leaves_nobody_idle(world, asked, shards, replicas):
    assert layout_of(world, asked) == Layout(num_shards=shards, num_replicas=replicas)


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 12)))
def test_nobody_holds_more_than_was_asked_for_unless_the_world_is_smaller(world, asked):
    layout = layout_of(world, asked)
    assert layout.world_size == world
    assert layout.num_shards >= min(world, asked or world)


def test_a_scalar_cannot_be_sharded():
    with pytest.raises(AssertionError, match="model/scale"):
        StateTensor(group="model", name="scale", shape=(), itemsize=4, sharded=True)


# ---- flat buffers
@given(tensors(), st.integers(1, 6), st.data())
def test_places_of_a_flat_shard_are_aligned_apart_and_hold_every_row(state, num_shards, data):
    shard = data.draw(st.integers(0, num_shards - 1))
    flat = flat_shard(state, num_shards, shard)
    assert [place.tensor for place in flat.places] == state
    used = np.zeros(flat.num_bytes, bool)
    for place in flat.places:
        assert place.offset % 64 == 0
        here = slice(place.offset, place.offset + place.num_bytes)
        assert not used[here].any(), "two tensors share a byte"
        used[here] = True
        whole = np.zeros((*place.tensor.shape, place.tensor.itemsize), np.uint8)
        rows = cut(len(whole), num_shards)[shard] if place.tensor.sharded else slice(None)
        assert whole[rows].nbytes == place.num_bytes
    assert flat.num_bytes - used.sum() <= 63 * len(state), "more than alignment is left empty"


# ---- who writes what
def check_written_once(state, layout, written_rows=state_layout.written_rows):
    counts = [np.zeros(tensor.num_rows, int) for tensor in state]
    for rank in range(layout.world_size):
        for count, tensor, rows in zip(counts, state, written_rows(state, layout, rank), strict=True):
            held = cut(tensor.num_rows, layout.num_shards)[rank % layout.num_shards]
            assert not tensor.sharded or set(rows) <= set(held), "writes what it does not hold"
            count[list(rows)] += 1
    assert all((count == 1).all() for count in counts), f"written {counts} times"


@given(tensors(), LAYOUTS)
def test_every_row_is_written_by_exactly_one_rank_that_holds_it(state, layout):
    check_written_once(state, layout)


def all_replicas(state, layout, rank):
    """Planted: each replica writes its copy."""
    return tuple(state_layout.held_rows(t, layout.num_shards, layout.shard_of(rank)) for t in state)


def all_shards(state, layout, rank):
    """Planted: tensors that are not sharded are written by every shard."""
    writers = writing_replicas(state, layout)
    held = all_replicas(state, layout, rank)
    return tuple(
        rows if writer == layout.replica_of(rank) else range(0)
        for rows, writer in zip(held, writers, strict=True)
    )


SMALL = [
    StateTensor(group="model", name="weight", shape=(5, 3), itemsize=4, sharded=True),
    StateTensor(group="optimizer", name="steps", shape=(), itemsize=8, sharded=False),
]


@pytest.mark.parametrize("wrong", [all_replicas, all_shards])
def test_rows_written_twice_are_caught(wrong):
    with pytest.raises(AssertionError, match="written"):
        check_written_once(SMALL, Layout(num_shards=2, num_replicas=2), wrong)


@given(tensors(), st.integers(1, 3), st.integers(1, 3))
def test_no_rank_writes_more_than_four_thirds_of_the_best_division(state, num_shards, num_replicas):
    layout = Layout(num_shards=num_shards, num_replicas=num_replicas)

    def most_bytes(writers):
        loads = np.zeros((num_replicas, num_shards), int)
        for tensor, writer in zip(state, writers, strict=True):
            for shard, rows in enumerate(cut(tensor.num_rows, num_shards)):
                if tensor.sharded:
                    loads[writer, shard] += len(rows) * tensor.row_bytes
            loads[writer, 0] += 0 if tensor.sharded else tensor.num_rows * tensor.row_bytes
        return int(loads.max())

    best = min(most_bytes(writers) for writers in product(range(num_replicas), repeat=len(state)))
    assert 3 * most_bytes(writing_replicas(state, layout)) <= 4 * best
