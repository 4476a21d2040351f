"""Votes, and commit machines after rows of events."""

from __future__ import annotations

from orchestrator.checkpoint.commit.commit_events import (
    Action,
    ClaimChecked,
    CommitWritten,
    Event,
    GenerationFormed,
    JournalDurable,
    VoteCast,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from tests.checkpoint.samples import cursor, record


def vote(at: StateKey, rank: int, world_size: int = 2) -> Vote:
    return Vote(
        key=at,
        rank=rank,
        world_size=world_size,
        cursor=cursor(at),
        optimizer_steps=at.step,
        files=(),
        tensors=(),
        save_blocked_s=0.0,
        records=(record(at),),
    )


def cast(at: StateKey, rank: int, now_s: float = 1.0, world_size: int = 2) -> VoteCast:
    return VoteCast(vote=vote(at, rank, world_size), now_s=now_s)


def machine(
    keep_latest: int = 3, points: tuple[str, ...] = (), pinned: str | None = None, attempt: int = 1
) -> CommitMachine:
    """A machine whose first generation has formed; it continues the pinned point."""
    new = CommitMachine(
        attempt=attempt,
        kept=KeptPoints(keep_latest=keep_latest, names=points, pinned=pinned),
        vote_limit_s=60,
    )
    parent = parse_point_name(pinned) if pinned else None
    return run(new, GenerationFormed(generation=1, parent=parent))[0]


def run(state: CommitMachine, *events: Event) -> tuple[CommitMachine, list[Action]]:
    """The state after the events, and the actions of the last one."""
    actions: tuple[Action, ...] = ()
    for event in events:
        state, actions = state.on(event)
    return state, list(actions)


def committed(state: CommitMachine, at: StateKey) -> tuple[CommitMachine, list[Action]]:
    """A whole save, undisturbed."""
    no = ClaimChecked(key=at, newer=False)
    return run(state, cast(at, 0), cast(at, 1), JournalDurable(key=at), no, CommitWritten(key=at), no)
