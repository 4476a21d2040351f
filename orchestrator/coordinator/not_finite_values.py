"""Reports metrics and losses that are not finite, which the journal has as null."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from orchestrator.config.sections import BUILT_IN
from orchestrator.history import sentences
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.steps import StateKey

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
