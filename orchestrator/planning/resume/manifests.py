"""Determines which frozen list of a source's files each epoch reads, and the numbers of sources.

This covers any sequence of resumes that add or remove sources, restart them, or refresh their lists (data
rules 23 and 24). A list is named by a version, under which `data.frozen` stores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.records.cursor import Cursor, SourceCursor

FIRST = ""
# The fields of a place that are counts, which do not restart with their source.
_COUNTED = ("documents", "special_texts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSpan:
    """The lists of a source from epoch `begin` on, until its next span begins.

    `start` is the start of the source that they belong to: 0 for the run's or the source's first one, else
    one that a `restart` made. The list is that of the start, or the one that was refreshed for epoch
    `refreshed`. With `refresh` every later epoch has its own list.
    """

    begin: int
    start: int = 0
    refreshed: int | None = None
    refresh: bool = False

    def version(self, epoch: int) -> str:
        """Returns the version of the list that an epoch of this span reads."""
        refreshed = epoch if self.refresh and epoch > self.begin else self.refreshed
        if refreshed is None:
            return str(self.start) if self.start else FIRST
        return f"{self.start}e{refreshed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLists:
    """One source of a lineage.

    `number` is in the digests of its samples and never changes. `active`: the job reads it. A source that is
    removed stays here, and so does its place in the cursor; if it is added again, it continues from there.
    `loss` defines what is learnt of it (empty: of texts, all; also in claims of older versions), and never
    changes.
    """

    name: str
    number: int
    spans: tuple[ListSpan, ...]
    active: bool = True
    loss: str = ""

    def span(self, epoch: int) -> ListSpan:
        """Returns the span of an epoch."""
        return next((span for span in reversed(self.spans) if span.begin <= epoch), self.spans[0])

    def version(self, epoch: int) -> str:
        """Returns the version of the list that an epoch reads; empty: the one of the source's first start.

        A refreshed list is made once, by the first attempt that reaches its epoch, and written before it is
        read. Later attempts read that list.
        """
        return self.span(epoch).version(epoch)

    @property
    def began(self) -> int:
        """The first epoch of its newest start. Limits of epochs count from here."""
        return next(span.begin for span in self.spans if span.start == self.spans[-1].start)

    @property
    def begun_with(self) -> str:
        """The list of its newest start."""
        return ListSpan(begin=0, start=self.spans[-1].start).version(0)

    def epochs_before(self, epoch: int) -> int:
        """Returns how many epochs of its start precede this one."""
        start = self.span(epoch).start
        return epoch - next(span.begin for span in self.spans if span.start == start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The sources that a job requests, in the order of the configuration.

    `restart`: those that begin at the start of a new list (`resume.data: restart` is all of them). `refresh`:
    those with `refresh: epoch`. `loss` defines what is learnt of those that are not plain texts.
    """

    names: tuple[str, ...]
    restart: frozenset[str] = frozenset()
    refresh: frozenset[str] = frozenset()
    loss: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The lists that a job reads, and its place in them: `cursor` refers to lists of `sources`."""

    sources: tuple[SourceLists, ...]
    cursor: Cursor = Cursor()

    def epoch(self, source: str) -> int:
        """Returns the current epoch."""
        at = self.cursor.sources.get(source)
        return 0 if at is None else at.epoch


def order_of(version: str) -> tuple[int, int]:
    """Returns (start, the epoch that it was refreshed for, or -1) of a list. Later lists are greater."""
    start, is_refreshed, epoch = version.partition("e")
    return int(start or 0), int(epoch) if is_refreshed else -1


def start_of(version: str) -> int:
    """Returns the start that a list belongs to."""
    return order_of(version)[0]


def first_sources(wanted: Wanted) -> tuple[SourceLists, ...]:
    """Returns the sources of a run's first start, also for a run from before its claims named any."""
    return next_sources((), Cursor(), replace(wanted, restart=frozenset()), {})


def next_sources(
    parent: tuple[SourceLists, ...], cursor: Cursor, wanted: Wanted, free: Mapping[str, int]
) -> tuple[SourceLists, ...]:
    """Returns the sources of a job that continues at `cursor`, which was made under `parent`'s.

    Lists that the parent would have read after the cursor's epoch and that the job does not request are never
    read. An epoch that has begun is read to its end by its own list. If its source is restarted, it continues
    at the next epoch's first document instead (`moved`), because places must not occur twice. `free` has per
    source the least number above all starts of lists in storage (missing: 1), so that a list that a rewind
    left behind is not taken for a new one.
    """
    assert wanted.restart | wanted.refresh <= set(wanted.names), f"unknown sources in {wanted}"
    old = {source.name: source for source in parent}
    number = max((source.number for source in parent), default=-1) + 1
    kept = [
        replace(s, active=s.name in wanted.names, loss=s.loss or wanted.loss.get(s.name, "")) for s in parent
    ]
    for name in wanted.names:
        if name not in old:
            start = free.get(name, 0)  # 0: there is no list of this name, not even on another lineage
            span = ListSpan(begin=0, start=start, refresh=name in wanted.refresh)
            kept.append(SourceLists(name=name, number=number, spans=(span,), loss=wanted.loss.get(name, "")))
            number += 1
    return tuple(
        _continued(source, cursor.sources.get(source.name), wanted, free)
        if source.name in old and source.active
        else source
        for source in kept
    )


def _continued(
    source: SourceLists, at: SourceCursor | None, wanted: Wanted, free: Mapping[str, int]
) -> SourceLists:
    refresh = source.name in wanted.refresh
    spans = source.spans[:1] if at is None else tuple(s for s in source.spans if s.begin <= at.epoch)
    last = spans[-1]
    if source.name in wanted.restart:
        anew = ListSpan(
            begin=0 if at is None else at.epoch + 1, start=free.get(source.name, 1), refresh=refresh
        )
        return replace(source, spans=(anew,) if at is None else (*spans, anew))
    if refresh == last.refresh:
        return replace(source, spans=spans)
    if at is None:  # nothing of it was read
        return replace(source, spans=(replace(last, refresh=refresh),))
    begin = at.epoch + 1
    # Its first token may have been a target already, so the epoch that has begun keeps its list.
    read = last.refreshed if not last.refresh or at.epoch == last.begin else at.epoch
    then = ListSpan(begin=begin, start=last.start, refreshed=begin if refresh else read, refresh=refresh)
    return replace(source, spans=(*spans, then))


def moved(sources: tuple[SourceLists, ...], cursor: Cursor) -> Cursor:
    """Returns the cursor with restarted sources at the first document of their new list; counts stay.

    Moving it again has no effect.
    """
    places = dict(cursor.sources)
    for source in sources:
        at = places.get(source.name)
        newest = source.spans[-1]
        if at is not None and source.span(at.epoch).start != newest.start:
            begin = next(span.begin for span in source.spans if span.start == newest.start)
            counts = {name: getattr(at, name) for name in SourceCursor.__slots__ if name.endswith(_COUNTED)}
            places[source.name] = SourceCursor(epoch=begin, **counts)
    return replace(cursor, sources=places)
