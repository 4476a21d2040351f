"""Moves between any two layouts, carried out on real bytes and compared with slices of the whole tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.state import state_layout
from orchestrator.planning.state.state_layout import Layout, StateTensor, held_rows
from tests.planning.states import LAYOUTS, cut, tensors


def whole_tensors(state):
    """Random bytes for each tensor, shape (num_rows, row_bytes)."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (t.num_rows, t.row_bytes), np.uint8) for t in state]


def held(state, whole, num_shards, shard):
    """What a holder of the shard has, tensor by tensor, as bytes."""
    return [
        data[cut(t.num_rows, num_shards)[shard]].reshape(-1) if t.sharded else data.reshape(-1)
        for t, data in zip(state, whole, strict=True)
    ]


def check_moves(state, holders, layout, transfers=state_layout.transfers, moves=state_layout.moves):
    """Every rank of the new layout has its rows, each byte once, from who has them."""
    whole, num_shards = whole_tensors(state), len(holders)
    old = [held(state, whole, num_shards, shard) for shard in range(num_shards)]
    plan = transfers(state, holders, layout)
    for receiver in range(layout.world_size):
        expected = held(state, whole, layout.num_shards, receiver % layout.num_shards)
        got = [np.zeros_like(data) for data in expected]
        filled = [np.zeros(len(data), int) for data in expected]
        for transfer in plan:
            if transfer.receiver != receiver:
                continue
            assert transfer.giver in holders[transfer.shard], "it gives what it does not hold"
            given_bytes = 0
            for move in moves(state, num_shards, transfer, layout):
                target = slice(move.target, move.target + move.num_bytes)
                source = old[transfer.shard][move.tensor][move.source : move.source + move.num_bytes]
                assert len(source) == move.num_bytes, "the giver's rows end before"
                got[move.tensor][target] = source
                filled[move.tensor][target] += 1
                given_bytes += move.num_bytes
            assert given_bytes == transfer.num_bytes, "the plan counts other bytes"
        assert all((count == 1).all() for count in filled), "a byte comes twice or never"
        for mine, right in zip(got, expected, strict=True):
            assert (mine == right).all(), "other bytes came"


@st.composite
def changes(draw):
    """A state, who holds its old shards (survivors, replicas, neighbours), and its new layout."""
    layout = draw(LAYOUTS)
    someone = st.lists(st.integers(0, layout.world_size - 1), min_size=1, max_size=4, unique=True)
    return draw(tensors()), draw(st.lists(someone, min_size=1, max_size=7)), layout


@given(changes())
def test_every_rank_gets_every_byte_of_its_shard_once_whatever_the_two_layouts(change):
    check_moves(*change)


@given(changes())
def test_what_a_rank_holds_it_never_gets_from_another(change):
    state, holders, layout = change
    for transfer in state_layout.transfers(state, holders, layout):
        if transfer.receiver in holders[transfer.shard]:
            assert transfer.giver == transfer.receiver
        if transfer.whole_tensors and any(transfer.receiver in ranks for ranks in holders):
            assert transfer.giver == transfer.receiver


@given(tensors(), st.integers(1, 9), st.data())
def test_whole_copies_to_blank_members_are_spread_evenly_over_the_holders(state, world, data):
    holding = data.draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    plan = state_layout.transfers(state, [holding], Layout(num_shards=1, num_replicas=world))
    copies = Counter(t.giver for t in plan if t.giver != t.receiver and t.num_bytes)
    if any(t.num_rows * t.row_bytes for t in state):
        assert sum(copies.values()) == world - len(holding)
        counts = [copies[rank] for rank in holding]
        assert max(counts) - min(counts) <= 1
    else:
        assert not copies


def test_a_shard_that_nobody_holds_is_an_error():
    with pytest.raises(AssertionError, match=r"shard \[1\] of 2"):
        state_layout.transfers([], [[0], []], Layout(num_shards=1, num_replicas=1))


def test_hsdp_that_loses_a_rank_goes_on_as_fsdp2_from_the_other_replica():
    """Ranks 0 and 1 were replica 0; rank 2 has shard 0 of replica 1, whose other rank is lost."""
    state = [StateTensor(group="model", name="w", shape=(6, 2), itemsize=4, sharded=True)]
    plan = state_layout.transfers(state, [[0, 2], [1]], Layout(num_shards=3, num_replicas=1))
    assert [(t.giver, t.receiver, t.shard, t.num_bytes) for t in plan] == [
        (0, 0, 0, 16),  # rows 0, 1 lie there
        (0, 1, 0, 8),  # row 2: ranks 0 and 2 have given nothing yet
        (1, 1, 1, 8),
        (1, 2, 1, 16),
    ]
    check_moves(state, [[0, 2], [1]], Layout(num_shards=3, num_replicas=1))


# ---- planted mistakes
def whole_forgotten(*arguments):
    """Planted: tensors that are not sharded stay behind."""
    return tuple(replace(t, whole_tensors=False) for t in state_layout.transfers(*arguments))


def whole_with_each(*arguments):
    """Planted: they come with every transfer."""
    return tuple(replace(t, whole_tensors=True) for t in state_layout.transfers(*arguments))


def from_rank_0(*arguments):
    """Planted: rank 0 gives everything."""
    return tuple(replace(t, giver=0) for t in state_layout.transfers(*arguments))


def from_the_whole(state, num_shards, transfer, layout):
    """Planted: places are counted in the whole tensor."""
    for move in state_layout.moves(state, num_shards, transfer, layout):
        tensor = state[move.tensor]
        before = held_rows(tensor, num_shards, transfer.shard).start * tensor.row_bytes
        yield replace(move, source=before + move.source)


def one_row_short(state, num_shards, transfer, layout):
    """Planted: the last row of a run is forgotten."""
    for move in state_layout.moves(state, num_shards, transfer, layout):
        yield replace(move, num_bytes=move.num_bytes - state[move.tensor].row_bytes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"transfers": whole_forgotten},
        {"transfers": whole_with_each},
        {"transfers": from_rank_0},
        {"moves": from_the_whole},
        {"moves": one_row_short},
    ],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_wrong_moves_are_caught(wrong):
    state = [
        StateTensor(group="model", name="w", shape=(7, 2), itemsize=4, sharded=True),
        StateTensor(group="optimizer", name="steps", shape=(), itemsize=8, sharded=False),
    ]
    with pytest.raises(AssertionError, match="comes twice|other bytes|does not hold|rows end"):
        check_moves(state, [[0], [1]], Layout(num_shards=3, num_replicas=1), **wrong)
