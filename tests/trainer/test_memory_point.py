"""Ranks of one process make real memory points: copies in memory, over sockets, compared, kept and given."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from xxhash import xxh3_128

from orchestrator.elastic.next_formation import ShardHolding, newest_complete
from orchestrator.json_form import encode
from orchestrator.planning.state.state_layout import Layout, StateTensor, held_rows
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView, HeldShard, Source
from orchestrator.records.steps import StateKey
from orchestrator.trainer.comm.group import GenerationEnded
from orchestrator.trainer.comm.reshard import tensor_as_bytes
from orchestrator.trainer.memory_points.memory_point import MemoryPoints
from orchestrator.trainer.memory_points.memory_replica import (
    Address,
    CopyHeader,
    LentCopy,
    NeighbourLink,
    new_token,
)
from orchestrator.trainer.weights.state_tensors import Item

LIMIT_S = 240.0
CPU = torch.device("cpu")
SHAPES = [("a", (70_001, 3), True), ("b", (2, 5), True), ("steps", (), False)]


class FakeShard:
    """What memory points need of a state: rows of a few tensors, whose values are those of a step."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.layout, self.rank = Layout(num_shards=world_size, num_replicas=1), rank
        self.key, self.cursor = StateKey(attempt=1, generation=1, step=0), Cursor()
        self.tensors = [
            whole[rows.start : rows.stop] if whole.ndim else whole for whole, rows in self._whole(0)
        ]

    def _whole(self, step: int) -> Iterator[tuple[Tensor, range]]:
        for number, (name, shape, sharded) in enumerate(SHAPES):
            whole = (
                (torch.arange(max(1, torch.Size(shape).numel())) * (number + 1) + step).float().view(shape)
            )
            tensor = StateTensor(group="model", name=name, shape=shape, itemsize=4, sharded=sharded)
            yield whole, held_rows(tensor, self.layout.num_shards, self.rank)

    def step(self, points: MemoryPoints) -> None:
        """One step: every value changes, when it may."""
        points.writable()
        torch._foreach_add_(self.tensors, 1)
        key = self.key
        self.key = StateKey(attempt=1, generation=key.generation, step=key.step + 1)
        self.cursor = Cursor(consumed_samples=10 * self.key.step)

    def items(self) -> list[Item]:
        found = []
        for (name, shape, sharded), tensor in zip(SHAPES, self.tensors, strict=True):
            whole = StateTensor(group="model", name=name, shape=shape, itemsize=4, sharded=sharded)
            rows = held_rows(whole, self.layout.num_shards, self.rank)
            found.append(Item(whole=whole, tensor=tensor, first_row=rows.start))
        return found

    def expected(self, step: int, shard: int) -> list[Tensor]:
        """The bytes of a shard at a step."""
        of_it = FakeShard(self.layout.num_shards, shard)
        return [tensor_as_bytes(cut(whole, rows)) for whole, rows in of_it._whole(step)]


def cut(whole: Tensor, rows: range) -> Tensor:
    return whole[rows.start : rows.stop] if whole.ndim else whole


class TellingLock:
    """A lock that tells whoever waits for a change when it is let go: what it guards may be another then."""

    def __init__(self, changed: threading.Condition) -> None:
        self._lock, self._changed = threading.Lock(), changed

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        with self._changed:
            self._changed.notify_all()


