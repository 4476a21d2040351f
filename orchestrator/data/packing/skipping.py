"""Draws samples that are not trained, and returns the stream's cursor after them. See
`planning.resume.skipping`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.data.packing.samples import draw_step
from orchestrator.records.batches import StepRange
from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec

# Samples are drawn in batches of about this many tokens. About one chunk of each source is held.
_RUN_TOKENS = 1 << 18


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
