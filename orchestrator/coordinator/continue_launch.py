"""A restarted coordinator goes on with its launch: it claims the next attempt, and reads back from storage
what the one before it knew.

What that means for those who train is decided by the launch machine.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.coordinator.attempt import Attempt, EarlierCoordinator, StartFindings
from orchestrator.coordinator.choosing import choose_point
from orchestrator.coordinator.survey import Survey, decided, mean_losses, saved_history
from orchestrator.elastic.failure_budget import Failure
from orchestrator.elastic.formation import PreviousGeneration
from orchestrator.errors import FencedError, ResumePointError
from orchestrator.faults import Hook
from orchestrator.history.claim_files import RESTARTED
from orchestrator.history.claims import ClaimParent
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal_reader import Journal
from orchestrator.planning.skipping import still_due
from orchestrator.records.run_status import MemberInfo
from orchestrator.resume.commit_machine import LOST
from orchestrator.resume.points import Point
from orchestrator.resume.store import RunStore


def continue_launch(
    store: RunStore, first: Attempt, host: str, faults: Hook, mine: set[int] | None = None
) -> Attempt:
    """What a coordinator process goes on with: `first` as the driver claimed it, or the next attempt if this
    process is a restarted one.

    It is a restarted one if the launch's newest attempt has a journal: that is the first thing a coordinator
    writes. Leftovers stay until the next start command, for members that live may still be writing into them.
    `mine` are the numbers that this process has claimed, and gets the one that it claims: after a
    `StorageError` it may be called again, and goes on with the claim that it made.
    Raises `FencedError` if another launch has taken the run over.
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
    """What the claim `number` of the launch that began with `first` inherits, written down."""
    # without steps, for its members wait
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
    )
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
        losses=mean_losses(seen),
        history=saved.number,
        history_saved_to=saved.saved_to,
        skip=parent.skip,
        found=StartFindings(unreadable=tuple(file for file in seen.unreadable if file not in found)),
        earlier=_read_back(seen.journal, first.number, _process_of(store, seen.journal, number - 1)),
    )


def _newest_point(store: RunStore, first: Attempt, seen: Survey) -> Point | None:
    """The newest whole point on the history, but none before that with which the launch began."""
    try:
        point, _ = choose_point(store, seen, "latest", fast=True)
    except ResumePointError:
        point = None  # the members hold a newer state than any point; without them the next start refuses
    if point is None or (first.parent is not None and point.key <= first.parent):
        return first.point  # its cursor stands after what the launch skips
    return point


def _with(points: tuple[str, ...], point: Point | None) -> tuple[str, ...]:
    """What is inherited: also the point with which the launch began, where storage does not list it now."""
    return points if point is None or point.name in points else (point.name, *points)


def _process_of(store: RunStore, journal: Journal, attempt: int) -> tuple[int, str]:
    """The process of an attempt's coordinator, as its journal says; one without knows no pid (0)."""
    for event in journal.events:
        if event.attempt == attempt and event.kind == EventKind.ATTEMPT:
            return event.fields.get("pid", 0), event.fields.get("host", "")
    return 0, store.read_claim(attempt).host


def _read_back(journal: Journal, first: int, died: tuple[int, str]) -> EarlierCoordinator:
    """What the coordinators of a launch, whose first attempt is `first`, have journalled for the next one."""
    mine = [event for event in journal.events if event.attempt >= first]
    last = max((g for g in journal.generations if g.attempt >= first), key=lambda g: g.id, default=None)
    # whose death is known is not waited for, and not counted again
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
    """As they said when they last joined."""
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
