"""Points that storage does not delete: said once, tried again ever later and one at a time, whatever comes in
between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    Action,
    ClaimChecked,
    Deleted,
    DeletePoints,
    DeletesFail,
    DeletesWork,
    Event,
    Tick,
)
from orchestrator.checkpoint.commit.commit_machine import CHECK_EVERY_S, CommitMachine
from orchestrator.checkpoint.commit.retention import DeleteRetries, KeptPoints
from orchestrator.storage.tries import MOST_RETRY_S
from tests.checkpoint.commit_machines import committed, machine
from tests.checkpoint.samples import key

DEPTH = 8
WAITS = (5, 10, 20, 40, 80, 160, 320, 320)
SLACK_S = CHECK_EVERY_S  # the machine looks at its clock so often


@dataclass(frozen=True)
class World:
    """The machine, what it has under way, and what a user has heard."""

    machine: CommitMachine
    now_s: float = 0.0
    step: int = 0
    under_way: tuple[DeletePoints, ...] = ()
    failures: int = 0  # in a row, of the deletions that were answered
    not_before_s: float = 0.0
    told: bool = False  # that deletions fail
    wrong: str = ""


def take(world: World, actions: tuple[Action, ...]) -> World:
    """Takes note of, and checks, what the machine asks for and says."""
    for action in actions:
        wrong = ""
        match action:
            case DeletePoints():
                if world.failures:
                    wrong = "one beside another" if world.under_way else wrong
                    wrong = "several are tried" if len(action.names) > 1 else wrong
                    wrong = "too early" if world.now_s < world.not_before_s else wrong
                world = replace(world, under_way=(*world.under_way, action))
            case DeletesFail():
                wrong = "said twice" if world.told else ""
                world = replace(world, told=True)
            case DeletesWork():
                wrong = "" if world.told else "said without need"
                world = replace(world, told=False)
        world = replace(world, wrong=world.wrong or wrong)
    return world


def tell(world: World, *events: Event) -> World:
    for event in events:
        state, actions = world.machine.on(event)
        world = take(replace(world, machine=state), actions)
    return world


def tick(world: World) -> World:
    now_s = world.now_s + CHECK_EVERY_S
    return tell(replace(world, now_s=now_s), Tick(now_s=now_s), ClaimChecked(key=None, newer=False))


def commit(world: World) -> World:
    state, actions = committed(world.machine, key(world.step + 1))
    return take(replace(world, machine=state, step=world.step + 1), tuple(actions))


def answer(world: World, works: bool) -> World:
    """Storage answers the deletion that was begun first."""
    action, *rest = world.under_way
    world = replace(world, under_way=tuple(rest))
    if works:
        return tell(replace(world, failures=0), Deleted(names=action.names))
    wait_s = WAITS[min(world.failures, len(WAITS) - 1)] - SLACK_S
    world = replace(world, failures=world.failures + 1, not_before_s=world.now_s + wait_s)
    world = tell(world, Deleted(names=(), failed=action.names, reason="Access Denied"))
    return world if world.told else replace(world, wrong=world.wrong or "not said")


def moves(world: World) -> Iterator[World]:
    yield tick(world)
    yield commit(world)
    if world.under_way:
        yield answer(world, works=True)
        yield answer(world, works=False)


def ends_well(world: World) -> str:
    """What is wrong if storage deletes from now on, and time goes on."""
    for _ in range(2 * int(MOST_RETRY_S / CHECK_EVERY_S)):
        while world.under_way:
            world = answer(world, works=True)
        world = tick(world)
    left = len(world.machine.kept.names)
    wrong = f"{left} points are left" if left > 1 else ""
    return world.wrong or wrong or ("not said that it works" if world.told else "")


def search(retries: DeleteRetries, kept: type[KeptPoints] = KeptPoints) -> tuple[int, set[str]]:
    """The number of orders of events, and what went wrong in any of them."""
    first = machine(keep_latest=1)
    points = kept(keep_latest=1, retries=retries)
    worlds, number, wrong = [World(machine=dataclasses.replace(first, kept=points))], 0, set[str]()
    for _ in range(DEPTH):
        worlds = [after for world in worlds for after in moves(world)]
        number += len(worlds)
        wrong |= {world.wrong for world in worlds if world.wrong}
        worlds = [world for world in worlds if not world.wrong]
    wrong |= {ends_well(world) for world in worlds[:: max(1, len(worlds) // 50)]}
    return number, wrong - {""}


def test_no_order_of_failures_tries_too_often_says_it_twice_or_leaves_points() -> None:
    number, wrong = search(DeleteRetries())
    assert wrong == set()
    assert number > 2000, "the search must be one"


class TriesAll(DeleteRetries):
    """Planted mistake: whatever fails, all are asked for at each look."""

    def to_try(self, names: tuple[str, ...], deleting: bool, now_s: float) -> tuple[str, ...]:
        return names


class GivesUp(DeleteRetries):
    """Planted mistake: what has failed once is never tried again."""

    def to_try(self, names: tuple[str, ...], deleting: bool, now_s: float) -> tuple[str, ...]:
        return () if self.fails else names


class ForgetsWhatIsUnderWay(DeleteRetries):
    """Planted mistake: another one is tried before the last has answered."""

    def to_try(self, names: tuple[str, ...], deleting: bool, now_s: float) -> tuple[str, ...]:
        return super().to_try(names, False, now_s)


class SaysEach(KeptPoints):
    """Planted mistake: each failure is said."""

    def deleted(
        self, event: Deleted, now_s: float
    ) -> tuple[KeptPoints, tuple[DeletesFail | DeletesWork, ...]]:
        after, tell = super().deleted(event, now_s)
        said = (DeletesFail(name=event.failed[0], reason=event.reason),) if event.reason else tell
        return after, said


@pytest.mark.quick("retries0-KeptPoints-too early")
@pytest.mark.parametrize(
    ("retries", "kept", "reason"),
    [
        (TriesAll(), KeptPoints, "too early"),
        (GivesUp(), KeptPoints, "points are left"),
        (ForgetsWhatIsUnderWay(), KeptPoints, "one beside another"),
        (DeleteRetries(), SaysEach, "said twice"),
    ],
)
def test_the_search_catches_a_planted_mistake(
    retries: DeleteRetries, kept: type[KeptPoints], reason: str
) -> None:
    assert any(reason in wrong for wrong in search(retries, kept)[1])


def test_it_is_tried_after_5_10_20_up_to_320_seconds() -> None:
    retries, now_s = DeleteRetries(), 100.0
    for wait_s in WAITS:
        retries = retries.failed(now_s)
        assert retries.to_try(("a", "b"), False, now_s + wait_s - 1) == ()
        now_s += wait_s
        assert retries.to_try(("a", "b"), False, now_s) == ("a",)
    assert retries.worked().to_try(("a", "b"), True, now_s) == ("a", "b")


def test_what_a_pin_or_a_newer_claim_keeps_is_no_failure() -> None:
    state, _ = committed(machine(keep_latest=1), key(1))
    state, actions = committed(state, key(2))
    assert actions[1:] == [DeletePoints(names=(key(1).point_name,))]
    state, actions = state.on(Deleted(names=(), failed=(key(1).point_name,)))
    assert actions == ()
    assert state.on(ClaimChecked(key=None, newer=False))[1] == (DeletePoints(names=(key(1).point_name,)),)
