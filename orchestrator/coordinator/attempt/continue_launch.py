"""Continues a launch after its coordinator was restarted.

The new coordinator claims the next attempt, and reads from storage what its predecessor knew. The launch
machine decides what that means for the members.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.checkpoint.commit.commit_machine import LOST
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.attempt import Attempt, StartFindings
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import (
    Survey,
    decided,
    losses_of_points,
    older_journals,
    saved_history,
    seal_history,
)
from orchestrator.coordinator.machine.launch_history import EarlierCoordinator
from orchestrator.elastic.failure import Failure
from orchestrator.elastic.formation import PreviousGeneration
from orchestrator.errors import FencedError, ResumePointError
from orchestrator.faults import Hook
from orchestrator.history.claims.claim_files import RESTARTED
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_reader import Journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.planning.resume.skipping import still_due
from orchestrator.records.run_status import MemberInfo


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