class Ranks:
    """Ranks of one generation after the other; `step` does what the loop does around a summary."""

    def __init__(self, world_size: int, every: int, nodes: Sequence[int] | None = None) -> None:
        self.states = [FakeShard(world_size, rank) for rank in range(world_size)]
        self.faults: list[Callable[[str, int, int], None]] = []
        self.points = [MemoryPoints(every, CPU, self._fault) for _ in range(world_size)]
        self.changed = threading.Condition()
        for points in self.points:
            points._lock = TellingLock(self.changed)  # type: ignore[assignment]
        self.nodes = tuple(nodes or range(world_size))
        self.generation = 0
        self.generations = ExitStack()
        self.sealed: list[int] = []

    def _fault(self, place: str, step: int, rank: int) -> None:
        for each in self.faults:
            each(place, step, rank)

    def enter(self, keep: StateKey | None = None) -> None:
        """All form a group and agree on what they hold."""
        self.generation += 1
        store, world = HashStore(), len(self.states)
        self.generations = ExitStack()
        for rank, (points, state) in enumerate(zip(self.points, self.states, strict=True)):
            state.key = StateKey(attempt=1, generation=self.generation, step=state.key.step)
            view = GenerationView(
                attempt=1,
                generation=self.generation,
                rank=rank,
                world_size=world,
                members=tuple("abcd"[:world]),
                host="127.0.0.1",
                port=1,
                parent=None,
                source_rank=None,
                point=None,
                cursor=None,
                step=state.key.step,
                launch="l",
                keep=keep,
                nodes=self.nodes,
                own_host="127.0.0.1",
            )
            self.generations.enter_context(points.within(view, store))
        for points, state in zip(self.points, self.states, strict=True):
            points.enter(state)  # type: ignore[arg-type]

    def step(self) -> None:
        sealed = all(points.is_whole for points in self.points)
        for points, state in zip(self.points, self.states, strict=True):
            state.step(points)
            points.applied(state, sealed)  # type: ignore[arg-type]
        if sealed:
            self.sealed.append(self.states[0].key.step)

    def leave(self) -> None:
        self.generations.close()

    def wait(self) -> None:
        """Until every rank has the memory point under way."""
        self.until(lambda: all(points.is_whole for points in self.points))

    def until(self, what: Callable[[], bool]) -> None:
        """Until so much is there of the memory points."""
        with self.changed:
            assert self.changed.wait_for(what, LIMIT_S), "nothing happened in time"

    def held(self, without: Sequence[int] = ()) -> list[ShardHolding]:
        return [
            ShardHolding(member=str(rank), key=h.key, shard=h.shard, num_shards=h.num_shards, source=h.source)
            for rank, points in enumerate(self.points)
            if rank not in without
            for h in points.holdings()
        ]


def end_of(link: NeighbourLink, thread: int) -> None:
    """Until one of its threads has failed; 0 sends, 1 receives."""
    link._threads[thread].join(LIMIT_S)
    assert link.failure


@contextmanager
def ranks(world_size: int, every: int = 1, nodes: Sequence[int] | None = None) -> Iterator[Ranks]:
    group = Ranks(world_size, every, nodes)
    try:
        yield group
    finally:
        for points in group.points:
            points.close()


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


def lent(group: Ranks) -> int:
    """How many copies their keepers have of a buffer of their owner's, and not of their own."""
    return sum(isinstance(kept, LentCopy) for points in group.points for kept in points._kept)


def check_given(group: Ranks, key: StateKey, without: Sequence[int] = ()) -> None:
    """Whoever is said to hold a shard of `key` gives exactly its bytes."""
    state = newest_complete([h for h in group.held(without) if h.key == key], None)
    assert state is not None, f"{key} is not complete among {group.held(without)}"
    for shard, holders in enumerate(state.holders):
        for holding in holders:
            found = group.points[int(holding.member)].copy_of(key, shard)
            expected = group.states[0].expected(key.step, shard)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), holding


