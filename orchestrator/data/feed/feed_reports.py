"""What the parts of the feed report: counts, notes for the journal, and the tokenizers' progress.

Decoding what lies before a cursor in a large compressed file may yield no chunk for an hour, and is still
progress.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
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


# --------------------------------------------------------------------------------------------------- progress
# A tokenizer reports at most once in this many seconds, far below any stall limit.
REPORT_EVERY_S = 1.0


class SignsOfWork:
    """The feeder's side: the time of the tokenizers' last progress, and the bytes that they skipped."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now = limit_s, now
        self._last = now()
        self.bytes_passed = 0

    def note(self, bytes_passed: int = 0) -> None:
        """A tokenizer made progress now. It decoded `bytes_passed` bytes before its cursor."""
        self._last = self._now()
        self.bytes_passed += bytes_passed

    def left_s(self, since: float) -> float:
        """Seconds that a wait begun at `since` (of the same clock) may last without another report.

        The limit counts from the last report. 0 or less: the pipeline has stalled.
        """
        return max(since, self._last) + self._limit_s - self._now()


class WorkReports:
    """The tokenizer's side: called with the bytes of each window that it decodes and skips.

    Reports their sum, the first time at once and then at most once in `every_s`.
    """

    def __init__(
        self,
        report: Callable[[int], bool],
        every_s: float = REPORT_EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` returns whether the work is still wanted."""
        self._report, self._every_s, self._now = report, every_s, now
        self._bytes = 0
        self._reported_at: float | None = None

    def __call__(self, num_bytes: int) -> bool:
        """Returns False if the work is no longer wanted."""
        self._bytes += num_bytes
        now = self._now()
        if self._reported_at is not None and now - self._reported_at < self._every_s:
            return True
        self._reported_at, passed, self._bytes = now, self._bytes, 0
        return self._report(passed)
