"""Storage that answers the commit machine at once, for models of what happens around it; what may come
between its answers is searched in `test_commit_search.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from orchestrator.checkpoint.commit.commit_events import (
    Action,
    CheckNewerClaim,
    ClaimChecked,
    CommitWritten,
    Event,
    FlushJournal,
    JournalDurable,
    WriteCommit,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine

World = TypeVar("World")


def tell_machine(
    world: World,
    events: tuple[Event, ...],
    machine_of: Callable[[World], CommitMachine],
    with_machine: Callable[[World, CommitMachine], World],
    perform: Callable[[World, Action], World],
) -> World:
    """Gives the machine in `world` the events, as its driver does: each with all that follows from it.
    `perform` is what an action does to the world.
    """
    todo = deque(events)
    while todo:
        machine, actions = machine_of(world).on(todo.popleft())
        world = with_machine(world, machine)
        for number, action in enumerate(actions):
            world, answer = perform(world, action), answer_of(action)
            if answer is not None:
                assert number == len(actions) - 1 or isinstance(action, CheckNewerClaim)
                todo.appendleft(answer)
    return world


def answer_of(action: Action) -> Event | None:
    """What storage says, where it is asked."""
    match action:
        case FlushJournal():
            return JournalDurable(key=action.key)
        case CheckNewerClaim():
            return ClaimChecked(key=action.key, newer=False)
        case WriteCommit():
            return CommitWritten(key=action.key)
    return None
