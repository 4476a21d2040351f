"""Turns a start command's claim into an attempt.

It chooses the point to continue, checks whether the attempt may continue it, and writes what the attempt
inherits. The order fences (membership rule 6): the claim is made, then the points are listed, then the parent
file is written. Everything is decided from one survey; points that appear later are not considered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.point_files import Each
from orchestrator.checkpoint.points.points import Point, newest_first, parse_point_name
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.sealed_votes import committable, complete, read_votes
from orchestrator.checkpoint.points.store import Leftover, RunStore, remove_leftovers
from orchestrator.checkpoint.points.verify import POINTS
from orchestrator.coordinator.attempt.attempt import Attempt, StartFindings
from orchestrator.coordinator.attempt.forking import point_info, take_over
from orchestrator.coordinator.attempt.resume_point_choice import (
    StartData,
    choose_point,
    decide,
    kept_point,
    rewind_sentence,
    up_to,
)
from orchestrator.coordinator.attempt.source_resolution import (
    SourceResolution,
    after_removed,
    after_skip,
    draw_skip,
    read_as,
    skip_here,
    sources_here,
)
from orchestrator.coordinator.attempt.survey import (
    Survey,
    decided,
    is_evaluated,
    losses_of_points,
    older_journals,
    require_frozen,
    require_journals,
    saved_history,
    seal_history,
    survey,
)
from orchestrator.errors import StorageError
from orchestrator.history.claims.claim_files import UnreadableFile
from orchestrator.history.claims.claims import ORIGIN, Claim, ClaimParent, Origin
from orchestrator.history.journal.journal_reader import choice_in
from orchestrator.history.journal.line_format import EventKind
from orchestrator.planning.encoders import EncoderSpan, with_encoder
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.resume.skipping import Skip, SkipDecision
from orchestrator.records.points import Damage

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec

_NAMED = 10  # damaged places of the journal that a start names

def begin_launch(
    store: RunStore,
    config: JobConfig,
    claim: Claim,
    run: RunFile,
    data: DataSpec,
    drawn: Skip | None = None,
    known: Sequence[Damage] = (),
    each: Each | None = None,
) -> tuple[Attempt, ResumePlan]:
    """Chooses what a start command's claim continues and writes what it inherits.

    `run` is the run's run.json, `data` the job's data. The skip is `drawn` if that was drawn at the continued
    point; else it is drawn here. `known` are damages that this start has found before, with digests. `each`
    as in `PointFiles.verify_point`.

    Compares sizes and headers of the point. The workers verify the digests of what they load. If a point is
    marked as damaged, all its bytes are read here.

    Raises `RefusedError` if the configuration may not continue the run, or names a point whose deletion has
    begun. The claim then stays without descendants and is harmless; its owner records its end. `latest`
    accepts such a point, but only if all newer ones are damaged: refusing it would leave a run that lost
    power during a deletion without any point. Raises `UnreachableNodeError` if parts of the point are only on
    unreachable nodes. An older point is never taken instead.
    """
    from orchestrator.data.dataset import write_lists

    def choose(seen: Survey) -> tuple[Survey, _Chosen]:
        seal_history(store, seen, run.id)
        seen = complete_a_save(store, seen, claim.number, run.id)
        require_frozen(seen, data)
        require_journals(store, seen)
        return seen, _choose(store, config, run, claim.number, seen, known, each)

    seen, chosen = decided(store, choose)
    asked = skip_here(config, chosen.point.key if chosen.point else None, seen.parents, seen.lineage)
    info = point_info(store, chosen.point, chosen.origin) if chosen.point else None
    here = sources_here(config, store.storage, info, seen.parents, seen.lineage)
    data, identity = read_as(config, data, here), run.identity
    start_data = StartData(identities=(identity, data.identity()), spec=data, sources=here)
    plan = decide(store, config, chosen.point, start_data, asked, chosen.origin)
    plan = replace(plan, rewind=rewind_sentence(seen, config, chosen.point))
    if plan.action == "refuse":
        raise plan.refusal
    point, skip = _after_skip(config, data, plan, chosen.point, asked, drawn)
    point = here.moved(point)
    if data.unwritten:  # before the claim records that they are read
        data = write_lists(here.storage, data)
    parent = ClaimParent(
        attempt=claim.number,
        parent=point.key if point else None,
        inherited=up_to(seen.points, point) if chosen.origin is None or point is None else (point.name,),
        budgets=plan.budgets,
        differences=plan.differences,
        encoders=_encoders(plan, data, point, here),
        origin=chosen.origin,
        skip=skip,
        sources=here.reading.sources,
        restart=here.restart.request,
        journals=older_journals(seen),
    )
    store.write_parent(parent)
    saved = saved_history(seen)
    attempt = replace(
        Attempt.claimed(claim, parent, point, plan.step_after, run.id),
        weights_by_name=run.weights_by_name,
        num_blocks={each.source: each.num_blocks for each in data.plans},
        weights=data.weights,
        losses=losses_of_points(seen, config.resume.keep_best_by),
        best_by=config.resume.keep_best_by,
        evaluated=plan.step_after if point and is_evaluated(seen, point.key, config.eval) else -1,
        history=saved.number,
        history_saved_to=saved.saved_to,
        found=replace(
            _findings(chosen, seen, plan, remove_leftovers(store, claim.number, seen.fates)),
            **_brought(store, seen, point, run.id),
        ),
    )
    return attempt, plan


def complete_a_save(store: RunStore, seen: Survey, number: int, run_id: str) -> Survey:
    """Completes the newest uncommitted save on the history, for the claim `number` (membership rule 14).

    The save becomes a resume point if all its votes are in storage and it is newer than every point. Returns
    the survey after that.
    """
    newest = max((key for name in seen.points if (key := parse_point_name(name))), default=None)
    journalled = {record.key for record in seen.journal.records}
    # A save that was committed since the survey is not completed; the next survey lists it.
    for name in newest_first({*store.storage.list(POINTS)} - {*seen.committed}):
        key = parse_point_name(name)
        assert key is not None, "these are names of points"
        if newest is not None and key <= newest:
            break
        config = _config_of(seen, key.attempt)
        decided = name in seen.fates.kept or name in seen.fates.deleted
        if key.attempt >= number or decided or config is None or not seen.lineage.on_lineage(key):
            continue
        votes = read_votes(store.storage, name, run_id)
        found = committable(votes, seen.journal.generations, journalled.__contains__)
        if isinstance(found, str):
            continue
        if complete(store, found, config, run_id, lambda: store.next_claim_exists(number)) is not None:
            return survey(store)
    return seen


def _config_of(seen: Survey, attempt: int) -> dict[str, Any] | None:
    """Returns the flat configuration of an attempt, from its journal."""
    begun = (e for e in seen.journal.events if e.kind == EventKind.ATTEMPT and e.attempt == attempt)
    return next((dict(event.fields["config"]) for event in begun), None)


def _brought(store: RunStore, seen: Survey, point: Point | None, run_id: str) -> dict[str, Any]:
    """Returns `StartFindings.brought` and `completed`.

    This includes a point that was completed by an older start, which ended before its own journal began.
    """
    committed = (e.fields["point"] for e in seen.journal.events if e.kind == EventKind.POINT_COMMITTED)
    if point is None or point.key.attempt == ORIGIN or point.name in committed:
        return {}
    votes = read_votes(store.storage, point.name, run_id)
    journalled = {record.key for record in seen.journal.records}
    records = {record.key: record for vote in votes for record in vote.records}
    return {
        "brought": tuple(records[key] for key in sorted(records) if key not in journalled),
        "completed": point if votes else None,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    """The point that the claim continues.

    `origin`: the point is another run's, with which a fork begins. The rest as in `StartFindings`.
    """

    point: Point | None
    origin: Origin | None = None
    damages: tuple[Damage, ...] = ()
    verified_s: float | None = None
    lifted: bool = False


def _findings(
    chosen: _Chosen, seen: Survey, plan: ResumePlan, leftovers: tuple[Leftover, ...]
) -> StartFindings:
    return StartFindings(
        damages=chosen.damages,
        verified_s=chosen.verified_s,
        lifted=chosen.lifted,
        unreadable=(*seen.unreadable, *_damaged_files(seen)),
        leftovers=leftovers,
        lists=plan.lists,
        parallel=choice_in(seen.journal.events),
    )


def _damaged_files(seen: Survey) -> list[UnreadableFile]:
    """Returns the damaged places of the journal, for the user and the new attempt's journal."""
    found = [UnreadableFile(path=each.where, reason=each.reason) for each in seen.damages]
    if len(found) > _NAMED:
        more = f"{len(found) - _NAMED} more places are not as they were written"
        found[_NAMED:] = [UnreadableFile(path="journal", reason=more)]
    return found


