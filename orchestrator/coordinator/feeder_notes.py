"""What the feeder noticed, brought into the journal: after each commit, and before an end is written.
The user hears of documents that were skipped.

It knows no feeder but a question to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.json_form import encode

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_notes import FeedNotes

NOTES_LIMIT_S = 5.0  # how long an end waits for a feeder that does not answer
NAMED = 3  # warnings that name a skipped document each, per attempt; of the others the number is given
NOT_SAID = (
    "the feeder did not say at the end what it had noticed since the last resume point: bad documents that "
    "were passed since then are counted in the cursor, but not named in the journal"
)


class SkippedDocuments:
    """What the user hears of the documents that one attempt skips: the first `NAMED` one by one, then their
    number, when there are more and whenever it has doubled, and at the end if it has changed since.
    """

    def __init__(self, run_uri: str, attempt: int) -> None:
        self._run_uri, self._attempt = run_uri, attempt
        self._number = self._told = 0

    def more(self, texts: Sequence[str]) -> list[str]:
        """These were skipped, too (place and reason); gives the lines for the user."""
        named = texts[: max(0, NAMED - self._number)]
        self._number += len(texts)
        lines = [f"a document was skipped: {text}" for text in named]
        return lines + (self.at_the_end() if self._number >= 2 * self._told else [])

    def at_the_end(self) -> list[str]:
        """Their number, if nobody has told it."""
        if self._number <= max(NAMED, self._told):
            return []
        self._told = self._number
        return [
            f"{self._number:,} documents were skipped in attempt {self._attempt} so far; the journal names "
            f'each (kind "bad document" in {self._run_uri}/journal/a{self._attempt:04d}), and `orchestrator '
            f"audit {self._run_uri}` counts those of the whole run"
        ]


class FeederNotes:
    """Takes the notes of one feeder, one question at a time, for it gives each note once. For one loop."""

    def __init__(
        self,
        ask: Callable[[int], Awaitable[FeedNotes | None]] | None,
        journal: JournalWriter,
        skipped: SkippedDocuments,
        warn: Callable[[str], Awaitable[None]],
    ) -> None:
        """`ask`: what was noticed up to so many consumed samples, None if nobody answers; without it there
        are no notes. `skipped` words what `warn` tells the user.
        """
        self._ask, self._journal, self._skipped, self._warn = ask, journal, skipped, warn
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
        """Waits until all up to here is journalled, and the user has heard how many documents were skipped;
        False if the feeder does not say it within `NOTES_LIMIT_S`.
        """
        self.soon(consumed_samples)
        if self._taking is None:
            return True
        await asyncio.wait({self._taking}, timeout=NOTES_LIMIT_S)
        for text in self._skipped.at_the_end():
            await self._warn(text)
        return self._taking.done() and self._taking.exception() is None and self._taking.result()

    async def _take(self, ask: Callable[[int], Awaitable[FeedNotes | None]]) -> bool:
        answered = True
        while self._due:
            self._due = False
            notes = await ask(self._up_to)
            answered = notes is not None
            if notes is None:
                continue
            for document in notes.bad_documents:
                text, source, (file, place, why) = document.text, document.source, document.parts
                self._journal.event(
                    EventKind.BAD_DOCUMENT, text=text, source=source, file=file, place=place, why=why
                )
            for text in notes.encoder_differences:
                self._journal.event(EventKind.ENCODERS_DIFFER, text=text)
            for cursor in notes.cursors:
                self._journal.event(EventKind.CURSOR, cursor=encode(cursor))
            for text in self._skipped.more([document.text for document in notes.bad_documents]):
                await self._warn(text)
        return answered
