"""Reports metrics and losses that are not finite, which the journal has as null."""

from __future__ import annotations

from collections.abc import Callable, Collection

from orchestrator.history import sentences
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.steps import StateKey


class NotFiniteValues:
    """Reports each value once in a generation: as an event of the journal, and by `warn(text)`."""

    def __init__(self, journal: JournalWriter, warn: Callable[[str], None]) -> None:
        self._journal, self._warn = journal, warn
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
        text = sentences.not_finite(new, key.step, part)
        self._warn(f"{text}; that is reported once in each generation")
