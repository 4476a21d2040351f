"""Lists of the files of epochs that come next, made while the feeder goes on with what is there.

It knows neither slots nor ranks.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError, OrchestratorError

Made = Callable[[str, int, OrchestratorError | None], Coroutine[Any, Any, None]]


class EpochLists:
    """Each list is made once, in a thread: of a hundred thousand files one takes seconds, and the ranks go on
    meanwhile. For one event loop.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        # kept here: the loop itself does not keep them
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    @property
    def making(self) -> bool:
        """Whether one is being made."""
        return bool(self._tasks)

    def make(self, wanted: Iterable[tuple[str, int]], made: Made) -> None:
        """Begins those of `wanted` (source, epoch) that are not being made; `made` hears of each, with what
        went wrong if anything did, and says that it is `done`.
        """
        for source, epoch in wanted:
            if (source, epoch) not in self._tasks:
                self._tasks[source, epoch] = asyncio.create_task(self._make(source, epoch, made))

    def done(self, source: str, epoch: int) -> None:
        """Whoever waited has heard of it."""
        del self._tasks[source, epoch]

    async def _make(self, source: str, epoch: int, made: Made) -> None:
        wrong = None
        try:
            await asyncio.to_thread(self._spec.plan_of, source, epoch)
        except OrchestratorError as error:
            wrong = error
        except Exception as error:  # noqa: BLE001  the ranks must hear of it
            text = "".join(traceback.format_exception(error))
            wrong = FeedError(f"the files of source {source} could not be listed for epoch {epoch}:\n{text}")
        await made(source, epoch, wrong)
