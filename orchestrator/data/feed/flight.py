"""Tokens that are made and not drawn yet: how many bytes they take, and who may make more.

It knows no Ray and no thread: chunks are announced by slot, taken, delivered to their source's stream, drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from orchestrator.data.tokens.token_chunk import TokenChunk

# Of an entry of a chunk: its columns as they lie in the object store, and what the packer notes of it.
BYTES_AN_ENTRY = 112
_BYTES_A_REASON = 256
_NO_LIMIT = 1 << 62
# A source's positions that are there and not drawn.
Buffered = Callable[[str], int]


class Admission(Enum):
    """Whether another chunk may be handed on now: yes; when something was drawn; never, for nothing will be
    drawn before it is there.
    """

    YES = "yes"
    LATER = "later"
    NEVER = "never"


def chunk_bytes(chunk: TokenChunk) -> int:
    """About what a chunk takes, as a tokenizer announces it and the feeder holds it."""
    of_tokens = chunk.tokens.nbytes + (0 if chunk.loss is None else chunk.loss.nbytes)
    return of_tokens + len(chunk.record) * BYTES_AN_ENTRY + len(chunk.bad_reasons) * _BYTES_A_REASON


class Flight:
    """The chunks between tokenizers and steps of one opening, at most `limit_bytes` of them, and one
    more of each tokenizer and the feeder: who hands one on learns whether it may make another.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """None: as many as there are."""
        self._limit = _NO_LIMIT if limit_bytes is None else limit_bytes
        self._announced = dict[int, int]()  # bytes by slot
        self._taken = dict[int, int]()  # of these slots
        self._early = 0  # taken, not delivered
        # (positions, bytes) of what is delivered, by source
        self._delivered = dict[str, deque[tuple[int, int]]]()
        self._open = dict[str, int]()  # bytes of chunks that have brought no position yet, by source

    def begin(self, slot: int) -> None:
        """A tokenizer begins the slot, perhaps again: it announces all of its chunks from now on."""
        self._announced[slot] = 0

    def held_bytes(self, buffered: Buffered) -> int:
        """Bytes of all chunks that are announced and not drawn."""
        return self._coming_bytes + self._here(buffered)

    def announce(self, slot: int, num_bytes: int) -> None:
        """A tokenizer hands on a chunk of so many bytes for `slot`, which is not taken whole."""
        self._announced[slot] = self._announced.get(slot, 0) + num_bytes

    def goes_on(self, slot: int, due: int, needed: bool, buffered: Buffered) -> Admission:
        """Whether a tokenizer may hand on another chunk for `slot` now. `due` is the slot that is taken next,
        `needed`: nothing can be drawn before its next chunk is there.
        """
        # the feeder takes the due slot's chunks first: one at a time passes whatever is made for later slots,
        # which have half of the limit
        passes = slot == due and not self._coming_of(slot)
        if slot < due or self.held_bytes(buffered) <= (self._limit if passes else self._limit // 2):
            return Admission.YES
        return Admission.NEVER if passes and needed else Admission.LATER

    def has_room(self, buffered: Buffered) -> bool:
        """Whether another window should be begun: half of the limit is left for those that are."""
        return self.held_bytes(buffered) <= self._limit // 2

    def take(self, slot: int, chunk: TokenChunk | None) -> None:
        """The slot's next chunk is taken; None: it has none."""
        num_bytes = 0 if chunk is None else chunk_bytes(chunk)
        self._early += num_bytes
        self._taken[slot] = self._taken.get(slot, 0) + num_bytes
        if chunk is None or chunk.ends_window:
            self._announced.pop(slot, None)
            self._taken.pop(slot, None)

    def deliver(self, chunk: TokenChunk, positions: int) -> None:
        """A chunk that was taken has gone to its source's stream, which has so many positions more now."""
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
        """Bytes of the chunks that the feeder has."""
        total = self._early + sum(self._open.values())
        for source, chunks in self._delivered.items():
            behind, left = sum(positions for positions, _ in chunks), buffered(source)
            while chunks and behind - chunks[0][0] >= left:
                behind -= chunks.popleft()[0]
            total += sum(num_bytes for _, num_bytes in chunks)
        return total
