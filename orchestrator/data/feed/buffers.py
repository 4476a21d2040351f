"""The feeder's two bounded buffers: chunks that are not drawn yet, and steps that may be requested again.

`Flight` accounts for the bytes of encoded chunks and decides which tokenizer may send more. A chunk is
announced for its slot, taken, delivered to its source's stream and drawn, in this order. `ReplayBuffer` holds
consecutive drawn steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.planning.batches import rank_samples
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import TokenChunk

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


# ------------------------------------------------------------------------------------------------ drawn steps
# Shares that are ready are answered together up to this size. An answer through Ray's object store costs the
# feeder over a millisecond, whatever its size.
TOGETHER_BYTES = 4 << 20
# The minimum number of held steps, whatever the limit: the one in training and the one prefetched.
MIN_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStep:
    """The samples of a step, the requested range, and the cursor before the step.

    The range is longer than the samples at the end of the data.
    """

    asked: StepRange
    before: Cursor
    samples: StepSamples

    def samples_of(self, rank: int, world_size: int, micro_batch_size: int) -> tuple[int, int]:
        """A rank's samples of the step: [start, stop)."""
        step = self.samples.step
        return rank_samples(step.first_sample, step.num_samples, micro_batch_size, rank, world_size)

    @property
    def end(self) -> int:
        """The first sample after the step."""
        return self.samples.cursor.consumed_samples


class ReplayBuffer:
    """Holds steps in order, at most about `limit_bytes` of them. The oldest are dropped first.

    `start` is the cursor from which the first step will be drawn. A step that is requested again gives the
    same bytes, because it is the same object.
    """

    def __init__(self, start: Cursor, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._steps: deque[HeldStep] = deque()
        self._by_first: dict[int, HeldStep] = {}
        self._next = start
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def next_cursor(self) -> Cursor:
        """The cursor from which the next step will be drawn."""
        return self._next

    @property
    def first_sample(self) -> int:
        """The oldest sample that is still held."""
        return self._steps[0].before.consumed_samples if self._steps else self._next.consumed_samples

    def append(self, asked: StepRange, samples: StepSamples) -> HeldStep:
        """Adds the step drawn at `next_cursor`. Drops the oldest steps beyond the limit."""
        assert asked.first_sample == self._next.consumed_samples, (
            f"{asked} does not follow {self._next.consumed_samples}"
        )
        held = HeldStep(asked=asked, before=self._next, samples=samples)
        self._steps.append(held)
        self._by_first[asked.first_sample] = held
        self._next = samples.cursor
        self.held_bytes += samples.nbytes
        while self.held_bytes > self._limit_bytes and len(self._steps) > MIN_STEPS:
            self._drop_oldest()
        return held

    def find(self, first_sample: int) -> HeldStep | None:
        """The held step that begins at `first_sample`, if it is still held."""
        return self._by_first.get(first_sample)

    def serves(self, cursor: Cursor) -> bool:
        """Whether a held step, or the next one, begins exactly at `cursor`."""
        return cursor == self._next or any(held.before == cursor for held in self._steps)

    def has_room_ahead(self, first_sample: int) -> bool:
        """Whether one more step, as large as the newest, may be drawn ahead of its request.

        The caller receives the steps from `first_sample` on. These, the step before them, which another rank
        may still request, and the new step must fit into half of the limit. The other half is for going back.
        """
        ahead = 0
        for held in reversed(self._steps):
            ahead += held.samples.nbytes
            if held.before.consumed_samples < first_sample:
                break
        newest = self._steps[-1].samples.nbytes if self._steps else 0
        return ahead + newest <= self._limit_bytes // 2

    def committed(self, consumed_samples: int) -> None:
        """Drops the steps that end at or before a committed point. No rank goes back before it while the
        group lives.
        """
        while len(self._steps) > MIN_STEPS and self._steps[0].end <= consumed_samples:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._steps.popleft()
        first = oldest.before.consumed_samples
        if self._by_first.get(first) is oldest:  # an empty step precedes another one at the same place
            del self._by_first[first]
        self.held_bytes -= oldest.samples.nbytes
