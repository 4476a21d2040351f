"""A bounded buffer of consecutive steps that may be requested again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.planning.batches import rank_samples
from orchestrator.records.batches import StepRange
from orchestrator.records.cursor import Cursor

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
