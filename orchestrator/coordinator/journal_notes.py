"""Notes that the coordinator writes to the journal and reports to the user: skipped documents, and values
that are not finite.

The feeder's notes are transferred after each commit, and before an end is written. The journal has null for a
metric or loss that is not finite.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config.sections import BUILT_IN
from orchestrator.history import sentences
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.records.steps import StateKey

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_reports import FeedNotes

NOTES_LIMIT_S = 5.0  # how long an end waits for a feeder that does not answer
NAMED = 3  # warnings per attempt that name a skipped document; of the others only the number is reported
NOT_SAID = (
    "the feeder did not say at the end what it had noticed since the last resume point: bad documents that "
    "were passed since then are counted in the cursor, but not named in the journal"
)


class SkippedDocuments:
    """The messages to the user about the documents that one attempt skips.

    The first `NAMED` documents are named one by one. After that their number is reported: when there are
    more, whenever it has doubled, and at the end if it has changed since.
    """

    def __init__(self, run_uri: str, attempt: int) -> None:
        self._run_uri, self._attempt = run_uri, attempt
        self._number = self._told = 0

    def more(self, texts: Sequence[str]) -> list[str]:
        """Records more skipped documents (place and reason); returns the lines for the user."""
        named = texts[: max(0, NAMED - self._number)]
        self._number += len(texts)
        lines = [f"a document was skipped: {text}" for text in named]
        return lines + (self.at_the_end() if self._number >= 2 * self._told else [])

    def at_the_end(self) -> list[str]:
        """Returns a line with their number, unless it was already reported."""
        if self._number <= max(NAMED, self._told):
            return []
        self._told = self._number
        return [
            f"{self._number:,} documents were skipped in attempt {self._attempt} so far; the journal names "
            f'each (kind "bad document" in {self._run_uri}/journal/a{self._attempt:04d}), and `orchestrator '
            f"audit {self._run_uri}` counts those of the whole run"
        ]


class FeederNotes:
    """Fetches the notes of one feeder, one call at a time, because it returns each note once.

    For use on one event loop.
    """

    def __init__(
        self,
        ask: Callable[[int], Awaitable[FeedNotes | None]] | None,
        journal: JournalWriter,
        skipped: SkippedDocuments,
        warn: Callable[[str], Awaitable[None]],
    ) -> None:
        """`ask` returns what was noticed up to a number of consumed samples, or None without an answer.

        Without `ask` there are no notes. `skipped` formulates the text that `warn` sends to the user.
        """
        self._ask, self._journal, self._skipped, self._warn = ask, journal, skipped, warn
        self._up_to, self._due = 0, False
        self._taking: asyncio.Task[bool] | None = None

    def soon(self, consumed_samples: int) -> None:
        """Requests the notes of steps up to here, which will not be trained again. Never waits."""
        if self._ask is None:
            return
        self._up_to, self._due = max(self._up_to, consumed_samples), True
        if self._taking is None or self._taking.done():
            self._taking = asyncio.get_running_loop().create_task(self._take(self._ask))

    async def last(self, consumed_samples: int) -> bool:
        """Waits until all notes up to here are journalled, and skipped documents are reported.

        Returns False if the feeder does not answer within `NOTES_LIMIT_S`.
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


# --------------------------------------------------------------------------------- values that are not finite
_FIELD = "train.objective"


class NotFiniteValues:
    """Reports each value once in a generation: as an event of the journal, and by `warn(text)`."""

    def __init__(self, journal: JournalWriter, warn: Callable[[str], None], objective: str = "") -> None:
        """`objective`: as in `sentences.not_finite`."""
        self._journal, self._warn, self._objective = journal, warn, objective
        self._reported: set[tuple[str, str]] = set()  # part and name, in the newest generation
        self._generation = (0, 0)

    def take(self, key: StateKey, names: Collection[str], part: str = "") -> None:
        """These values are not finite in the step `key`, or in the evaluation of `part` after it.

        Repeated calls change nothing.
        """
        generation = key.attempt, key.generation
        if generation != self._generation:
            self._generation, self._reported = generation, set()
        new = [name for name in names if (part, name) not in self._reported]
        if not new:
            return
        self._reported |= {(part, name) for name in new}
        self._journal.event(
            EventKind.NOT_FINITE, generation=key.generation, step=key.step, part=part, names=new
        )
        text = sentences.not_finite(new, key.step, part, self._objective)
        self._warn(f"{text}. This is reported once in each generation")


def of_objective(flat_config: Mapping[str, Any]) -> str:
    """Returns the objective of a flat configuration, for messages; empty for the built-in one."""
    path = flat_config.get(_FIELD, BUILT_IN)
    return "" if path == BUILT_IN else f"{_FIELD}={path}"
