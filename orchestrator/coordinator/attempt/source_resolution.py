"""Determines which lists of its sources' files a start reads (data rules 23 and 24).

They are those of the continued point, with the sources that the start adds, removes, restarts and refreshes.
The decision is made in `planning.resume.source_lists`. This module provides the history and the run's folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.points import Point
from orchestrator.coordinator.attempt.forking import is_folder
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import Lineage
from orchestrator.planning.encoders import Place
from orchestrator.planning.resume.resume_plan import PointInfo
from orchestrator.planning.resume.source_lists import (
    ListSpan,
    RestartClaim,
    RestartDecision,
    SourceChange,
    SourceLists,
    SourceReading,
    SourceRequest,
    decide_restart,
    first_sources,
    moved,
    next_sources,
    restart_request,
    source_changes,
    start_of,
)
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from orchestrator.storage.open import absolute

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceResolution:
    """What a start reads.

    `before` are the sources of what it continues, at `cursor`. `reading` are its own sources and its place in
    them. `storage` is that of the run that owns the lists.
    """

    storage: Storage
    before: tuple[SourceLists, ...]
    cursor: Cursor
    reading: SourceReading
    restart: RestartDecision

    def moved(self, point: Point | None) -> Point | None:
        """Returns the point as the start continues it, with its place in the new lists."""
        return None if point is None else replace(point, cursor=moved(self.reading.sources, point.cursor))

    def changes(self, data: DataSpec) -> tuple[SourceChange, ...]:
        """Returns how the sources change. `data` are those of `reading`. Empty at a first start."""
        from orchestrator.data.dataset import num_frozen_files

        if not self.before:
            return ()
        now = {plan.source: len(plan.manifest.files) for plan in data.plans}
        files = dict[str, tuple[int | None, int | None]]()
        for source in self.before:
            at = self.cursor.sources.get(source.name)
            if source.name in self.restart.sources:
                version = source.version(0 if at is None else at.epoch)
                files[source.name] = (
                    num_frozen_files(self.storage, source.name, version),
                    now.get(source.name),
                )
        files |= {name: (None, num) for name, num in now.items() if name not in files}
        return source_changes(self.before, self.reading.sources, self.reading.cursor, files)


def sources_here(
    config: JobConfig,
    storage: Storage,
    info: PointInfo | None,
    parents: Iterable[ClaimParent] = (),
    lineage: Lineage | None = None,
) -> SourceResolution:
    """Returns what a start of `config` reads that continues the point of `info` (None: none).

    `storage` is that of the point's run. `parents` are the run's parent files; a fork that begins has none. A
    run that has frozen nothing begins with the job's sources.
    """
    from orchestrator.data.common.settings import wanted_of
    from orchestrator.data.frozen import frozen_sources, later_versions

    where = config.resume.from_
    if is_folder(where):
        where = absolute(where)
    path = {claim.attempt for claim in lineage.attempts} if lineage is not None else set[int]()
    claims = (
        RestartClaim(attempt=claim.attempt, parent=claim.parent, request=claim.restart)
        for claim in parents
        if claim.restart is not None
    )
    decision = decide_restart(restart_request(config, where), info.key if info else None, claims, path)
    cursor = info.cursor if info else Cursor()
    if frozen_sources(storage) is None:
        reading = SourceReading(sources=first_sources(wanted_of(config)))
        decision = replace(decision, sources=frozenset())
        return SourceResolution(storage=storage, before=(), cursor=cursor, reading=reading, restart=decision)
    before = (info.sources if info else ()) or first_of(storage)
    starts = {name: max(map(start_of, versions)) for name, versions in later_versions(storage).items()}
    free = {source.name: starts.get(source.name, 0) + 1 for source in config.data.sources}
    known = frozenset(source.name for source in before)
    sources = next_sources(before, cursor, wanted_of(config, decision.sources & known), free)
    reading = SourceReading(sources=sources, cursor=moved(sources, cursor))
    return SourceResolution(storage=storage, before=before, cursor=cursor, reading=reading, restart=decision)


def first_of(storage: Storage) -> tuple[SourceLists, ...]:
    """Returns the sources of the run's first start; none if it has frozen nothing."""
    from orchestrator.data.frozen import frozen_sources

    return first_sources(SourceRequest(names=frozen_sources(storage) or ()))


def plain_reading(config: JobConfig, newest: tuple[SourceLists, ...]) -> bool:
    """Whether a job reads exactly the run's sources, each by its first list, as in its newest claim.

    Then the lists do not depend on which point is continued.
    """
    plain = all(source.active and source.spans == (ListSpan(begin=0),) for source in newest)
    names = {source.name for source in config.data.sources}
    asks = config.resume.data == "restart" or config.resume.restart_sources or config.data.refresh
    return plain and names == {source.name for source in newest} and not asks


def read_as(config: JobConfig, data: DataSpec, here: SourceResolution) -> DataSpec:
    """Returns the job's data with the lists that the start reads; `data` itself if it has them.

    Raises as `data.dataset.prepare_data`.
    """
    from orchestrator.data.code_process import call, names_code
    from orchestrator.data.dataset import prepare_data

    if data.tokenizer_folder is None or has_lists(data, here.reading):
        return data
    return call(names_code(config), prepare_data, config, here.storage, here.reading)


def has_lists(data: DataSpec, reading: SourceReading) -> bool:
    """Whether these data are opened for this reading."""
    if data.sources != reading.sources:
        return False
    return all(
        data.lists_of(plan.source).version(reading.epoch(plan.source)) in data.lists[plan.source]
        for plan in data.plans
    )


def after_removed(sources: Iterable[SourceLists], cursor: Cursor) -> dict[str, Place]:
    """For the sources that the job does not read, returns the place after the current document or window.

    An encoder that takes over meanwhile makes what follows there.
    """
    found = dict[str, Place]()
    for source in sources:
        at = cursor.sources.get(source.name)
        if not source.active and at is not None:
            rest = (at.window + 1, 0) if at.packs else (at.window, at.record + 1)
            found[source.name] = (at.epoch, at.block, *rest)
    return found
