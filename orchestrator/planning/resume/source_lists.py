"""Determines which frozen list of a source's files each epoch reads, the numbers of sources, and restarts.

This covers any sequence of resumes that add or remove sources, restart them (`resume.data: restart`,
`resume.restart_sources`), or refresh their lists (data rules 23 and 24). A list is named by a version, under
which `data.frozen` stores it. A restart belongs to the claim, as a skip does, so that everything that
continues, reads or verifies the history uses the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.errors import Refusal
from orchestrator.planning.resume.skipping import LATEST, OTHER_POINT
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StateKey

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig


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
class SourceRequest:
    """The sources that a job requests, in the order of the configuration.

    `restart`: those that begin at the start of a new list (`resume.data: restart` is all of them). `refresh`:
    those with `refresh: epoch`. `loss` defines what is learnt of those that are not plain texts.
    """

    names: tuple[str, ...]
    restart: frozenset[str] = frozenset()
    refresh: frozenset[str] = frozenset()
    loss: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReading:
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


def first_sources(wanted: SourceRequest) -> tuple[SourceLists, ...]:
    """Returns the sources of a run's first start, also for a run from before its claims named any."""
    return next_sources((), Cursor(), replace(wanted, restart=frozenset()), {})


def next_sources(
    parent: tuple[SourceLists, ...], cursor: Cursor, wanted: SourceRequest, free: Mapping[str, int]
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
    source: SourceLists, at: SourceCursor | None, wanted: SourceRequest, free: Mapping[str, int]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRequest:
    """A setting of a job: `resume.from` (a folder absolute), and the paths of the restarted sources, by name.

    `everything`: all sources of the job (`resume.data: restart`).
    """

    where: str
    everything: bool
    paths: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        what = (
            "resume.data=restart"
            if self.everything
            else f"resume.restart_sources=[{', '.join(sorted(self.paths))}]"
        )
        return what if self.where == LATEST else f"resume.from={self.where} {what}"

    def repeats(self, earlier: RestartRequest) -> bool:
        """Whether it may be the same request as an earlier one, left in the configuration.

        It names no point or the same one, and no source that was not restarted then or has another path now.
        A source that was added to a job whose sources were all restarted begins by itself.
        """
        if self.where not in (LATEST, earlier.where) or self.everything != earlier.everything:
            return False
        common = self.paths.keys() & earlier.paths.keys()
        same = all(self.paths[name] == earlier.paths[name] for name in common)
        return same and (self.everything or self.paths.keys() <= earlier.paths.keys())


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartClaim:
    """A claim of the run with a restart: its number, the point that it continues (None: none), and the
    request.
    """

    attempt: int
    parent: StateKey | None
    request: RestartRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartDecision:
    """The decision about a request.

    `sources` are restarted. `request` is stored in the claim, even if nothing that could restart was read.
    `note`: why nothing is done. `refusal`: why the start is refused.
    """

    sources: frozenset[str] = frozenset()
    request: RestartRequest | None = None
    note: str = ""
    refusal: Refusal | None = None


def restart_request(config: JobConfig, where: str) -> RestartRequest | None:
    """Returns what the job requests. `where` is its `resume.from`, with a folder as an absolute path."""
    everything = config.resume.data == "restart"
    names = config.resume.restart_sources
    if not (everything or names):
        return None
    paths = {
        source.name: (source.path,) if isinstance(source.path, str) else source.path
        for source in config.data.sources
        if everything or source.name in names
    }
    return RestartRequest(where=where, everything=everything, paths=paths)


def decide_restart(
    request: RestartRequest | None,
    point: StateKey | None,
    claims: Iterable[RestartClaim],
    path: Collection[int],
) -> RestartDecision:
    """Returns which sources a start that continues `point` restarts.

    `claims` are all of the run with a restart. `path` are the attempts that led to the point.

    As with a skip, one request restarts at one place, and once on a history. The same command, given again
    after a crash or a preemption, thus continues. A start that continues the point at which it was first
    carried out does so again, because nothing after the point is kept. Any other point was not meant: it is
    refused, and naming that point makes another request. A run without a point begins with its current files;
    the request is recorded as carried out.
    """
    if request is None:
        return RestartDecision()
    asked = frozenset(request.paths)
    if point is None:
        return RestartDecision(sources=asked, request=request)
    made = sorted((c for c in claims if request.repeats(c.request)), key=lambda claim: claim.attempt)
    for claim in made:
        if claim.attempt <= point.attempt and claim.attempt in path:
            return RestartDecision(
                note=f"{request} is done: attempt {claim.attempt} began there with the files of that time, "
                "and this start continues in them; to begin anew once more, name the point after which: "
                f"resume.from={point.point_name}"
            )
    if not made or made[-1].parent in (point, None):
        return RestartDecision(sources=asked, request=request)
    last = made[-1]
    assert last.parent is not None, "looked at just before"
    text = (
        f"{request} was carried out after {last.parent.point_name} (attempt {last.attempt}), and this start "
        f"would continue {point.point_name}, which does not come from there: to restart here, name the "
        f"point: resume.from={point.point_name}; else leave the restart out, or name the point that it was "
        "meant for"
    )
    return RestartDecision(refusal=Refusal(OTHER_POINT, text))


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceChange:
    """How a start changes a source.

    `change` is `restarted`, `added`, `removed`, `back` (it continues where it was removed), or `refreshed`
    (its files are listed anew for each epoch). It applies from `epoch` on. `files_before` and `files_now` are
    the numbers of files in the old and the new list, if there are any.
    """

    source: str
    change: str
    epoch: int
    files_before: int | None = None
    files_now: int | None = None

    def __str__(self) -> str:
        now = _as_they_are(self.files_now)
        before = "" if self.files_before is None else f" ({files_text(self.files_before)} before)"
        texts = {
            "restarted": f"begins anew with {now}{before}, as epoch {self.epoch}; "
            "what is left of the epoch at hand is not trained",
            "added": f"comes in with {now}, as epoch {self.epoch}",
            "removed": f"is taken away in epoch {self.epoch}; its place is kept, and it continues from there "
            "if it comes back",
            "back": f"comes back and continues in epoch {self.epoch}, where it was taken away",
            "refreshed": f"has its files listed anew for each epoch from epoch {self.epoch} on",
        }
        return f"source {self.source} {texts[self.change]}"


def _as_they_are(num: int | None) -> str:
    if num == 1:
        return "its 1 file as it is now"
    return f"its {'files' if num is None else files_text(num)} as they are now"


def files_text(num: int) -> str:
    """Formats a number of files, for people."""
    return f"{num:,} file{'' if num == 1 else 's'}"


def restart_text(source: str) -> str:
    """Describes the way out if a source's files are no longer those of its list, for a refusal."""
    return f"begin the source anew with its files as they are now (resume.restart_sources=[{source}])"


def undone(decision: RestartDecision, changes: Iterable[SourceChange]) -> RestartDecision:
    """Builds the note of a start that has nothing left to train: none of these changes is made."""
    listed = "; ".join(map(str, changes))
    return replace(decision, note=f"nothing is left to train, so this is not done: {listed}")


def source_changes(
    before: Iterable[SourceLists],
    now: Iterable[SourceLists],
    cursor: Cursor,
    num_files: Mapping[str, tuple[int | None, int | None]],
) -> tuple[SourceChange, ...]:
    """Returns how the sources of a start differ from those of what it continues, at `cursor`.

    The cursor refers to the new sources. `num_files` has the numbers of files of a source's list before and
    now.
    """
    old, found = {source.name: source for source in before}, list[SourceChange]()
    for source in now:
        was, at = old.get(source.name), cursor.sources.get(source.name)
        epoch = 0 if at is None else at.epoch
        files_before, files_now = num_files.get(source.name, (None, None))

        def note(
            change: str,
            first: int,
            of: str = source.name,
            files: tuple[int | None, int | None] = (files_before, files_now),
        ) -> None:
            found.append(
                SourceChange(source=of, change=change, epoch=first, files_before=files[0], files_now=files[1])
            )

        if was is None:
            note("added", epoch, files=(None, files_now))
        elif was.active and not source.active:
            note("removed", epoch, files=(None, None))
        elif source.active and was.spans[-1].start != source.spans[-1].start:
            note("restarted", source.began)
        elif source.active and not was.active:
            note("back", epoch, files=(None, None))
        if source.active and source.spans[-1].refresh and not (was and was.spans[-1].refresh):
            note("refreshed", max(source.began + 1, epoch + 1), files=(None, None))
    return tuple(found)
