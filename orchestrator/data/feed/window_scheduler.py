"""Assigns windows to the slots of the pipeline, and puts each source's windows back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from orchestrator.errors import DataIdentityError, FeedError
from orchestrator.records.tokens import TokenChunk, WindowTask

# Windows that are assigned and not delivered: the number of tokenizers, this many more, and one being taken.
SLOTS_AHEAD = 1
# Finished slots are remembered for this many slots: Ray may execute one again if its process was killed while
# it ended.
SLOTS_REMEMBERED = 64
# Estimated tokens of a source's window until one was delivered.
FIRST_GUESS = 1 << 21

_Key = tuple[int, int, int]  # epoch, block, window


class NoTask(Enum):
    """Why a slot is no window: ask again after a change, or there are no more windows."""

    NOT_YET = "not yet"
    OVER = "over"


def _always(_: int) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceWindows:
    """A source's windows from `first` until the beginning of epoch `num_epochs`.

    `first` None: its data have ended there. `num_epochs` None: endless. `num_blocks` returns the number of
    blocks of an epoch. `has_list` returns whether that is known; before it is, none of the epoch's windows is
    assigned.

    `expected` returns the estimated number of windows of (epoch, block), at least 1. A wrong estimate does
    not change the stream. `share` is the source's part of the mixture, in tokens, in any unit.
    """

    source: str
    first: WindowTask | None
    num_blocks: Callable[[int], int]
    num_epochs: int | None
    expected: Callable[[int, int], int]
    share: float = 1.0
    has_list: Callable[[int], bool] = _always


class Slots:
    """Assigns windows to slots, takes the slots' chunks, and delivers each source's chunks in stream order.

    Slots are assigned in the order of their numbers. Each gets the next window of the source that will run
    dry first. A slot that is requested again keeps its window. The number of windows of a block is known only
    when it is read to its end, so `expected` of them are assigned at once, side by side. If there are more,
    they are assigned before anything later of their source, and chunks that came early are held. If there are
    fewer, the slots of the missing windows are assigned again. Nothing that is delivered depends on any of
    this.

    At most `limit` windows are assigned and not delivered, whatever the number of sources. There is always
    room for a window that others wait for: its existence is known before the window before it is delivered,
    and it has the first claim on the room that this delivery frees.

    `after`: the same pipeline continues at another place. The slots assigned there are no windows of this
    place, and their chunks, which come first, are dropped.
    """

    def __init__(
        self, sources: Sequence[SourceWindows], num_tokenizers: int, after: Slots | None = None
    ) -> None:
        self.limit = num_tokenizers + SLOTS_AHEAD + 1
        # slots taken completely: the number of the one being taken
        self.taken: int = 0 if after is None else after.taken
        # slots that are assigned: all before this number
        self.given: int = 0 if after is None else after.given
        self._first = self.given  # the slots before it belong to another place
        self._sources = {source.source: _Source(source) for source in sources}
        self._tasks: dict[int, WindowTask | NoTask] = {}
        self._executions: dict[int, int] = {}
        self._freed: set[int] = set()  # slots whose window turned out not to exist

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(self._sources)

    @property
    def arriving(self) -> bool:
        """Whether slots of the place before are still to be taken."""
        return self.taken < self._first

    def has(self, slot: int) -> bool:
        """Whether the slot belongs to this place, assigned or not."""
        return slot >= self._first

    @property
    def undelivered(self) -> int:
        """Windows that are assigned and not delivered yet, and slots whose window did not exist."""
        return sum(source.undelivered for source in self._sources.values()) + len(self._freed)

    @property
    def ended(self) -> tuple[str, ...]:
        """The sources that are completely delivered."""
        return tuple(name for name, source in self._sources.items() if source.ended)

    @property
    def over(self) -> bool:
        """Whether every source is completely delivered."""
        return all(source.ended for source in self._sources.values())

    @property
    def awaited(self) -> list[tuple[str, int]]:
        """Each (source, epoch) that comes next and has no list yet. Slots must be requested again once it has
        one.
        """
        return [(name, epoch) for name, source in self._sources.items() for epoch in source.awaited]

    def begin(self, slot: int, buffered: Callable[[str], int], has_room: bool = True) -> WindowTask | NoTask:
        """The slot's task, the same for each execution of the slot.

        Returns `NOT_YET` if there is no room or the next window is not known yet. `buffered` returns a
        source's tokens that are delivered and not drawn. Without `has_room`, a window is assigned only if no
        slot is in transit.
        """
        found = self._tasks.get(slot)
        if found is None and (slot == self.given or slot in self._freed):
            room = self.undelivered < self.limit and (has_room or self.taken == self.given)
            found = self._choose(buffered, room=slot in self._freed or room)
            if found is NoTask.NOT_YET:
                return found
            self._tasks[slot] = found
            self._freed.discard(slot)
            self.given = max(self.given, slot + 1)
        if found is None:  # assigned later, or taken so long ago that no process waits for it
            return NoTask.NOT_YET if slot > self.given else NoTask.OVER
        self._executions[slot] = self._executions.get(slot, 0) + 1
        return found

    def executions(self, slot: int) -> int:
        """How often the slot was begun with its current task."""
        return self._executions.get(slot, 0)

    def read(self, slot: int, task: WindowTask, num_windows: int | None) -> None:
        """Records what a tokenizer found when it read `task` for `slot`.

        `num_windows`: it reached the end of the block, which has this many windows, perhaps without the
        task's. None: it found the task's window, and more windows follow. Raises `DataIdentityError` if that
        contradicts the cursor or an earlier reading.
        """
        if self._tasks.get(slot) != task:
            return  # from a process believed dead; another execution has reported it
        source, absent = self._sources[task.source], num_windows is not None and num_windows <= task.window
        source.learn(task, num_windows, was_taken=slot < self.taken)
        if absent:
            source.undelivered -= 1
            del self._tasks[slot], self._executions[slot]
            self._freed.add(slot)

    def take(self, slot: int, chunk: TokenChunk | None) -> list[TokenChunk]:
        """Takes the next chunk in slot order, None for a slot that is no window.

        Returns the chunks that are now due in their source's stream; none for a slot of the place before.
        """
        if slot == self.taken and self.arriving:
            self.taken += chunk is None or chunk.ends_window
            return []
        task = self._tasks.get(slot) if slot == self.taken else None
        key = None if chunk is None else (chunk.source, chunk.epoch, chunk.block, chunk.window)
        due = None if not isinstance(task, WindowTask) else (task.source, task.epoch, task.block, task.window)
        if task is None or key != due:
            raise FeedError(
                f"slot {slot} brought {key} (source, epoch, block, window) where slot {self.taken} was due "
                f"with {due if slot == self.taken else self._tasks.get(self.taken)}",
                code="feed.chunk_order",
            )
        delivered = []
        if chunk is not None and isinstance(task, WindowTask):
            source = self._sources[task.source]
            if chunk.ends_window:
                source.learn(task, task.window + 1 if chunk.ends_block else None)
            delivered = list(source.arrived(chunk))
        if chunk is None or chunk.ends_window:
            self.taken += 1
            self._tasks.pop(slot - SLOTS_REMEMBERED, None)
            self._executions.pop(slot - SLOTS_REMEMBERED, None)
        return delivered

    def _choose(self, buffered: Callable[[str], int], room: bool) -> WindowTask | NoTask:
        able = [s for s in self._sources.values() if s.is_waiting or s.next_block() is not None]
        if not able and all(source.exhausted for source in self._sources.values()):
            return NoTask.OVER
        if not able or not room:
            return NoTask.NOT_YET
        first = min(able, key=lambda s: (not s.is_behind, (buffered(s.name) + s.coming_tokens) / s.share))
        # no window of another source meanwhile: it could not be drawn and would fill memory
        return NoTask.NOT_YET if first.is_waiting else first.give()


class _Block:
    """A block with assigned windows, or the block that is assigned next."""

    def __init__(self, epoch: int, block: int, first: WindowTask | None, expected: int) -> None:
        self.epoch, self.block, self.first = epoch, block, first
        # the next window to assign, and the one that the source's stream waits for
        self.given = self.due = 0 if first is None else first.window
        self.known = self.given + 1  # the number of windows known to exist
        self.num_windows: int | None = None
        self._expected = max(expected, self.known + self.given // 2)

    @property
    def to_give(self) -> bool:
        return self.given < (self._expected if self.num_windows is None else self.num_windows)

    @property
    def all_given(self) -> bool:
        return self.num_windows is not None and self.given >= self.num_windows

    def more_after(self, window: int) -> None:
        """Another window follows. The longer the block turns out to be, the further ahead it is read."""
        self._expected = max(self._expected, window + 2 + window // 2)


class _Source:
    """A source's windows: assigned in stream order as far as they are known, delivered in stream order."""

    def __init__(self, windows: SourceWindows) -> None:
        self.name, self.share, self._windows = windows.source, windows.share, windows
        first = windows.first
        # from the block whose window the stream waits for, to the last block with an assigned window
        self._blocks: deque[_Block] = deque()
        # the block after those
        self._coming: _Block | None = None
        if first is not None:
            expected = windows.expected(first.epoch, first.block)
            self._coming = _Block(first.epoch, first.block, first, expected)
        # the next epoch, until its list is known
        self._border: int | None = None
        self._held: dict[_Key, list[TokenChunk]] = {}  # complete windows that came early
        self.undelivered = 0
        self._windows_delivered = self._tokens_delivered = 0

    # ------------------------------------------------------------------------------------ giving
    def next_block(self) -> _Block | None:
        """The block of the next window to assign."""
        if self._border is not None and self._windows.has_list(self._border):
            self._coming, self._border = self._block(self._border, 0), None
        return next((block for block in self._blocks if block.to_give), self._coming)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The next epoch, if it has no list yet."""
        return () if self._border is None or self._windows.has_list(self._border) else (self._border,)

    @property
    def is_waiting(self) -> bool:
        """Whether no window can be assigned before the list of the next epoch is known."""
        return self.next_block() is None and self._border is not None

    @property
    def is_behind(self) -> bool:
        """Whether its next window comes before one that is already assigned."""
        block = self.next_block()
        return block is not self._coming and block is not self._blocks[-1]

    @property
    def exhausted(self) -> bool:
        """Whether it is known that no window is left to assign."""
        no_more = self._coming is None and self._border is None
        return no_more and all(block.all_given for block in self._blocks)

    @property
    def ended(self) -> bool:
        """Whether everything is delivered."""
        return self._coming is None and self._border is None and not self._blocks

    @property
    def coming_tokens(self) -> float:
        """The estimated tokens of the windows that are assigned and not delivered."""
        known = self._windows_delivered
        return self.undelivered * (self._tokens_delivered / known if known else FIRST_GUESS)

    def give(self) -> WindowTask:
        """Assigns the next window."""
        block = self.next_block()
        assert block is not None, f"source {self.name} has a window to give"
        if block is self._coming:
            self._blocks.append(block)
            self._coming = self._block_after(block)
        window, first = block.given, block.first
        block.given += 1
        self.undelivered += 1
        if first is not None and first.window == window:
            return first
        return WindowTask(source=self.name, epoch=block.epoch, block=block.block, window=window)

    def _block_after(self, block: _Block) -> _Block | None:
        epoch, number = block.epoch, block.block + 1
        if number == self._windows.num_blocks(epoch):
            epoch, number = epoch + 1, 0
        num_epochs = self._windows.num_epochs
        if num_epochs is not None and epoch >= num_epochs:
            return None
        if number == 0 and not self._windows.has_list(epoch):
            self._border = epoch
            return None
        return self._block(epoch, number)

    def _block(self, epoch: int, number: int) -> _Block:
        return _Block(epoch, number, None, self._windows.expected(epoch, number))

    # ------------------------------------------------------------------------------------ what was read
    def learn(self, task: WindowTask, num_windows: int | None, was_taken: bool = False) -> None:
        """Records what `Slots.read` says of a window.

        `was_taken`: the slot's chunks were taken before, so the task's window exists.
        """
        block = self._find(task.epoch, task.block)
        known, whole = (0, None) if block is None else (block.known, block.num_windows)
        if was_taken or num_windows is None:
            known = max(known, task.window + (1 if num_windows is not None else 2))
        now = whole if num_windows is None else num_windows
        if now is not None and (now < known or whole not in (None, now)):
            was = f"at least {known}" if whole in (None, now) else str(whole)
            raise DataIdentityError(
                f"block {task.block} of source {self.name} in epoch {task.epoch} had {was} windows at an "
                f"earlier reading or at the cursor, and {now} at this reading; the data are not those that "
                "the run was started with",
                code="resume.cursor_mismatch",
            )
        if block is None:
            return  # all of it is delivered
        block.known, block.num_windows = known, now
        if num_windows is None:
            block.more_after(task.window)

    def _find(self, epoch: int, block: int) -> _Block | None:
        return next((b for b in self._blocks if (b.epoch, b.block) == (epoch, block)), None)

    # ------------------------------------------------------------------------------------ delivering
    def arrived(self, chunk: TokenChunk) -> Iterable[TokenChunk]:
        """Delivers the chunk if its window is due, with all held chunks that follow, else holds it.

        Chunks of a window arrive in order, windows in the order of their slots.
        """
        key = (chunk.epoch, chunk.block, chunk.window)
        if key != self._due:
            self._held.setdefault(key, []).append(chunk)
            return
        yield self._delivered(chunk)
        while (due := self._due) is not None and due in self._held:
            yield from map(self._delivered, self._held.pop(due))

    @property
    def _due(self) -> _Key | None:
        if not self._blocks:
            return None
        block = self._blocks[0]
        return block.epoch, block.block, block.due

    def _delivered(self, chunk: TokenChunk) -> TokenChunk:
        self._tokens_delivered += len(chunk.tokens)
        if chunk.ends_window:
            self._windows_delivered += 1
            self.undelivered -= 1
            block = self._blocks[0]
            block.due += 1
            if block.due == block.num_windows:  # known since this window was read
                self._blocks.popleft()
        return chunk
