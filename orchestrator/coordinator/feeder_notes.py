"""What the feeder noticed, brought into the journal: after each commit, and before an end is written.

It knows no feeder but a question to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.records import encode

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_notes import FeedNotes

NOTES_LIMIT_S = 5.0  # how long an end waits for a feeder that does not answer
NOT_SAID = (
    "the feeder did not say at the end what it had noticed since the last resume point: bad documents that "
    "were passed since then are counted in the cursor, but not named in the journal"
)


class FeederNotes:
    """Takes the notes of one feeder, one question at a time, for it gives each note once. For one loop."""

    def __init__(
        self, ask: Callable[[int], Awaitable[FeedNotes | None]] | None, journal: JournalWriter
    ) -> None:
        """`ask`: what was noticed up to so many consumed samples, None if nobody answers; without it there
        are no notes.
        """
        self._ask, self._journal = ask, journal
        self._up_to, self._due = 0, False
        self._taking: asyncio.Task[bool] | None = None

    def soon(self, consumed_samples: int) -> None:
        """Steps up to here will not be trained again: what they passed is journalled soon. Never waits."""
        if self._ask is None:
            return
        self._up_to, self._due = max(self._up_to, consumed_samples), True
        if self._taking is None or self._taking.done():
            self._taking = asyncio.get_running_loop().create_task(self._take(self._ask))

    async def last(self, consumed_samples: int) -> bool:
        """Waits until all up to here is journalled; False if the feeder does not say it within
        `NOTES_LIMIT_S`.
        """
        self.soon(consumed_samples)
        if self._taking is None:
            return True
        await asyncio.wait({self._taking}, timeout=NOTES_LIMIT_S)
        return self._taking.done() and self._taking.exception() is None and self._taking.result()

    async def _take(self, ask: Callable[[int], Awaitable[FeedNotes | None]]) -> bool:
        answered = True
        while self._due:
            self._due = False
            notes = await ask(self._up_to)
            answered = notes is not None
            if notes is None:
                continue
            for text in notes.bad_documents:
                self._journal.event(EventKind.BAD_DOCUMENT, text=text)
            for text in notes.encoder_differences:
                self._journal.event(EventKind.ENCODERS_DIFFER, text=text)
            for cursor in notes.cursors:
                self._journal.event(EventKind.CURSOR, cursor=encode(cursor))
        return answered
