"""Recomputes for an audit which list of a source's files each epoch read.

It compares each claim with the one before (data rules 23 and 24). It shares no code with
`planning.resume.source_lists`, which decides it, so that a fault there cannot hide here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.planning.resume.source_lists import SourceLists
from orchestrator.records.cursor import SourceCursor


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedLists:
    """What the claim of an attempt says: its sources, and those of which it says that they were to begin
    anew. `launch` is the claim's.
    """

    attempt: int
    launch: str
    sources: tuple[SourceLists, ...]
    restarted: frozenset[str]

    def of(self, name: str) -> SourceLists | None:
        """The lists of one source."""
        return next((source for source in self.sources if source.name == name), None)

    @property
    def active(self) -> list[str]:
        """The sources that the attempt reads."""
        return [source.name for source in self.sources if source.active]


def began(source: SourceLists) -> int:
    """The first epoch of a source's newest start."""
    start = source.spans[-1].start
    return min(span.begin for span in source.spans if span.start == start)


def begins_anew(source: SourceLists, at: SourceCursor) -> int | None:
    """The epoch with which a source in a list of an earlier start continues; None: it is in no such list."""
    start = next((span.start for span in source.spans[::-1] if span.begin <= at.epoch), source.spans[0].start)
    return None if start == source.spans[-1].start else began(source)


def _list_of(source: SourceLists, epoch: int) -> tuple[int, int | None]:
    """(start, epoch for which it was refreshed) of the list that an epoch reads."""
    span = max((span for span in source.spans if span.begin <= epoch), key=lambda span: span.begin)
    return span.start, epoch if span.refresh and epoch > span.begin else span.refreshed


def lists_fault(before: ClaimedLists, now: ClaimedLists, at: Mapping[str, SourceCursor]) -> str | None:
    """Why the lists of an attempt cannot follow those of the attempt before it on the history, which left the
    sources `at` these places; None if they can.
    """
    numbers = [source.number for source in now.sources]
    if len(set(numbers)) < len(numbers):
        return f"attempt {now.attempt} has two sources of one number: {sorted(numbers)}"
    for old in before.sources:
        new = now.of(old.name)
        if new is None or new.number != old.number:
            found = "none" if new is None else str(new.number)
            return (
                f"source {old.name} had number {old.number} in attempt {before.attempt} and has {found} in "
                f"attempt {now.attempt}: a source's number never changes, for digests hold it"
            )
        place = at.get(old.name, SourceCursor())
        if place == SourceCursor():
            continue  # nothing of it was trained
        for epoch in range(place.epoch + 1):
            was, is_now = _list_of(old, epoch), _list_of(new, epoch)
            if was != is_now:
                return (
                    f"epoch {epoch} of source {old.name} read list {was} (start, refreshed for) in attempt "
                    f"{before.attempt}, attempt {now.attempt} says {is_now}: an epoch that has begun keeps "
                    "its list"
                )
        if new.spans[-1].start == old.spans[-1].start:
            continue
        if before.launch == now.launch:
            return (
                f"source {old.name} begins anew in attempt {now.attempt}, which is of the same launch as "
                f"attempt {before.attempt}: a launch restarts once"
            )
        if old.name not in now.restarted:
            return f"source {old.name} begins anew in attempt {now.attempt}, whose claim asks for no restart"
        if began(new) <= place.epoch:
            return (
                f"source {old.name} begins anew in attempt {now.attempt} with epoch {began(new)}, and stands "
                f"in epoch {place.epoch} already"
            )
    return None
