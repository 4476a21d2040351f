"""What the feeder reports of itself and of the data: counts for people and tests, notes for the journal.

It knows no pipeline and no call; the feeder writes into it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.records.cursor import Cursor

CURSOR_TOKENS = 1 << 28
# of what `OrderedWindow.place` and the reader of a record say
_PARTS = re.compile(
    r"(?P<file>.*?): (?P<place>byte \d+, line (?:\d+|not counted)|row \d+): (?P<why>.*)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederStats:
    """What the feeder holds, and what it did since its process started.

    `waits` and `wait_s` are of the calls of `get` that found their samples missing. Slots count from the
    start of the pipeline on; `opens` counts the openings; `bytes_passed` were decoded on the way to cursors;
    `pipeline_threads` are alive: two while the pipeline runs (ours and Ray Data's).
    """

    pid: int
    generation: tuple[int, int]
    opens: int
    steps_held: int
    bytes_held: int
    first_sample_held: int
    next_sample: int
    buffered_tokens: int
    slots_taken: int
    slots_given: int
    bytes_passed: int
    waits: int
    wait_s: float
    pipeline_threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadDocument:
    """A document that was skipped. `text` says where (file; byte and line, or row) and why, for people."""

    source: str
    text: str

    @property
    def parts(self) -> tuple[str, str, str]:
        """The file, the place in it, and why."""
        parts = _PARTS.fullmatch(self.text)
        return (parts["file"], parts["place"], parts["why"]) if parts else ("", "", self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedNotes:
    """For the journal: bad documents that were passed, documents that the two encoder
    libraries encoded differently, and a cursor about every `CURSOR_TOKENS`, where an audit can begin.
    """

    bad_documents: tuple[BadDocument, ...]
    encoder_differences: tuple[str, ...]
    cursors: tuple[Cursor, ...]


class FeedLog:
    """Collects notes until they are asked for, and gives each once, also where steps are drawn again."""

    def __init__(self) -> None:
        self._given_to = 0  # samples
        # by the sample at which a step ends: bad documents that it passed, its cursor
        self._bad: dict[tuple[int, BadDocument], None] = {}
        self._cursors: dict[int, Cursor] = {}
        self._differences: dict[str, None] = {}

    def add(self, samples: StepSamples) -> None:
        """The samples of a step, perhaps not for the first time."""
        end = samples.cursor.consumed_samples
        if end <= self._given_to:
            return
        documents = (BadDocument(source=source, text=text) for source, text in samples.bad_reasons)
        self._bad.update({(end, document): None for document in documents})
        tokens = samples.cursor.consumed_tokens
        if (tokens - samples.step.num_tokens) // CURSOR_TOKENS < tokens // CURSOR_TOKENS:
            self._cursors[end] = samples.cursor

    def differences(self, texts: tuple[str, ...]) -> None:
        """A chunk was taken."""
        self._differences.update(dict.fromkeys(texts))

    def give(self, consumed_samples: int) -> FeedNotes:
        """What the steps up to `consumed_samples` passed; differences as soon as they are known."""
        bad = [note for note in self._bad if note[0] <= consumed_samples]
        for note in bad:
            del self._bad[note]
        passed = [end for end in self._cursors if end <= consumed_samples]
        cursors = tuple(self._cursors.pop(end) for end in passed)
        differences, self._differences = tuple(self._differences), {}
        self._given_to = max(self._given_to, consumed_samples)
        return FeedNotes(
            bad_documents=tuple(document for _, document in bad),
            encoder_differences=differences,
            cursors=cursors,
        )
