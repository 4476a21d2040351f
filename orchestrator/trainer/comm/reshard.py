"""Resharding: moves the state of one group into the tensors of the next.

Every rank sends what it holds of the old shards and receives the rows of its new shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_128

from orchestrator.planning.state.state_layout import Layout, Move, StateTensor, Transfer, moves, transfers

MESSAGE_BYTES = 32 << 20
_DIGEST_BYTES = 16

# Returns the bytes of each tensor of an old shard, in the order of the tensors: the rows of `held_rows`.
OldShard = Callable[[int], Sequence[Tensor]]


class PendingMessage(Protocol):
    """A message that is being sent or received."""

    def wait(self) -> object:
        """Waits until its buffer may be used again."""


class Peers(Protocol):
    """Messages between the ranks of a group.

    Messages from one rank to another arrive in order. The receiver must use the size that the sender used.
    """

    def give(self, buffer: Tensor, rank: int) -> PendingMessage:
        """Sends `buffer` (uint8, on the CPU) to `rank`."""

    def take(self, buffer: Tensor, rank: int) -> PendingMessage:
        """Receives a message from `rank` into `buffer`."""


class DigestError(Exception):
    """The received bytes differ from the sent ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """The data that one rank sends to another, with `peer` as the other side.

    `moves` read from or write to `tensors`, the bytes of each tensor on this rank. Both sides have the same
    moves.
    """

    peer: int
    tensors: Sequence[Tensor]
    moves: Sequence[Move]