def _choose(
    store: RunStore,
    config: JobConfig,
    run: RunFile,
    number: int,
    seen: Survey,
    known: Sequence[Damage],
    each: Each | None,
) -> _Chosen:
    if run.forked_from is not None and seen.lineage.attempt is None:
        point, origin = take_over(store, run, number)
        return _Chosen(point=point, origin=origin)
    marked, began, by = store.quarantined(), time.monotonic(), f"attempt {number}"
    wanted = kept_point(store, seen, config)
    newest, damages = choose_point(store, seen, wanted, known=known, each=each)
    mark_damaged(store, damages, by)
    if newest is not None:  # comparing sizes skips points that cannot be reached
        older = newest_first(up_to(seen.points, newest))[1:]
        store.require_reached(newest, older if wanted == "latest" else None)
    was_read = newest is not None and newest.name in marked
    return _Chosen(
        point=newest,
        damages=damages,
        verified_s=time.monotonic() - began if was_read else None,
        lifted=newest is not None and was_read and store.note_reading(newest.name, (), by),
    )


def mark_damaged(store: RunStore, damages: Sequence[Damage], by: str) -> None:
    """Marks the points of these damages (`checkpoint.points.verify`).

    If a mark cannot be made, the point is checked again later; the start does not fail.
    """
    for name in dict.fromkeys(damage.point for damage in damages):
        with suppress(StorageError):
            store.note_reading(name, [damage for damage in damages if damage.point == name], by)


def _after_skip(
    config: JobConfig,
    data: DataSpec,
    plan: ResumePlan,
    point: Point | None,
    asked: SkipDecision,
    drawn: Skip | None,
) -> tuple[Point | None, Skip | None]:
    """Returns the point with its cursor after the skip, and the skip."""
    if asked.request is None or point is None:
        return point, None
    there = drawn is not None and (drawn.request, drawn.begin) == (asked.request, point.cursor)
    skip = drawn if there else draw_skip(config, data.made_by(plan.encoders), point, asked.request)
    return after_skip(point, skip), skip


def _encoders(
    plan: ResumePlan, data: DataSpec, point: Point | None, here: SourceResolution
) -> tuple[EncoderSpan, ...]:
    """Returns the encoders of the plan, and from the point on the encoder of this start."""
    if plan.encoder is None or plan.encoder == plan.encoders[-1].encoder:
        return plan.encoders
    begins = data.made_by(plan.encoders).next_documents(point.cursor) if point else {}
    begins |= after_removed(here.reading.sources, point.cursor) if point else {}
    return with_encoder(plan.encoders, plan.encoder, begins)
