"""The state machine for the buffers of memory points, one on each rank (membership rule 5).

It decides which buffer a memory point is copied to, when a copy counts as held, and when a buffer may be
reused. It identifies buffers by number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.records.membership import HeldShard, Source
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A buffer and its copy. `whole` is False while the copy is still being written."""

    copy: HeldShard | None = None
    whole: bool = False

    @property
    def age(self) -> tuple[bool, StateKey | None]:
        """Sort key: buffers without a whole copy first, then whole copies from oldest to newest."""
        return self.whole, self.copy.key if self.whole and self.copy is not None else None

    def holds(self, key: StateKey) -> bool:
        """Whether it holds the whole copy of `key`."""
        return self.whole and self.copy is not None and self.copy.key == key


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySlots:
    """One member's buffers: two for copies of its own shard, two for those that it keeps for a neighbour.

    With fewer, a loss while a buffer is written leaves no complete state (tests/elastic/memory_point_model.py
    tries every order of copies, summaries, steps and losses).

    `keep` is the newest memory point that is known to be whole on every rank, or that was complete among the
    members when the generation was formed. A buffer that holds it is never chosen. `making` is the memory
    point in progress, which every rank of the generation began after the same step. The next one begins when
    it is sealed.
    """

    own: tuple[Slot, ...] = (Slot(), Slot())
    kept: tuple[Slot, ...] = (Slot(), Slot())
    keep: StateKey | None = None
    making: StateKey | None = None
    has_neighbour: bool = False  # this member keeps copies for another rank

    # ---- a generation
    def entered(self, keep: StateKey | None, has_neighbour: bool) -> MemorySlots:
        """Enters a new generation, while nothing is written to any buffer. `keep` is its view's.

        Incomplete copies are dropped. Whole ones can be given until they are overwritten.
        """
        return replace(
            self,
            own=tuple(slot if slot.whole else Slot() for slot in self.own),
            kept=tuple(slot if slot.whole else Slot() for slot in self.kept),
            keep=keep,
            making=None,
            has_neighbour=has_neighbour,
        )

    # ---- the own shard
    @property
    def is_free(self) -> bool:
        """Whether a memory point may begin. The same on every rank after each step."""
        return self.making is None

    def begun(self, copy: HeldShard) -> tuple[MemorySlots, int]:
        """Begins a copy of the own shard; returns the number of its buffer.

        The buffer is no longer on the list.
        """
        assert self.making is None, f"{copy.key} begins while {self.making} is not sealed"
        number = self.choose(self.own, self.keep)
        return replace(self, own=_put(self.own, number, Slot(copy=copy)), making=copy.key), number

    def staged(self) -> MemorySlots:
        """The copy of the own shard is whole."""
        assert self.making is not None, "a copy that was begun ends"
        return replace(self, own=_ended(self.own, self.making))

    # ---- the neighbour's
    def arriving(self, copy: HeldShard, keep: StateKey | None) -> tuple[MemorySlots, int]:
        """A neighbour's copy begins to arrive; returns the number of its buffer.

        `keep` is what the sender knows to be whole. The sender may have received a summary that this rank has
        not. The reverse cannot happen, because no rank seals a point that this rank has not received.
        """
        number = self.choose(self.kept, keep)
        return replace(self, kept=_put(self.kept, number, Slot(copy=copy))), number

    def arrived(self, key: StateKey) -> MemorySlots:
        """The whole copy has arrived, and its digest equals the sender's."""
        return replace(self, kept=_ended(self.kept, key))

    def overwritten(self, number: int) -> MemorySlots:
        """The copy in this buffer was lent, and its owner has begun to overwrite it."""
        return replace(self, kept=_put(self.kept, number, Slot()))

    # ---- all ranks
    @property
    def is_whole(self) -> bool:
        """The value that this rank reports in a step's summary.

        True if the memory point in progress is whole here, including the copy of the neighbour's shard.
        """
        if self.making is None or not any(slot.holds(self.making) for slot in self.own):
            return False
        return not self.has_neighbour or any(slot.holds(self.making) for slot in self.kept)

    def sealed(self) -> MemorySlots:
        """A step's summary reported that every rank has the whole memory point."""
        assert self.is_whole, f"{self.making} was sealed, and is not whole here: {self}"
        return replace(self, keep=self.making, making=None)

    @property
    def holdings(self) -> tuple[HeldShard, ...]:
        """All copies that can be given."""
        return tuple(slot.copy for slot in (*self.own, *self.kept) if slot.copy is not None and slot.whole)

    def choose(self, slots: tuple[Slot, ...], keep: StateKey | None) -> int:
        """Chooses the buffer for the next copy, among those that do not hold `keep`.

        Prefers a buffer without a whole copy, else takes the one with the oldest copy.
        """
        free = [n for n, slot in enumerate(slots) if keep is None or not slot.holds(keep)]
        return min(free, key=lambda n: slots[n].age)

    def place_of(self, key: StateKey, shard: int) -> tuple[Source, int]:
        """Returns where a listed shard is: the source, own buffers first, and the buffer's number."""
        for source, slots in ((Source.STAGED, self.own), (Source.NEIGHBOUR, self.kept)):
            for number, slot in enumerate(slots):
                if slot.holds(key) and slot.copy is not None and slot.copy.shard == shard:
                    return source, number
        raise AssertionError(f"shard {shard} of {key} is not among {self.holdings}")


def _put(slots: tuple[Slot, ...], number: int, slot: Slot) -> tuple[Slot, ...]:
    return (*slots[:number], slot, *slots[number + 1 :])


def _ended(slots: tuple[Slot, ...], key: StateKey) -> tuple[Slot, ...]:
    assert any(slot.copy is not None and slot.copy.key == key for slot in slots), f"no copy of {key} began"
    return tuple(
        replace(slot, whole=True) if slot.copy is not None and slot.copy.key == key else slot
        for slot in slots
    )