def exchange(
    peers: Peers,
    rank: int,
    given: Iterable[Parcel],
    taken: Iterable[Parcel],
    half: Callable[[bool], None] = lambda gives: None,
) -> int:
    """Sends and receives these parcels; returns the number of bytes received.

    Parcels are exchanged in order, one message in each direction at a time. `half(gives)` is called when half
    of a parcel was sent (True) or received (False). Messages have at most 32 MiB, so that the exchange takes
    64 MiB.

    If all ranks call it in rounds, where in round d rank r sends to rank r + d and receives from rank r - d,
    there is no deadlock: a rank in the earliest round and message has partners that have reached it. Raises
    as `Resharding.carry_out`.
    """
    received = 0

    def noted() -> Iterator[Parcel]:
        nonlocal received
        for parcel in taken:
            received += sum(move.num_bytes for move in parcel.moves)
            yield parcel

    running = [_give(given, peers, half), _take(noted(), peers, rank, half)]
    while running:
        pending = [next(each, None) for each in running]
        running = [each for each, left in zip(running, pending, strict=True) if left is not None]
        for each in pending:
            if each is not None:
                each.wait()
    return received


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharding:
    """One rank's part in moving a state into `layout`.

    `holders[s]` are the ranks that have shard s of the old state. The list is the same on every rank. `half`
    as in `exchange`.
    """

    tensors: Sequence[StateTensor]
    holders: Sequence[Sequence[int]]
    layout: Layout
    rank: int
    half: Callable[[bool], None] = lambda gives: None

    def carry_out(self, peers: Peers, old: OldShard, new: Sequence[Tensor]) -> int:
        """Writes this rank's shard of the state into `new`, and sends other ranks what they lack.

        `new` is the bytes of each tensor. Every rank of the group must call it. Returns the number of bytes
        received.

        `old(shard)` is called for shards that this rank holds. If an old and a new tensor share memory,
        nothing is copied. Takes 64 MiB besides both shards (`exchange`). Raises `DigestError` if the bytes in
        `new` differ from the sender's, and what `peers` raises. The contents of `new` are unusable then.
        """
        world, received = self.layout.world_size, 0
        rounds: dict[int, tuple[list[Transfer], list[Transfer]]] = {}
        for transfer in transfers(self.tensors, self.holders, self.layout):
            distance = (transfer.receiver - transfer.giver) % world
            if transfer.giver == self.rank == transfer.receiver:
                self._copy(transfer, old(transfer.shard), new)
            elif self.rank in (transfer.giver, transfer.receiver):
                gives = transfer.giver == self.rank
                rounds.setdefault(distance, ([], []))[not gives].append(transfer)
        for _, (given, taken) in sorted(rounds.items()):
            there = (Parcel(peer=t.receiver, tensors=old(t.shard), moves=list(self._moves(t))) for t in given)
            here = (Parcel(peer=t.giver, tensors=new, moves=list(self._moves(t))) for t in taken)
            received += exchange(peers, self.rank, there, here, self.half)
        return received

    def _copy(self, transfer: Transfer, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        for move in self._moves(transfer):
            source, target = _part(old, move, move.source), _part(new, move, move.target)
            if source.data_ptr() != target.data_ptr() or source.device != target.device:
                target.copy_(source)

    def _moves(self, transfer: Transfer) -> Iterator[Move]:
        return moves(self.tensors, len(self.holders), transfer, self.layout)


def _give(given: Iterable[Parcel], peers: Peers, half: Callable[[bool], None]) -> Iterator[PendingMessage]:
    """Sends message by message. Each message is on its way before the next one reuses its memory."""
    memory = torch.empty(0, dtype=torch.uint8)
    for parcel in given:
        total, cut = xxh3_128(), list(messages(parcel.moves))
        for number, message in enumerate(cut):
            if number == (len(cut) + 1) // 2:
                half(True)
            memory, buffer = _room(message, memory)
            for at, move in message:
                buffer[at : at + move.num_bytes].copy_(_part(parcel.tensors, move, move.source))
            total.update(memoryview(buffer.numpy()))  # type: ignore[arg-type]
            yield peers.give(buffer, parcel.peer)
        if cut:
            yield peers.give(_bytes(total.digest()), parcel.peer)


def _take(
    taken: Iterable[Parcel], peers: Peers, rank: int, half: Callable[[bool], None]
) -> Iterator[PendingMessage]:
    """Receives message by message, and compares the final contents of the tensors with the digest."""
    memory = torch.empty(0, dtype=torch.uint8)
    for parcel in taken:
        cut = list(messages(parcel.moves))
        for number, message in enumerate(cut):
            if number == (len(cut) + 1) // 2:
                half(False)
            memory, buffer = _room(message, memory)
            yield peers.take(buffer, parcel.peer)
            for at, move in message:
                _part(parcel.tensors, move, move.target).copy_(buffer[at : at + move.num_bytes])
        if not cut:
            continue
        digest = torch.empty(_DIGEST_BYTES, dtype=torch.uint8)
        yield peers.take(digest, parcel.peer)
        total = xxh3_128()
        for move in parcel.moves:
            total.update(memoryview(_part(parcel.tensors, move, move.target).cpu().numpy()))  # type: ignore[arg-type]
        if total.digest() != digest.numpy().tobytes():
            raise DigestError(
                f"the state that rank {rank} received from rank {parcel.peer} has another digest "
                f"than its source: {total.hexdigest()}, not {digest.numpy().tobytes().hex()}"
            )


def messages(of_parcel: Iterable[Move]) -> Iterator[list[tuple[int, Move]]]:
    """Cuts the moves of a parcel into messages, each a list of (offset in the message, move).

    Both sides cut alike. Each message has at most `MESSAGE_BYTES`. There are at least two messages if there
    are two bytes.
    """
    all_moves = list(of_parcel)
    total = sum(move.num_bytes for move in all_moves)
    size = min(MESSAGE_BYTES, max(1, -(-total // 2)))
    message: list[tuple[int, Move]] = []
    filled = 0
    for whole in all_moves:
        done = 0
        while done < whole.num_bytes:
            count = min(whole.num_bytes - done, size - filled)
            piece = replace(whole, source=whole.source + done, target=whole.target + done, num_bytes=count)
            message.append((filled, piece))
            filled, done = filled + count, done + count
            if filled == size:
                yield message
                message, filled = [], 0
    if message:
        yield message


def tensor_as_bytes(tensor: Tensor) -> Tensor:
    """Returns the values of a contiguous tensor as a flat uint8 tensor that shares its memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def _part(tensors: Sequence[Tensor], move: Move, at: int) -> Tensor:
    return tensors[move.tensor][at : at + move.num_bytes]


def _room(message: list[tuple[int, Move]], memory: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `memory`, or a larger replacement, and a view of it with the size of the message.

    Allocating memory for each message would cost more than copying to it.
    """
    at, last = message[-1]
    size = at + last.num_bytes
    if len(memory) < size:
        memory = torch.empty(size, dtype=torch.uint8)
    return memory, memory[:size]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
