"""The open blocks of a tokenizer process: reading a later window continues where an earlier one ended."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.windows import Window, read_windows
from orchestrator.data.tokens.chunks import Passed
from orchestrator.data.tokens.token_chunk import WindowTask

# At most one block of a source is open, for this many sources. An open block keeps its file and its decoder's
# state.
MAX_OPEN = 8


class NotWantedError(Exception):
    """The feeder no longer wants the task whose earlier windows are being skipped."""


class OpenBlocks:
    """Reads windows of blocks by their number. Not thread-safe."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: dict[str, _OpenBlock] = {}  # by source, least recently used first

    def read(
        self, task: WindowTask, plan: SourcePlan, settings: StreamSettings, passed: Passed = lambda _: True
    ) -> Window | int:
        """The task's window, or the block's number of windows if it has fewer.

        Windows before it are read and skipped, from the block's open position or from its beginning. That may
        take an hour, so `passed` is called with the decoded bytes of each skipped window. Raises
        `NotWantedError` if it returns False. Raises as `read_windows` does.
        """
        opened = self._open.pop(task.source, None)  # after an error the block is reopened
        if opened is None or not opened.leads_to(task):
            opened = _OpenBlock(task, read_windows(plan, settings, task.epoch, task.block))
        found = opened.read(task.window, passed)
        self._open[task.source] = opened
        if len(self._open) > self._max_open:
            del self._open[next(iter(self._open))]
        return found


class _OpenBlock:
    def __init__(self, task: WindowTask, windows: Iterator[Window]) -> None:
        self._block, self._windows = (task.epoch, task.block), windows
        self._next = 0  # the window that is read next
        self._num_windows: int | None = None  # known at the end

    def leads_to(self, task: WindowTask) -> bool:
        """Whether the task's window is still to come, or known to lie beyond the end."""
        ahead = task.window >= (self._next if self._num_windows is None else self._num_windows)
        return (task.epoch, task.block) == self._block and ahead

    def read(self, number: int, passed: Passed) -> Window | int:
        while self._num_windows is None:
            window = next(self._windows)
            self._next += 1
            if window.last:
                self._num_windows = self._next
            if window.number == number:
                return window
            num_bytes = sum(int(part.records.sizes.sum()) for part in window.parts)
            del window  # frees it before the next one is read
            if not passed(num_bytes):
                raise NotWantedError
        return self._num_windows
