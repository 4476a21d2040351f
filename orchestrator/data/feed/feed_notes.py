"""What the feeder reports: counts for people and tests, notes for the journal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.records.cursor import Cursor

CURSOR_TOKENS = 1 << 28
# matches the text of `OrderedWindow.place` and of a record's reader
_PARTS = re.compile(
    r"(?P<file>.*?): (?P<place>byte \d+, line (?:\d+|not counted)|row \d+): (?P<why>.*)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeederStats:
    """What the feeder holds, and what it did since its process started.

    `waits` and `wait_s` count the calls of `get` whose samples were not ready. Slots count from the start of
    the pipeline. `opens` counts the openings. `bytes_passed` were decoded on the way to cursors.
    `pipeline_threads` counts threads that are alive: two while the pipeline runs (ours and Ray Data's).
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
    """A skipped document. `text` is a message with the place (file; byte and line, or row) and the reason."""

    source: str
    text: str

    @property
    def parts(self) -> tuple[str, str, str]:
        """The file, the place in it, and the reason."""
        parts = _PARTS.fullmatch(self.text)
        return (parts["file"], parts["place"], parts["why"]) if parts else ("", "", self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedNotes:
    """Notes for the journal.

    They hold the bad documents that were skipped, the documents that the two encoder libraries encoded
    differently, and a cursor about every `CURSOR_TOKENS`, where an audit can begin.
    """

    bad_documents: tuple[BadDocument, ...]
    encoder_differences: tuple[str, ...]
    cursors: tuple[Cursor, ...]


class FeedLog:
    """Collects notes until they are requested. Returns each once, even if steps are drawn again."""

    def __init__(self) -> None:
        self._given_to = 0  # samples
        # by the last sample of a step: the bad documents in the step, and its cursor
        self._bad: dict[tuple[int, BadDocument], None] = {}
        self._cursors: dict[int, Cursor] = {}
        self._differences: dict[str, None] = {}

    def add(self, samples: StepSamples) -> None:
        """Adds the notes of a drawn step. The step may have been drawn before."""
        end = samples.cursor.consumed_samples
        if end <= self._given_to:
            return
        documents = (BadDocument(source=source, text=text) for source, text in samples.bad_reasons)
        self._bad.update({(end, document): None for document in documents})
        tokens = samples.cursor.consumed_tokens
        if (tokens - samples.step.num_tokens) // CURSOR_TOKENS < tokens // CURSOR_TOKENS:
            self._cursors[end] = samples.cursor

    def differences(self, texts: tuple[str, ...]) -> None:
        """Adds the encoder differences of a chunk."""
        self._differences.update(dict.fromkeys(texts))

    def give(self, consumed_samples: int) -> FeedNotes:
        """Returns the notes of steps up to `consumed_samples`, and all encoder differences known so far."""
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
