"""Accounts for tokens that are encoded and not drawn yet: their bytes, and which tokenizer may send more.

A chunk is announced for its slot, taken, delivered to its source's stream and drawn, in this order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from orchestrator.data.tokens.token_chunk import TokenChunk

# Bytes of a chunk's entry: its columns in the object store, and the packer's notes of it.
BYTES_AN_ENTRY = 112
_BYTES_A_REASON = 256
_NO_LIMIT = 1 << 62
# The number of a source's positions that are delivered and not drawn.
Buffered = Callable[[str], int]


class Admission(Enum):
    """Whether another chunk may be sent now: yes; later, when something was drawn; or never, because nothing
    can be drawn before this chunk arrives.
    """

    YES = "yes"
    LATER = "later"
    NEVER = "never"


def chunk_bytes(chunk: TokenChunk) -> int:
    """The approximate bytes of a chunk, as a tokenizer announces it and the feeder holds it."""
    of_tokens = chunk.tokens.nbytes + (0 if chunk.loss is None else chunk.loss.nbytes)
    return of_tokens + len(chunk.record) * BYTES_AN_ENTRY + len(chunk.bad_reasons) * _BYTES_A_REASON


class Flight:
    """The chunks between the tokenizers and the steps of one opening.

    They take at most `limit_bytes`, and one more chunk for each tokenizer and for the feeder. A tokenizer
    that sends a chunk learns whether it may make another.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """`limit_bytes` None: no limit."""
        self._limit = _NO_LIMIT if limit_bytes is None else limit_bytes
        self._announced = dict[int, int]()  # bytes by slot
        self._taken = dict[int, int]()  # bytes by slot, of the slots above
        self._early = 0  # taken, not delivered
        # (positions, bytes) of delivered chunks, by source
        self._delivered = dict[str, deque[tuple[int, int]]]()
        self._open = dict[str, int]()  # bytes of chunks that have added no position yet, by source

    def begin(self, slot: int) -> None:
        """A tokenizer begins the slot, perhaps again. It announces all of its chunks from now on."""
        self._announced[slot] = 0

    def held_bytes(self, buffered: Buffered) -> int:
        """Bytes of all chunks that are announced and not drawn."""
        return self._coming_bytes + self._here(buffered)

    def announce(self, slot: int, num_bytes: int) -> None:
        """A tokenizer sends a chunk of `num_bytes` for `slot`, which is not yet taken completely."""
        self._announced[slot] = self._announced.get(slot, 0) + num_bytes

    def goes_on(self, slot: int, due: int, needed: bool, buffered: Buffered) -> Admission:
        """Whether a tokenizer may send another chunk for `slot` now.

        `due` is the slot that is taken next. `needed`: nothing can be drawn before its next chunk arrives.
        """
        # The feeder takes the due slot's chunks first. One chunk at a time may pass those of later slots,
        # which have half of the limit.
        passes = slot == due and not self._coming_of(slot)
        if slot < due or self.held_bytes(buffered) <= (self._limit if passes else self._limit // 2):
            return Admission.YES
        return Admission.NEVER if passes and needed else Admission.LATER

    def has_room(self, buffered: Buffered) -> bool:
        """Whether another window should begin. Half of the limit is reserved for windows that have begun."""
        return self.held_bytes(buffered) <= self._limit // 2

    def take(self, slot: int, chunk: TokenChunk | None) -> None:
        """The slot's next chunk is taken. None: the slot has no chunk."""
        num_bytes = 0 if chunk is None else chunk_bytes(chunk)
        self._early += num_bytes
        self._taken[slot] = self._taken.get(slot, 0) + num_bytes
        if chunk is None or chunk.ends_window:
            self._announced.pop(slot, None)
            self._taken.pop(slot, None)

    def deliver(self, chunk: TokenChunk, positions: int) -> None:
        """A taken chunk was added to its source's stream, which grew by `positions`."""
        num_bytes = chunk_bytes(chunk)
        self._early -= num_bytes
        if not len(chunk.tokens) and not chunk.bad_reasons:
            return  # nothing of it is kept
        self._open[chunk.source] = self._open.get(chunk.source, 0) + num_bytes
        if positions > 0:
            here = self._delivered.setdefault(chunk.source, deque())
            here.append((positions, self._open.pop(chunk.source)))

    @property
    def _coming_bytes(self) -> int:
        return sum(map(self._coming_of, self._announced))

    def _coming_of(self, slot: int) -> int:
        return max(0, self._announced.get(slot, 0) - self._taken.get(slot, 0))

    def _here(self, buffered: Buffered) -> int:
        """Bytes of the chunks that the feeder holds."""
        total = self._early + sum(self._open.values())
        for source, chunks in self._delivered.items():
            behind, left = sum(positions for positions, _ in chunks), buffered(source)
            while chunks and behind - chunks[0][0] >= left:
                behind -= chunks.popleft()[0]
            total += sum(num_bytes for _, num_bytes in chunks)
        return total
