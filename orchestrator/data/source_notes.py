"""What is said of a source at the start: where its files make an exception, or fall short of a promise."""

from __future__ import annotations

from orchestrator.data.packing.arrangement import few_packs
from orchestrator.data.settings import StreamSettings
from orchestrator.data.sources.formats import Cut, format_of
from orchestrator.data.sources.fragments import (
    DECODED_RATIO,
    SourcePlan,
    decoded_bytes,
    num_window_shuffled,
)

__all__ = ["notes_of"]


def notes_of(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """Sentences, for the start and for `plan`; none for most sources."""
    return (*_window_notes(plan, settings), *_fill_notes(plan, settings))


def _window_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """The one exception to the flat cost of re-opening, where this source makes it (data rule 8)."""
    large = num_window_shuffled(plan, settings.window_bytes)
    if not large:
        return ()
    streamed = format_of(plan.manifest.format).cut is Cut.STREAM
    what = "are never cut," if streamed else "are compressed, or have row groups,"
    return (
        f"{large} of {len(plan.manifest.files)} files of source {plan.source} {what} in blocks that decode "
        f"to more than data.window_bytes={settings.window_bytes} (compressed files at {DECODED_RATIO} times "
        "their size, row groups with all their columns): they are shuffled within windows of that size only, "
        "of which one is held at a time, and a resume inside such a block decodes it up to there",
    )


def _fill_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """Where a window has too few documents to fill its packs (data rule 21), by the bytes of the files."""
    if settings.pack_mode != "bestfit":
        return ()
    typical = plan.num_blocks // 2
    parts = [part for fragment in plan.fragments(typical) for part in plan.parts(fragment)]
    in_block = sum(decoded_bytes(plan.manifest, part) for part in parts)
    return few_packs(plan.source, min(settings.window_bytes, in_block), settings.seq_len)
