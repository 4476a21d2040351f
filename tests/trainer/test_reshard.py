"""A state moves from any layout to any other over a real gloo group, byte for byte, and nobody uses what is
not what was sent.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from orchestrator.planning.state.state_layout import Layout, StateTensor, held_rows, transfers
from orchestrator.trainer.comm import reshard
from orchestrator.trainer.comm.reshard import DigestError, Resharding, messages, tensor_as_bytes
from tests.trainer.gloo_ranks import GlooPeers, GlooRanks

# rows that divide evenly and do not, that are fewer than ranks, none, and wide; scalars and buffers
SHAPES = [
    ("a", (13, 3), torch.float32, True),
    ("b", (8,), torch.float32, True),
    ("c", (2, 5), torch.bfloat16, True),
    ("d", (1, 4), torch.float32, True),
    ("none", (0, 4), torch.float32, True),
    ("flat", (6, 0), torch.float32, True),
    ("buffer", (3, 2), torch.int64, False),
    ("steps", (), torch.int64, False),
    ("last", (5, 2, 2), torch.float32, True),
]
LAYOUTS = [
    Layout(num_shards=shards, num_replicas=world // shards)
    for world in (1, 2, 3, 4)
    for shards in range(1, world + 1)
    if world % shards == 0
]


@pytest.fixture(scope="module")
def ranks() -> dict[int, GlooRanks]:
    return {world: GlooRanks(world) for world in (1, 2, 3, 4)}


def whole_state() -> tuple[list[StateTensor], list[Tensor]]:
    """The tensors and their values, every byte different from its neighbours."""
    tensors, values, seed = [], [], torch.Generator().manual_seed(1)
    for name, shape, dtype, sharded in SHAPES:
        value = torch.empty(shape, dtype=dtype)
        raw = tensor_as_bytes(value)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=seed))
        values.append(value)
        tensors.append(
            StateTensor(group="model", name=name, shape=shape, itemsize=value.element_size(), sharded=sharded)
        )
    return tensors, values


TENSORS, VALUES = whole_state()


def shard_of_it(layout: Layout, shard: int) -> list[Tensor]:
    """The bytes of one shard, in memory of its own."""
    found = []
    for tensor, value in zip(TENSORS, VALUES, strict=True):
        rows = held_rows(tensor, layout.num_shards, shard)
        own = value[rows.start : rows.stop] if tensor.shape else value
        found.append(tensor_as_bytes(own.clone()))
    return found


def blank(layout: Layout, rank: int) -> list[Tensor]:
    """Memory for the shard of a rank, with other bytes in it than any that come."""
    return [raw.clone().bitwise_not_() for raw in shard_of_it(layout, layout.shard_of(rank))]


def moved(
    of_world: GlooRanks, old: Layout, holders: list[list[int]], new: Layout, **more: object
) -> list[tuple[list[Tensor], int]]:
    """What each rank holds afterwards, and how many bytes it received."""

    def work(rank: int, peers: GlooPeers) -> tuple[list[Tensor], int]:
        target = blank(new, rank)
        held = {s: shard_of_it(old, s) for s, of_one in enumerate(holders) if rank in of_one}
        moving = Resharding(tensors=TENSORS, holders=holders, layout=new, rank=rank, **more)  # type: ignore[arg-type]
        return target, moving.carry_out(peers, held.__getitem__, target)

    return of_world.run(work)


@pytest.mark.parametrize("new", LAYOUTS, ids=str)
def test_every_layout_becomes_this_one_whoever_holds_the_old_shards(ranks, new):
    chance = random.Random(str(new))
    for old, try_ in product(LAYOUTS, range(3)):
        # each shard with some of the new ranks: its live holders, copies of neighbours, or both
        world = new.world_size
        holders = [
            sorted(chance.sample(range(world), chance.randint(1, world))) for _ in range(old.num_shards)
        ]
        found = moved(ranks[world], old, holders, new)
        for rank, (target, received) in enumerate(found):
            expected = shard_of_it(new, new.shard_of(rank))
            assert all(torch.equal(a, b) for a, b in zip(target, expected, strict=True)), (old, try_, rank)
            plan = transfers(TENSORS, holders, new)
            assert received == sum(t.num_bytes for t in plan if t.receiver == rank != t.giver)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_messages_of_any_size_carry_the_same_bytes(ranks, size, monkeypatch):
    monkeypatch.setattr(reshard, "MESSAGE_BYTES", size)
    old, new = Layout(num_shards=3, num_replicas=1), Layout(num_shards=2, num_replicas=1)
    for rank, (target, _) in enumerate(moved(ranks[2], old, [[0], [1], [0]], new)):
        expected = shard_of_it(new, rank)
        assert all(torch.equal(a, b) for a, b in zip(target, expected, strict=True))


def test_messages_hold_every_byte_once_in_order_and_are_never_too_long(monkeypatch):
    monkeypatch.setattr(reshard, "MESSAGE_BYTES", 50)
    holders, new = [[1], [2], [1]], Layout(num_shards=3, num_replicas=1)
    for transfer in transfers(TENSORS, holders, new):
        whole = list(reshard.moves(TENSORS, 3, transfer, new))
        cut = list(messages(iter(whole)))
        assert transfer.num_bytes < 2 or len(cut) >= 2
        for message in cut:
            assert [at for at, _ in message] == [
                sum(m.num_bytes for _, m in message[:n]) for n in range(len(message))
            ]
            assert sum(move.num_bytes for _, move in message) <= 50
        pieces = [
            (m.tensor, m.source + n, m.target + n) for c in cut for _, m in c for n in range(m.num_bytes)
        ]
        assert pieces == [(m.tensor, m.source + n, m.target + n) for m in whole for n in range(m.num_bytes)]


def test_who_holds_the_state_in_place_writes_to_nothing_of_its_own(ranks):
    """Replicate: old and new tensors are the same memory, and a peer is blank."""
    one = Layout(num_shards=1, num_replicas=1)
    layout, sent = Layout(num_shards=1, num_replicas=3), set[tuple[int, bool]]()

    def work(rank: int, peers: GlooPeers) -> tuple[list[Tensor], list[int]]:
        mine = blank(layout, rank) if rank == 1 else shard_of_it(one, 0)
        before = [raw._version for raw in mine]
        moving = Resharding(
            tensors=TENSORS,
            holders=[[0, 2]],
            layout=layout,
            rank=rank,
            half=lambda gives: sent.add((rank, gives)),
        )
        moving.carry_out(peers, lambda shard: mine, mine)
        return mine, [raw._version - old for raw, old in zip(mine, before, strict=True)]

    found = ranks[3].run(work)
    for rank, (mine, written) in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(mine, shard_of_it(one, 0), strict=True))
        assert any(written) == (rank == 1)
    assert sent == {(0, True), (1, False)}, "one rank gives, once, and half of it comes at half"


@pytest.mark.parametrize("tensor", [0, 6, 8])
def test_one_bit_that_changes_after_it_came_is_seen(ranks, tensor):
    """It changes in the receiver's memory when half of the state has come."""
    layout = Layout(num_shards=1, num_replicas=2)

    def work(rank: int, peers: GlooPeers) -> str:
        mine = blank(layout, rank) if rank else shard_of_it(Layout(num_shards=1, num_replicas=1), 0)

        def half(gives: bool) -> None:
            if not gives:
                mine[tensor][:1] ^= 1

        moving = Resharding(tensors=TENSORS, holders=[[0]], layout=layout, rank=rank, half=half)
        try:
            moving.carry_out(peers, lambda shard: mine, mine)
        except DigestError as error:
            return str(error)
        return ""

    giver, receiver = ranks[2].run(work)
    assert giver == ""
    # what comes after the change is written over it
    assert ("that rank 1 received from rank 0 has another digest than its source" in receiver) == (tensor < 6)


def test_givers_take_turns_so_that_no_rank_serves_all(ranks):
    """Three of four hold the state; the blank one gets each of three shards from another of them."""
    old, new = Layout(num_shards=3, num_replicas=1), Layout(num_shards=1, num_replicas=4)
    holders = [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    plan = [t for t in transfers(TENSORS, holders, new) if t.giver != t.receiver]
    assert {t.giver for t in plan} == {0, 1, 2}
    found = moved(ranks[4], old, holders, new)
    assert [received > 0 for _, received in found] == [False, False, False, True]
