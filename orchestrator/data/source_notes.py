"""Notes about a source for the user at the start: exceptions and broken promises of its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.packing.bin_packing import few_packs
from orchestrator.data.sources.lists.file_parts import Cut
from orchestrator.data.sources.lists.fragments import (
    DECODED_RATIO,
    SourcePlan,
    decoded_bytes,
    num_window_shuffled,
)
from orchestrator.planning.resume.source_lists import restart_text

__all__ = ["notes_of", "shared_files"]


def notes_of(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """The notes for the start and for `plan`. Most sources have none."""
    return (
        *_index_notes(plan),
        *_window_notes(plan, settings),
        *_fill_notes(plan, settings),
        *_chat_notes(plan),
    )


def shared_files(plans: Sequence[SourcePlan]) -> tuple[str, ...]:
    """Reports files that several sources share.

    Each source reads and trains them by itself, so one may train what another holds out. Files are compared
    by path; a link with another name is not resolved.
    """
    notes = []
    for one, other in combinations(plans, 2):
        bases = sorted(os.path.join(plan.manifest.base, "") for plan in (one, other))
        if not bases[1].startswith(bases[0]):
            continue
        few, many = sorted((one.manifest, other.manifest), key=lambda manifest: len(manifest.files))
        paths = {few.path(file) for file in range(len(few.files))}
        found = [path for file in range(len(many.files)) if (path := many.path(file)) in paths]
        if found:
            notes.append(
                f"warning: sources {one.source} and {other.source} have {len(found)} of their files in "
                f"common, e.g. {found[0]}: each trains all of its own, so these documents are trained by "
                "both, also those that one of them holds out"
            )
    return tuple(notes)


def _index_notes(plan: SourcePlan) -> tuple[str, ...]:
    """Notes on an index beside the files whose counts may be wrong."""
    form, manifest = plan.manifest.form, plan.manifest
    if not form.has_index:
        return ()
    num_rows = sum(sum(row.group_rows) for row in manifest.files)
    return form.index_notes(plan.source, manifest.base, num_rows)


def _window_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """Notes on files that break the constant cost of re-opening (data rule 8)."""
    large = num_window_shuffled(plan, settings.window_bytes)
    if not large:
        return ()
    streamed = plan.manifest.cut is Cut.STREAM
    what = "are never cut," if streamed else "are compressed, or have row groups,"
    return (
        f"{large} of {len(plan.manifest.files)} files of source {plan.source} {what} in blocks that decode "
        f"to more than data.window_bytes={settings.window_bytes} (compressed files at {DECODED_RATIO} times "
        "their size, row groups with all their columns): they are shuffled within windows of that size only, "
        "of which one is held at a time, and a resume inside such a block decodes it up to there",
    )


def _fill_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """Notes on windows with too few documents to fill their packs (data rule 21), estimated from file
    sizes.
    """
    if settings.pack_mode != "bestfit":
        return ()
    typical = plan.num_blocks // 2
    parts = [part for fragment in plan.fragments(typical) for part in plan.parts(fragment)]
    in_block = sum(decoded_bytes(plan.manifest, part) for part in parts)
    return few_packs(plan.source, min(settings.window_bytes, in_block), settings.seq_len)


def _chat_notes(plan: SourcePlan) -> tuple[str, ...]:
    """Notes on chats that are read by the rules of an earlier version, so that the run keeps its stream."""
    if not plan.manifest.content.as_stored:
        return ()
    return (
        f"source {plan.source} keeps the chats of a list that an earlier version froze: values such as tools "
        "are rendered as they are stored, also as JSON text, and weights of messages mean nothing; "
        f"{restart_text(plan.source)} to read them by today's rules",
    )
