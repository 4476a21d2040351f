"""One opening of the pipeline at a cursor, as plain state: which slot is which task, how far the chunks are
taken, what is packed.

It knows no Ray, no thread and no waiting; the feeder asks it what may happen now.
"""

from __future__ import annotations

from itertools import islice

from orchestrator.data.feed.replay import ReplayBuffer
from orchestrator.data.packing.stream import Stream
from orchestrator.data.spec import DataSpec
from orchestrator.records import Cursor, TokenChunk, WindowTask

# Slots beyond the one being taken that may be read: this many more than there are tokenizers.
SLOTS_AHEAD = 1
# Windows of the block at hand that may be tokenized beyond the one being taken.
WINDOWS_AHEAD = 2
# Slots that are done stay known for so long: Ray may execute one again whose process was killed while it
# ended.
SLOTS_REMEMBERED = 64


class Opening:
    """The stream from `cursor` on. A slot of the pipeline is the slot-th block task from there.

    With one source that is all there is to decide; the tasks are drawn in the order of the slots, as they are
    listed.
    """

    def __init__(
        self, run_id: int, spec: DataSpec, cursor: Cursor, num_tokenizers: int, replay_bytes: int
    ) -> None:
        self.run_id = run_id
        (plan,) = spec.plans
        self._source = plan.source
        self.stream: Stream = spec.stream(cursor)
        self.steps = ReplayBuffer(cursor, replay_bytes)
        self.wanted_tokens = 1  # so many are kept buffered: those of the next step
        self.slot = self.window = 0  # what is being taken
        self.slots_given = 0
        self._slots_ahead = num_tokenizers + SLOTS_AHEAD
        self._coming = iter(spec.tasks_from(cursor, plan.source))
        self._tasks: dict[int, WindowTask] = {}
        self._executions: dict[int, int] = {}
        self._listed = 0
        self._all_listed = False

    @property
    def buffered_tokens(self) -> int:
        """Positions that are there and not drawn."""
        return self.stream.buffered_tokens(self._source)

    @property
    def wants(self) -> bool:
        """Whether the next chunk should be taken now."""
        return self.buffered_tokens < self.wanted_tokens

    def list_slots(self, limit: int) -> range:
        """The next slots, at most `limit`; empty at the end of the data."""
        first = self._listed
        for task in islice(self._coming, limit):
            self._tasks[self._listed] = task
            self._listed += 1
        self._all_listed = self._listed < first + limit
        self._finish_if_done()
        return range(first, self._listed)

    def may_begin(self, slot: int) -> bool:
        """Whether a tokenizer may begin this slot now: the bound on how far it reads ahead."""
        return slot <= self.slot + self._slots_ahead

    def begin(self, slot: int) -> tuple[WindowTask, int]:
        """What `slot` is, and how often it was begun, this time included: the same task each time, whoever
        executes it again.
        """
        executions = self._executions[slot] = self._executions.get(slot, 0) + 1
        self.slots_given = max(self.slots_given, slot + 1)
        return self._tasks[slot], executions

    def may_bring(self, slot: int, window: int) -> bool:
        """Whether chunks of this window may be handed over now: of a slot that is not being taken yet, only
        its first window.
        """
        if slot != self.slot:
            return slot < self.slot or window == self._tasks[slot].window
        return window <= max(self.window, self._tasks[slot].window) + WINDOWS_AHEAD

    def take(self, slot: int, chunk: TokenChunk) -> None:
        """The next chunk in order. Raises `DataIdentityError` if the cursor's tokens are not reproduced."""
        assert slot == self.slot, f"a chunk of slot {slot} came while slot {self.slot} was being taken"
        self.stream.feed(chunk)
        self.window = chunk.window
        if chunk.ends_block:
            self.slot, self.window = slot + 1, 0
            self._tasks.pop(slot - SLOTS_REMEMBERED, None)
            self._executions.pop(slot - SLOTS_REMEMBERED, None)
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._all_listed and self.slot == self._listed:
            self.stream.finish(self._source)