@pytest.mark.quick("2-sent", "4-lent", "3-sent")
@pytest.mark.parametrize("nodes", [range(4), [0] * 4], ids=["sent", "lent"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_memory_point_outlives_the_loss_of_any_rank_with_every_byte(world_size, nodes):
    with ranks(world_size, nodes=nodes[:world_size]) as group:
        group.enter()
        for _ in range(4):
            group.wait()
            group.step()
        group.wait()
        group.leave()
        newest = StateKey(attempt=1, generation=1, step=4)
        assert lent(group) == (2 * world_size if nodes == [0] * 4 else 0)
        for lost in range(world_size):
            check_given(group, newest, without=[lost])
        held = [h for points in group.points for h in points.holdings() if h.key == newest]
        assert [h.cursor for h in held] == [Cursor(consumed_samples=40)] * 2 * world_size
        assert group.sealed == [1, 2, 3, 4]


def test_the_neighbour_is_on_another_node():
    with ranks(4, nodes=[0, 0, 1, 1]) as group:
        group.enter()
        group.wait()
        group.leave()
        for node in ([0, 1], [2, 3]):
            check_given(group, StateKey(attempt=1, generation=1, step=0), without=node)


def test_a_point_is_begun_every_so_many_steps_and_not_while_the_last_is_on_its_way():
    with ranks(2, every=3) as group:
        group.enter()
        group.wait()
        for _ in range(3):
            group.step()
        keys = {h.key.step for h in group.held()}
        assert keys <= {0, 3}
        group.wait()
        assert {h.key.step for h in group.held()} == {0, 3}
        assert group.sealed == [1]


@pytest.mark.parametrize("nodes", [None, [0, 0, 0]], ids=["sent", "lent"])
def test_a_new_generation_keeps_what_its_view_says_and_makes_one_of_its_own_at_once(nodes):
    with ranks(3, nodes=nodes) as group:
        group.enter()
        group.wait()
        group.step()
        group.wait()
        group.leave()
        keep = StateKey(attempt=1, generation=1, step=0)
        group.enter(keep)
        group.wait()
        group.leave()
        check_given(group, keep)
        check_given(group, StateKey(attempt=1, generation=2, step=1))
        assert {h.key.generation for h in group.held()} == {1, 2}


def test_a_copy_that_is_cut_off_is_on_no_list_and_the_sealed_one_is():
    """The sender is closed when half of its copy was sent: the receiver's old buffer is lost to it, but the
    sealed one is not.
    """
    with ranks(2) as group:
        group.enter()
        group.wait()
        group.step()  # seals step 0, and begins step 1
        group.wait()
        ends: list[str] = []

        def cut(place: str, step: int, rank: int) -> None:
            if (place, step, rank) == ("neighbour_half_sent", 2, 0):
                ends.append(place)
                raise ConnectionError("cut")

        group.faults.append(cut)
        link = group.points[0]._link
        group.step()  # seals step 1, and begins step 2
        end_of(link, 0)
        with pytest.raises(GenerationEnded) as ended:
            group.points[0].check()
        assert str(link.failure) in str(ended.value)
        group.leave()
        assert ends
        there = {(h.key.step, h.shard) for h in group.points[1].holdings() if h.source is Source.NEIGHBOUR}
        assert (1, 0) in there
        assert (2, 0) not in there
        for lost in (0, 1):
            check_given(group, StateKey(attempt=1, generation=1, step=1), without=[lost])


def test_what_was_lent_outlives_its_owner_and_is_gone_when_that_writes_over_it():
    with ranks(2, nodes=[0, 0]) as group:
        group.enter()
        group.wait()
        group.step()  # seals step 0, and begins step 1
        group.wait()
        group.leave()
        old, new = (StateKey(attempt=1, generation=1, step=step) for step in (0, 1))
        keeper, owner = group.points
        assert {h.key for h in keeper.holdings() if h.shard == 1} == {old, new}
        _, number = owner._slots.place_of(old, 1)
        owner._marks.renew(number)
        with pytest.raises(GenerationEnded) as ended:
            keeper.copy_of(old, 1)
        assert f" shard 1 of {old} " in str(ended.value)
        assert {h.key for h in keeper.holdings() if h.shard == 1} == {new}
        group.points.remove(owner)
        owner.close()
        check_given(group, new)
        check_given(group, new)  # it is the keeper's own by now


def test_a_keeper_that_was_not_told_knows_what_its_owner_writes_over():
    def cut(place: str, step: int, rank: int) -> None:
        if (place, step, rank) == ("neighbour_half_sent", 2, 1):
            raise ConnectionError("cut")

    with ranks(2, nodes=[0, 0]) as group:
        group.faults.append(cut)
        group.enter()
        for _ in range(2):
            group.wait()
            group.step()  # at the end step 1 is sealed, and step 2 is written over step 0
        end_of(group.points[1]._link, 0)
        group.leave()
        held = {(h.key.step, h.shard) for h in group.points[0].holdings() if h.source is Source.NEIGHBOUR}
        assert (1, 1) in held
        assert (0, 1) not in held


@pytest.mark.parametrize("which", ["is not there", "is another's"])
def test_a_keeper_that_cannot_open_what_is_offered_is_sent_the_bytes(which, tmp_path):
    with ranks(2, nodes=[0, 0]) as group:
        for points in group.points:
            changes = {"marks": str(tmp_path)} if which == "is not there" else {"token": "00" * 16}
            points._marks.offer = replace(points._marks.offer, **changes)
        group.enter()
        group.wait()
        group.leave()
        assert lent(group) == 0
        for lost in (0, 1):
            check_given(group, StateKey(attempt=1, generation=1, step=0), without=[lost])


@pytest.mark.parametrize("changed", [None, 0, 5_000_000])
def test_a_copy_with_one_other_bit_is_not_kept(changed):
    """The test is the neighbour, and sends what a neighbour sends."""
    with ranks(2) as group:
        group.enter()
        group.wait()
        group.leave()
        receiver = group.points[0]
        address = Address(host="127.0.0.1", port=receiver._listener.getsockname()[1], token=new_token())
        other = replace(address, port=group.points[1]._listener.getsockname()[1])
        link = NeighbourLink(receiver._listener, address, other, receiver, lambda header: None)
        data = bytearray(range(256)) * 20_000
        copy = HeldShard(
            key=StateKey(attempt=1, generation=2, step=1), shard=1, num_shards=2, source=Source.STAGED
        )
        sent = CopyHeader(copy=copy, keep=None, num_bytes=len(data), buffer=0, mark=1)
        header = json.dumps(encode(sent)).encode()
        digest = xxh3_128(data).digest()
        if changed is not None:
            data[changed] ^= 1
        with socket.create_connection(("127.0.0.1", address.port)) as neighbour:
            neighbour.sendall(bytes.fromhex(address.token) + framed(b"null") + framed(header))
            neighbour.sendall(bytes(data) + digest)
            kept = replace(copy, source=Source.NEIGHBOUR)
            if changed is None:
                group.until(lambda: kept in receiver.holdings())
            else:
                end_of(link, 1)
        link.close()
        assert (kept in receiver.holdings()) == (changed is None)
        assert ("it was sent with" in link.failure) == (changed is not None)


def test_a_stranger_is_sent_away_and_the_neighbour_is_heard():
    with ranks(2) as group:
        group.enter()
        group.wait()
        group.leave()
        port = group.points[0]._listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(bytes(16))
            group.enter()
            group.wait()
            assert stranger.recv(1) == b"", "it was closed"


def test_alone_there_is_nobody_to_give_a_copy_to_and_none_is_made():
    with ranks(1) as group:
        group.enter()
        group.step()
        group.step()
        assert group.held() == []
        assert group.sealed == []


def no_memory(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "no space left in shared memory")


def no_files(*arguments: object, **options: object) -> None:
    raise OSError(errno.EMFILE, "too many open files")


def no_threads(thread: threading.Thread) -> None:
    if thread.name.startswith("memory point"):
        raise RuntimeError("can't start new thread")
    START(thread)


START = threading.Thread.start
# what the machine refuses: shared memory, a file of it, a port, a thread
REFUSALS = {
    "room": (os, "posix_fallocate", no_memory),
    "handle": (os, "memfd_create", no_files),
    "port": (socket, "create_server", no_files),
    "thread": (threading.Thread, "start", no_threads),
}


@pytest.mark.parametrize("lost", REFUSALS)
def test_where_the_machine_refuses_a_memory_point_training_continues_and_the_next_generation_has_them(
    lost, monkeypatch
):
    where, name, refuse = REFUSALS[lost]
    monkeypatch.setattr(where, name, refuse)
    with ranks(2) as group:
        said = [[points._said] if points._said else [] for points in group.points]
        for points, lines in zip(group.points, said, strict=True):
            points._say = lines.append
        for _ in range(2):
            group.enter()
            for points in group.points:
                if points._staging is not None:
                    points._staging.done.exception(LIMIT_S)
            for _ in range(3):
                for points in group.points:
                    points.check()
                group.step()
            group.leave()
        assert group.sealed == []
        assert [len(lines) for lines in said] == [1, 1], "each says so once"
        monkeypatch.undo()
        group.enter()
        group.wait()
        group.step()
        assert len(group.sealed) == 1


def test_one_rank_without_memory_points_leaves_all_without_and_nobody_waits(monkeypatch):
    with ranks(3) as group:
        lines: list[str] = []
        for points in group.points:
            points._say = lines.append
        listen = group.points[1]._listen
        monkeypatch.setattr(group.points[1], "_listen", no_files)
        group.enter()
        for _ in range(3):
            group.step()
        group.leave()
        assert group.sealed == []
        assert len(lines) == 1
        monkeypatch.setattr(group.points[1], "_listen", listen)
        group.enter()
        group.wait()


def test_a_link_that_never_worked_ends_no_generation(monkeypatch):
    """As behind a firewall: each generation that forms anew would end in the same way."""

    def unreached(*arguments: object, **options: object) -> None:
        raise ConnectionRefusedError("nobody listens there")

    monkeypatch.setattr(socket, "create_connection", unreached)
    with ranks(2) as group:
        lines: list[str] = []
        for points in group.points:
            points._say = lines.append
        group.enter()
        for points in group.points:
            end_of(points._link, 0)
        for _ in range(3):
            for points in group.points:
                points.check()
            group.step()
        assert group.sealed == []
        assert len(lines) == 2
