"""The state of a group moved into the tensors of the next: every rank gives what it holds of the old shards
and gets the rows of its new one.

It knows bytes and ranks; not which state it is, where a giver has its shard from, or what a failure means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_128

from orchestrator.planning.state_layout import Layout, StateTensor
from orchestrator.planning.state_moves import Move, Transfer, moves, transfers

MESSAGE_BYTES = 32 << 20
_DIGEST_BYTES = 16

# The bytes of each tensor of an old shard, in the order of the tensors: those that `held_rows` says.
OldShard = Callable[[int], Sequence[Tensor]]


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Returns when its buffer may be used again."""


class Peers(Protocol):
    """Messages between the ranks of a group. Those of one rank to another arrive in their order; a message is
    taken with the size with which it was given.
    """

    def give(self, buffer: Tensor, rank: int) -> Pending:
        """Sends `buffer` (uint8, on the CPU) to `rank`."""

    def take(self, buffer: Tensor, rank: int) -> Pending:
        """Receives a message of `rank` into `buffer`."""


class DigestError(Exception):
    """What came is not what was sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resharding:
    """One rank's part in moving a state into `layout`. `holders[s]` are the ranks that have shard s of the
    old state, the same list on every rank. `half(gives)` is called when half of a transfer was given, or
    taken.
    """

    tensors: Sequence[StateTensor]
    holders: Sequence[Sequence[int]]
    layout: Layout
    rank: int
    half: Callable[[bool], None] = lambda gives: None

    def carry_out(self, peers: Peers, old: OldShard, new: Sequence[Tensor]) -> int:
        """Writes this rank's shard of the state into `new`, the bytes of each tensor, and gives others what
        they lack. Every rank of the group must call it. The bytes that were received.

        `old(shard)` is asked for shards that this rank holds. Where an old tensor and a new one are the same
        memory nothing is copied. In messages of at most 32 MiB, of which one each way is under way at a
        time, so that it needs 64 MiB beside both shards. Raises `DigestError` if what lies in `new` is not
        what a giver had, and what `peers` raises; then `new` holds nothing of use.

        Ranks give in rounds: in round d rank r gives to rank r + d and takes from rank r - d, one message of
        each at a time. Nobody waits for ever: whoever is in the earliest round and message has partners that
        have been there.
        """
        plan = transfers(self.tensors, self.holders, self.layout)
        world, received = self.layout.world_size, 0
        rounds: dict[int, tuple[list[Transfer], list[Transfer]]] = {}
        for transfer in plan:
            distance = (transfer.receiver - transfer.giver) % world
            if transfer.giver == self.rank == transfer.receiver:
                self._copy(transfer, old(transfer.shard), new)
            elif self.rank in (transfer.giver, transfer.receiver):
                gives = transfer.giver == self.rank
                rounds.setdefault(distance, ([], []))[not gives].append(transfer)
        for _, (given, taken) in sorted(rounds.items()):
            there = self._give(given, peers, old)
            here = self._take(taken, peers, new)
            pending: list[Pending | None] = [None, None]
            running = [there, here]
            while running:
                pending = [next(each, None) for each in running]
                running = [each for each, left in zip(running, pending, strict=True) if left is not None]
                for each in pending:
                    if each is not None:
                        each.wait()
            received += sum(transfer.num_bytes for transfer in taken)
        return received

    def _copy(self, transfer: Transfer, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        for move in self._moves(transfer):
            source, target = _part(old, move, move.source), _part(new, move, move.target)
            if source.data_ptr() != target.data_ptr() or source.device != target.device:
                target.copy_(source)

    def _give(self, given: Sequence[Transfer], peers: Peers, old: OldShard) -> Iterator[Pending]:
        """Sends, message by message; the buffer of a message is used again for the next one."""
        for transfer in given:
            shard, total = old(transfer.shard), xxh3_128()
            cut = list(messages(self._moves(transfer)))
            for number, message in enumerate(cut):
                if number == (len(cut) + 1) // 2:
                    self.half(True)
                buffer = _buffer(message)
                for at, move in message:
                    buffer[at : at + move.num_bytes].copy_(_part(shard, move, move.source))
                total.update(memoryview(buffer.numpy()))  # type: ignore[arg-type]
                yield peers.give(buffer, transfer.receiver)
            if cut:
                yield peers.give(_bytes(total.digest()), transfer.receiver)

    def _take(self, taken: Sequence[Transfer], peers: Peers, new: Sequence[Tensor]) -> Iterator[Pending]:
        """Receives, message by message, and compares what lies in `new` at the end."""
        for transfer in taken:
            cut = list(messages(self._moves(transfer)))
            for number, message in enumerate(cut):
                if number == (len(cut) + 1) // 2:
                    self.half(False)
                buffer = _buffer(message)
                yield peers.take(buffer, transfer.giver)
                for at, move in message:
                    _part(new, move, move.target).copy_(buffer[at : at + move.num_bytes])
            if not cut:
                continue
            digest = torch.empty(_DIGEST_BYTES, dtype=torch.uint8)
            yield peers.take(digest, transfer.giver)
            total = xxh3_128()
            for move in self._moves(transfer):
                total.update(memoryview(_part(new, move, move.target).cpu().numpy()))  # type: ignore[arg-type]
            if total.digest() != digest.numpy().tobytes():
                raise DigestError(
                    f"the state that rank {self.rank} received from rank {transfer.giver} has another digest "
                    f"than its source: {total.hexdigest()}, not {digest.numpy().tobytes().hex()}"
                )

    def _moves(self, transfer: Transfer) -> Iterator[Move]:
        return moves(self.tensors, len(self.holders), transfer, self.layout)


def messages(of_transfer: Iterator[Move]) -> Iterator[list[tuple[int, Move]]]:
    """The moves of a transfer cut into messages, each a list of (offset in the message, move): both sides cut
    alike. At most `MESSAGE_BYTES` each, and at least two where there are two bytes.
    """
    all_moves = list(of_transfer)
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
    """The values of a contiguous tensor as a flat uint8 tensor that shares its memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def _part(tensors: Sequence[Tensor], move: Move, at: int) -> Tensor:
    return tensors[move.tensor][at : at + move.num_bytes]


def _buffer(message: list[tuple[int, Move]]) -> Tensor:
    at, last = message[-1]
    return torch.empty(at + last.num_bytes, dtype=torch.uint8)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
