"""Draws steps and samples from a stream in one process, reading chunks on demand, and skips samples.

The public stream and the feed of a process without Ray use this loop of draw, feed and finish. The Feeder's
chunks arrive by themselves, so `feed.stream_session` has its own loop. See `planning.resume.skipping` for
skipped samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.data.packing.stream import Stream
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import Int32Array, TokenChunk

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec

__all__ = ["Sample", "draw_samples", "draw_step", "open_samples"]

# Samples are drawn in batches of about this many tokens, if the chunks hold them, which makes the cost of a
# draw negligible.
_RUN_TOKENS = 1 << 18


def draw_step(
    stream: Stream,
    step: StepRange,
    next_chunk: Callable[[str], TokenChunk | None],
    whole: bool = True,
    with_cursors: bool = False,
) -> StepSamples:
    """`Stream.draw`, fed by `next_chunk(source)` while data are missing. None ends a source."""
    while (samples := stream.draw(step, whole, with_cursors)) is None:
        for source in stream.needs:
            chunk = next_chunk(source)
            if chunk is None:
                stream.finish(source)
            else:
                stream.feed(chunk)
    return samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample of the canonical stream. Arrays are int32 of shape (seq_len,).

    Of `content: preference` they have the shape (2, seq_len): the chosen answer, and the rejected one.
    Label -100: no loss. Document id -1: padding.
    """

    index: int
    source: str
    input_ids: Int32Array
    labels: Int32Array
    document_ids: Int32Array
    _step: StepSamples = field(repr=False)
    _number: int = field(repr=False)

    @property
    def cursor(self) -> Cursor:
        """The place after it: a stream opened there continues with the next sample. Computed on demand."""
        return self._step.cursor_after(self._number + 1)


def open_samples(spec: DataSpec, cursor: Cursor, seq_len: int) -> Iterator[Sample]:
    """The samples from `cursor` to the end of the data, in this process. The last may be shortened.

    Raises `DataIdentityError` if the files or the tokenizer are not those of the cursor, `DataError` for data
    that cannot be read.
    """
    encoders = spec.build_encoders()
    chunks = {plan.source: spec.chunks(cursor, plan.source, encoders) for plan in spec.plans}
    return draw_samples(spec.stream(cursor, seq_len), lambda source: next(chunks[source], None), seq_len)


def draw_samples(
    stream: Stream, next_chunk: Callable[[str], TokenChunk | None], seq_len: int
) -> Iterator[Sample]:
    """The samples of a stream from its current place, fed as in `draw_step`."""
    num_samples, names = max(1, _RUN_TOKENS // seq_len), stream.names
    while True:
        step = StepRange(
            first_sample=stream.cursor.consumed_samples,
            num_samples=num_samples,
            num_tokens=num_samples * seq_len,
            seq_len=seq_len,
        )
        drawn = draw_step(stream, step, next_chunk, False, with_cursors=True)
        if not drawn.step.num_samples:
            return
        first = drawn.first_index
        numbers, input_ids, labels, document_ids = drawn.arrays(0, drawn.step.num_samples)
        if drawn.rows_per_sample > 1:
            shape = (len(numbers), drawn.rows_per_sample, -1)
            input_ids, labels, document_ids = (
                each.reshape(shape) for each in (input_ids, labels, document_ids)
            )
        rows = zip(numbers.tolist(), input_ids, labels, document_ids, strict=True)
        for number, (source, ids, targets, documents) in enumerate(rows):
            yield Sample(
                index=first + number,
                source=names[source],
                input_ids=ids,
                labels=targets,
                document_ids=documents,
                _step=drawn,
                _number=number,
            )
        if drawn.end_of_data:
            return


# -------------------------------------------------------------------------------------------- skipped samples
# Samples are drawn in batches of about this many tokens. About one chunk of each source is held.


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """The drawn samples and positions, and the cursor after them. `ends`: nothing follows."""

    samples: int
    tokens: int
    cursor: Cursor
    ends: bool


def draw_past(spec: DataSpec, cursor: Cursor, num_samples: int, seq_len: int) -> Passed:
    """Draws `num_samples` from `cursor` on, or as many as the data still have, in this process.

    Their text is tokenized once. The counts of trained samples and tokens stay; those of skipped ones
    increase. Raises as `open_samples`.
    """
    stream, encoders = spec.stream(cursor, seq_len), spec.build_encoders()
    chunks = {plan.source: spec.chunks(cursor, plan.source, encoders) for plan in spec.plans}
    at_once, ends = max(1, _RUN_TOKENS // seq_len), False
    samples = 0
    while samples < num_samples and not ends:
        num = min(at_once, num_samples - samples)
        step = StepRange(
            first_sample=stream.cursor.consumed_samples,
            num_samples=num,
            num_tokens=num * seq_len,
            seq_len=seq_len,
        )
        drawn = draw_step(stream, step, lambda source: next(chunks[source], None))
        samples += drawn.step.num_samples
        ends = drawn.end_of_data
    tokens = stream.cursor.consumed_tokens - cursor.consumed_tokens
    return Passed(
        samples=samples,
        tokens=tokens,
        cursor=replace(
            stream.cursor,
            consumed_samples=cursor.consumed_samples,
            consumed_tokens=cursor.consumed_tokens,
            target_tokens=cursor.target_tokens,
            skipped_samples=cursor.skipped_samples + samples,
            skipped_tokens=cursor.skipped_tokens + tokens,
        ),
        ends=ends,
    )
