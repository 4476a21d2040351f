"""Determines what a start reads: which lists of its sources' files, and the samples that it skips.

The lists are those of the continued point, with the sources that the start adds, removes, restarts and
refreshes (data rules 23 and 24). A skip is drawn if it is due at the continued point. Both decisions are made
in `planning.resume`, in `source_lists` and `skipping`. This module provides the history and the run's folder,
and reads the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.points import Point
from orchestrator.coordinator.attempt.forking import is_folder
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import Lineage, skip_claims
from orchestrator.planning.encoders import Place
from orchestrator.planning.resume.resume_plan import PointInfo
from orchestrator.planning.resume.skipping import Skip, SkipDecision, SkipRequest, decide_skip, skip_request
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
from orchestrator.records.steps import StateKey, sample_len_of
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


def skip_here(
    config: JobConfig,
    point: StateKey | None,
    parents: Iterable[ClaimParent] = (),
    lineage: Lineage | None = None,
) -> SkipDecision:
    """Decides whether a start of `config` that continues `point` skips.

    `parents` are the run's parent files; a fork that begins has none.
    """
    where = config.resume.from_
    if is_folder(where):
        where = absolute(where)
    path = {claim.attempt for claim in lineage.attempts} if lineage is not None else set[int]()
    return decide_skip(skip_request(config, where), point, skip_claims(parents), path)


def draw_skip(config: JobConfig, data: DataSpec, point: Point, request: SkipRequest) -> Skip:
    """Draws what is to be skipped after `point`, with the point's batch size, seq_len and weights.

    How far the data go (`num_epochs`, `max_epochs`, `on_end`) is the job's setting. `data` must be encoded by
    the encoders that encoded until now.

    Raises `RefusedError` if the data end before anything is left to train, and what reading them raises.
    """
    from orchestrator.data.code_process import call, needs_code
    from orchestrator.data.packing.samples import draw_past

    batch, seq_len = point.config["train.global_batch_size"], sample_len_of(point.config)
    num_samples, job = request.num_samples(batch), _mixed_as(config, point.config)
    passed = call(needs_code(data), draw_past, data.mixed_as(job), point.cursor, num_samples, seq_len)
    if passed.samples < num_samples or passed.ends:
        raise RefusedError(
            f"{request}: skipping {num_samples:,} samples of {seq_len} tokens after {point.name} leaves "
            f"nothing to train, because the data have {passed.samples:,} from there on "
            f"(data.num_epochs={config.data.num_epochs}); skip fewer, or raise data.num_epochs",
            code="resume.skip_past_end",
        )
    return Skip(
        request=request,
        samples=passed.samples,
        tokens=passed.tokens,
        global_batch_size=batch,
        seq_len=seq_len,
        begin=point.cursor,
        end=passed.cursor,
        settings=_settings(job) if len(data.plans) > 1 or point.cursor.mixture else {},
    )


def after_skip(point: Point | None, skip: Skip | None) -> Point | None:
    """Returns the point as the attempt continues it, with the cursor after the skip."""
    return point if point is None or skip is None else replace(point, cursor=skip.end)


def _mixed_as(config: JobConfig, before: Mapping[str, Any]) -> JobConfig:
    """Returns the job with the weights that the point was made with."""
    from orchestrator.config.field_rules import in_todays_fields, nested
    from orchestrator.config.loading import parse_config

    then, now = in_todays_fields(before), config.flat()
    weights = {source["name"]: source.get("weight") for source in then["data.sources"]}
    sources = [{**source, "weight": weights.get(source["name"])} for source in now["data.sources"]]
    weight_by = then.get("data.weight_by", "tokens")
    return parse_config(nested({**now, "data.sources": sources, "data.weight_by": weight_by}))


def _settings(job: JobConfig) -> dict[str, Any]:
    """Returns the settings with which an audit can draw the same samples."""
    flat = job.flat()
    names = ("name", "weight", "max_epochs")
    sources = [{name: source[name] for name in names} for source in flat["data.sources"]]
    fields = ("data.on_end", "data.weight_by", "data.num_epochs")
    return {"data.sources": sources, **{name: flat[name] for name in fields}}
