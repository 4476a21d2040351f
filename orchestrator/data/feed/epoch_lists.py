"""Lists the files of coming epochs in the background, while the feeder delivers the current ones."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError, OrchestratorError

# The error code of an exception in the feed that is none of ours; the text has its traceback.
UNEXPECTED = "feed.unexpected_exception"
Made = Callable[[str, int, OrchestratorError | None], Coroutine[Any, Any, None]]


class EpochLists:
    """Makes each list once, in a thread. Listing a hundred thousand files takes seconds, and the ranks
    continue meanwhile. For one event loop.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        # the event loop itself keeps only weak references
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    @property
    def making(self) -> bool:
        """Whether a list is being made."""
        return bool(self._tasks)

    def make(self, wanted: Iterable[tuple[str, int]], made: Made) -> None:
        """Starts making the lists of `wanted` (source, epoch) that are not being made yet.

        Awaits `made` for each, with its error or None. `made` must call `done`.
        """
        for source, epoch in wanted:
            if (source, epoch) not in self._tasks:
                self._tasks[source, epoch] = asyncio.create_task(self._make(source, epoch, made))

    def done(self, source: str, epoch: int) -> None:
        """Forgets a finished list. `made` calls it once its waiters are notified."""
        del self._tasks[source, epoch]

    async def _make(self, source: str, epoch: int, made: Made) -> None:
        wrong = None
        try:
            await asyncio.to_thread(self._spec.plan_of, source, epoch)
        except OrchestratorError as error:
            wrong = error
        except Exception as error:  # noqa: BLE001  reported to the ranks
            text = "".join(traceback.format_exception(error))
            text = f"the files of source {source} could not be listed for epoch {epoch}:\n{text}"
            wrong = FeedError(text, code=UNEXPECTED)
        await made(source, epoch, wrong)
