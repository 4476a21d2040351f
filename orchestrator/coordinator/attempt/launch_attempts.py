"""Makes the attempts of a launch: the first from a start command's claim, the next after a restart of the
coordinator.

`begin_launch` chooses the point to continue, checks whether the attempt may continue it, and writes what the
attempt inherits. The order fences (membership rule 6): the claim is made, then the points are listed, then
the parent file is written. Everything is decided from one survey; points that appear later are not
considered. `continue_launch` claims the next attempt, and reads from storage what the coordinator before it
knew. The launch machine decides what that means for the members.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit.commit_machine import LOST
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
from orchestrator.coordinator.machine.launch_history import EarlierCoordinator
from orchestrator.elastic.failure import Failure
from orchestrator.elastic.formation import PreviousGeneration
from orchestrator.errors import FencedError, ResumePointError, StorageError
from orchestrator.faults import Hook
from orchestrator.history.claims.claim_files import RESTARTED, UnreadableFile
from orchestrator.history.claims.claims import ORIGIN, Claim, ClaimParent, Origin
from orchestrator.history.journal.journal_reader import Journal, choice_in
from orchestrator.history.journal.line_format import EventKind
from orchestrator.planning.encoders import EncoderSpan, with_encoder
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.resume.skipping import Skip, SkipDecision, still_due
from orchestrator.records.points import Damage
from orchestrator.records.run_status import MemberInfo

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


# ------------------------------------------------------------------------- after a restart of the coordinator
def continue_launch(
    store: RunStore, first: Attempt, host: str, faults: Hook, mine: set[int] | None = None
) -> Attempt:
    """Returns the attempt that a coordinator process continues with.

    It is `first`, as the driver claimed it, or the next attempt if this process is a restarted one. A process
    is restarted if the launch's newest attempt has a journal, which is the first thing that a coordinator
    writes. Leftovers stay until the next start command, because live members may still write into them.

    `mine` are the numbers that this process has claimed; the one that it claims is added. After a
    `StorageError` the function may be called again, and continues with that claim. Raises `FencedError` if
    another launch has taken the run over.
    """
    mine = set() if mine is None else mine
    newest = store.newest_claim()
    if lost := store.why_not_mine(first.run_id) or ("" if newest else "the claims of this launch are gone"):
        raise FencedError(f"{lost}: {LOST}")
    assert newest is not None, "looked at just before"
    if newest.number == first.number and not _has_journal(store, first.number):
        return first
    end = store.read_end(newest.number) if newest.launch == first.launch else None
    if end is not None:
        ended = EarlierCoordinator(ended=(end.outcome, end.reason))
        return replace(first, number=newest.number, why=RESTARTED, earlier=ended)
    number = newest.number
    if number not in mine or store.read_parent(number) or _has_journal(store, number):
        number = newest.number + 1
        store.claim(number, first.launch, RESTARTED, host, first.run_id)
        mine.add(number)
        faults("claim_made", -1, -1)
    return _take_up(store, first, number)


def _has_journal(store: RunStore, number: int) -> bool:
    return bool(store.storage.list(f"journal/a{number:04d}"))


def _take_up(store: RunStore, first: Attempt, number: int) -> Attempt:
    """Writes what the claim `number` inherits. `first` is the first attempt of its launch."""
    # without steps, because its members wait
    seen, point = decided(store, lambda seen: (seen, _newest_point(store, first, seen)), with_steps=False)
    parent = ClaimParent(
        attempt=number,
        parent=point.key if point else None,
        inherited=_with(seen.points, point),
        budgets=first.budgets,
        encoders=first.encoders,
        skip=still_due(first.skip, first.parent, point.key if point else None),
        sources=first.sources,
        restart=first.restart if point is None or point.key == first.parent else None,
        journals=older_journals(seen),
    )
    seal_history(store, seen, first.run_id)
    store.write_parent(parent)
    saved = saved_history(seen)
    found = first.found.unreadable
    return replace(
        first,
        number=number,
        why=RESTARTED,
        point=point,
        inherited=parent.inherited,
        forked_from=None,
        losses=losses_of_points(seen, first.best_by),
        history=saved.number,
        history_saved_to=saved.saved_to,
        skip=parent.skip,
        found=StartFindings(unreadable=tuple(file for file in seen.unreadable if file not in found)),
        earlier=_read_back(seen.journal, first.number, _process_of(store, seen.journal, number - 1)),
    )


def _newest_point(store: RunStore, first: Attempt, seen: Survey) -> Point | None:
    """Returns the newest whole point on the history, but none older than the one the launch began with."""
    try:
        point, _ = choose_point(store, seen, "latest", fast=True)
    except ResumePointError:
        point = None  # the members hold a newer state than any point; without them the next start refuses
    if point is None or (first.parent is not None and point.key <= first.parent):
        return first.point  # its cursor is after what the launch skips
    return point


def _with(points: tuple[str, ...], point: Point | None) -> tuple[str, ...]:
    """Returns the inherited points, including the launch's first point if storage does not list it now."""
    return points if point is None or point.name in points else (point.name, *points)


def _process_of(store: RunStore, journal: Journal, attempt: int) -> tuple[int, str]:
    """Returns the pid and host of an attempt's coordinator, from its journal; without one the pid is 0."""
    for event in journal.events:
        if event.attempt == attempt and event.kind == EventKind.ATTEMPT:
            return event.fields.get("pid", 0), event.fields.get("host", "")
    return 0, store.read_claim(attempt).host


def _read_back(journal: Journal, first: int, died: tuple[int, str]) -> EarlierCoordinator:
    """Collects what earlier coordinators of a launch have journalled for the next one.

    `first` is the first attempt of the launch.
    """
    mine = [event for event in journal.events if event.attempt >= first]
    last = max((g for g in journal.generations if g.attempt >= first), key=lambda g: g.id, default=None)
    # members that are known to be dead are not waited for, and not counted again
    over = (EventKind.MEMBER_DEAD, EventKind.MEMBER_LEFT, EventKind.MEMBER_FAILED)
    dead = {event.fields["member"] for event in mine if event.kind in over}
    live = tuple(member for member in last.members if member not in dead) if last else ()
    finished = [event.fields for event in mine if event.kind == EventKind.MEMBER_FINISHED]
    failures = [event.fields for event in mine if event.kind == EventKind.FAILURE]
    records = [record for record in journal.records if record.attempt >= first]
    reported = [e.fields["member"] for e in mine if e.kind == EventKind.MEMBER_FAILED]
    answered = [e.fields["request"] for e in mine if e.kind == EventKind.REQUEST_ANSWERED]
    return EarlierCoordinator(
        previous=None
        if last is None
        else PreviousGeneration(
            attempt=last.attempt, generation=last.generation, members=live, ended=live != last.members
        ),
        members=_where_they_live(journal, live),
        finished=tuple((f["member"], f["reason"], f["step"]) for f in finished),
        failures=tuple(Failure(step=f["step"], reason=f["reason"]) for f in failures),
        last_step=max(records, key=lambda record: record.key, default=None),
        answered=tuple(answered),
        reported=tuple(reported),
        died=died,
    )


def _where_they_live(journal: Journal, members: tuple[str, ...]) -> tuple[MemberInfo, ...]:
    """Returns the members' places according to their last joins."""
    joins = {e.fields["member"]: e.fields for e in journal.events if e.kind == EventKind.JOIN}
    return tuple(
        MemberInfo(
            member=m,
            actor_id=joins[m]["actor"],
            node_id=joins[m]["node"],
            pid=joins[m]["pid"],
            host=joins[m].get("host", ""),
        )
        for m in members
        if m in joins
    )
