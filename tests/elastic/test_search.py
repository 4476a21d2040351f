"""All interleavings of three members, three generations, two steps and two coordinators over the real
rendezvous.

The rules of docs/membership.md hold in every state; each wrong version planted here is caught by the same
search. The widest bounds are searched in `make chaos`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from orchestrator.elastic.formation import Action, Form, JoinAnswer, RendezvousSettings
from orchestrator.elastic.next_formation import Continuation, held_by_all, newest_complete
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.records.membership import ControlRequests, JoinRequest, Source
from tests.elastic.group_model import Rules, search


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """The search keeps everything it makes; looking for garbage in it takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


class ByStepAlone(Rendezvous):
    """The newest state is that of the greatest step: a member that was cut off wins over the history without
    it.
    """

    def _newest(self, requests: Sequence[JoinRequest]) -> Continuation:
        held = [(r.key.step, r.member, r.key) for r in requests if r.key is not None]
        if held:
            _, member, key = max(held, key=lambda h: h[:2])
            return Continuation(parent=key, source=member, point=None)
        return super()._newest(())


class PointsIgnored(Rendezvous):
    """While any member holds a state, a newer committed point is forgotten."""

    def _newest(self, requests: Sequence[JoinRequest]) -> Continuation:
        point = self._states.point
        if any(r.key is not None for r in requests):
            self._states.point = None
        found = super()._newest(requests)
        self._states.point = point
        return found


class AttemptsIgnored(Rendezvous):
    """States of two attempts are compared by generation and step."""

    def _newest(self, requests: Sequence[JoinRequest]) -> Continuation:
        held = [(r.key.generation, r.key.step, r.member, r.key) for r in requests if r.key is not None]
        if not held:
            return super()._newest(())
        generation, step, member, key = max(held, key=lambda h: h[:3])
        if self._states.point is not None and (
            self._states.point.key.generation,
            self._states.point.key.step,
        ) > (
            generation,
            step,
        ):
            return Continuation(parent=self._states.point.key, source=None, point=self._states.point)
        return Continuation(parent=key, source=member, point=None)


class FirstShard(Rendezvous):
    """Whoever holds any shard of the greatest key holds the state."""

    def _newest(self, requests: Sequence[JoinRequest]) -> Continuation:
        held = held_by_all(requests)
        best = max(held, key=lambda h: h.key, default=None)
        point = self._states.point
        if best is None or (point is not None and point.key > best.key):
            return super()._newest(())
        return Continuation(parent=best.key, source=best.member, point=None)


class KeepsNewest(Rendezvous):
    """A new generation keeps the newest memory point, however few hold it."""

    def tick(self, now: float) -> list[Action]:
        actions = super().tick(now)
        if self._pending is None:
            return actions
        formation, requests = self._pending
        copies = [h for h in held_by_all(requests.values()) if h.source in (Source.STAGED, Source.NEIGHBOUR)]
        newest = newest_complete(copies, None)
        formation = replace(formation, keep=newest and newest.key)
        self._pending = formation, requests
        return [replace(a, formation=formation) if isinstance(a, Form) else a for a in actions]


class ReceivedForgotten(Rendezvous):
    """What a member received does not count before it has heard that all have theirs."""

    def join(self, request: JoinRequest, now: float) -> JoinAnswer | None:
        held = tuple(h for h in request.holdings if h.source is not Source.RECEIVED)
        return super().join(replace(request, holdings=held), now)


class BusyIgnored(Rendezvous):
    """A member that says that it is still in its step counts as silent nevertheless."""

    def extend_deadline(self, member: str, until: float) -> None:
        pass


class EndUnsaid(Rendezvous):
    """Members of the current generation are not told that it is over when one of them is said to be dead."""

    def control_requests(self, attempt: int, generation: int, acknowledged_step: int) -> ControlRequests:
        wanted = super().control_requests(attempt, generation, acknowledged_step)
        current = self._group.current
        inside = current is not None and (attempt, generation) == current.identity
        return replace(wanted, ended=wanted.ended and not inside)


class UnsavedUnheard(Rendezvous):
    """That a group had nothing but its last state to save is not heard."""

    def join(self, request: JoinRequest, now: float) -> JoinAnswer | None:
        return super().join(replace(request, unsaved=False), now)


SHARDED = Rules(sharded=True, generations=2, attempts=1, faults=2, saves=False)
LAST_SAVES = Rules(
    num_members=2,
    generations=7,
    steps=1,
    attempts=1,
    faults=2,
    saves=False,
    last_saves=True,
    settings=RendezvousSettings(forming_failures=3),
)
TWO_SHARDS = replace(SHARDED, num_members=2, cuts_off=False)


@pytest.mark.quick("three shards, one loss, one step", "three shards, one loss, nobody cut off")
@pytest.mark.parametrize(
    ("rules", "at_least"),
    [
        pytest.param(Rules(), 200_000, marks=pytest.mark.chaos),
        pytest.param(Rules(steps=1), 50_000, marks=pytest.mark.chaos),
        # two members need a fault less to get as far, so these see a fourth generation
        pytest.param(Rules(num_members=2), 50_000, marks=pytest.mark.chaos),
        (Rules(min_workers=2, faults=2), 10_000),
        (Rules(power_losses=True, generations=2, faults=2), 25_000),
        (LAST_SAVES, 4_000),
        pytest.param(replace(LAST_SAVES, num_members=3), 50_000, marks=pytest.mark.chaos),
        (replace(SHARDED, faults=1, steps=1), 2_500),
        (replace(SHARDED, faults=1, cuts_off=False), 3_000),
        pytest.param(replace(SHARDED, faults=1), 10_000, marks=pytest.mark.chaos),
        pytest.param(SHARDED, 150_000, marks=pytest.mark.chaos),
        pytest.param(replace(SHARDED, num_members=2, saves=True), 50_000, marks=pytest.mark.chaos),
        pytest.param(replace(SHARDED, saves=True, faults=1), 40_000, marks=pytest.mark.chaos),
        pytest.param(replace(SHARDED, generations=3, cuts_off=False), 150_000, marks=pytest.mark.chaos),
    ],
    ids=[
        "three members",
        "three, one step",
        "two members",
        "at least two of three",
        "hosts without power",
        "last saves of two",
        "last saves of three",
        "three shards, one loss, one step",
        "three shards, one loss, nobody cut off",
        "three shards, one loss",
        "three shards, two losses",
        "two shards, saved",
        "three shards, saved",
        "three shards, three generations",
    ],
)
def test_every_interleaving_keeps_every_rule(rules: Rules, at_least: int):
    result = search(rules)
    assert result.broken == "", "\n".join((result.broken, *result.trace))
    assert result.states > at_least, f"only {result.states} states: the model has lost some of its events"


PASSED_OVER = "what is whole among the members is not continued"
LOST_POINT = "the history goes on without a committed point"
SEALED_LOST = "a step before the sealed memory point is lost to one failure"
NOT_COMPLETE = "the source does not hold the parent's state"
GIVEN_UP = "a member that lives is given up"
# bounds that are just wide enough for the mistake to show, within those that are searched above
FEW = Rules(num_members=2, generations=2, steps=1, attempts=1, faults=2)
POWER = Rules(power_losses=True, generations=2, faults=2)
WRONG = {
    "by step alone": (replace(FEW, machine=ByStepAlone), PASSED_OVER),
    "points ignored": (replace(FEW, machine=PointsIgnored), LOST_POINT),
    "attempts ignored": (replace(FEW, machine=AttemptsIgnored, attempts=2, faults=3), PASSED_OVER),
    "voted saves never given up": (replace(FEW, gives_up=False), LOST_POINT),
    "received over the old state": (
        replace(FEW, receiver_is_blank=False, generations=3),
        "torn weights in use",
    ),
    "parents not chained": (
        replace(FEW, chained_parents=False, faults=3),
        "weights and journal disagree",
    ),
    "the end is not heard": (replace(POWER, hear_the_end=False), GIVEN_UP),
    "the end is not said": (replace(POWER, machine=EndUnsaid), GIVEN_UP),
    "a busy member is silent": (replace(POWER, machine=BusyIgnored), GIVEN_UP),
    "any shard is enough": (replace(SHARDED, machine=FirstShard), NOT_COMPLETE),
    "what was received does not count": (replace(FEW, machine=ReceivedForgotten), PASSED_OVER),
    "no memory point is kept": (replace(TWO_SHARDS, keeps=False), SEALED_LOST),
    "the newest memory point is kept": (replace(TWO_SHARDS, machine=KeepsNewest, steps=3), SEALED_LOST),
    "last saves are failures to start": (
        replace(LAST_SAVES, machine=UnsavedUnheard),
        "a run is stopped because its last save fails",
    ),
    "unresponsive members waited for": (
        Rules(settings=RendezvousSettings(missing_grace_s=math.inf), generations=2),
        "all that can come have joined, and no generation forms",
    ),
}


@pytest.mark.quick(
    "by step alone",
    "parents not chained",
    "what was received does not count",
    "any shard is enough",
)
@pytest.mark.parametrize("name", WRONG)
def test_the_search_catches_what_is_wrong(name: str):
    rules, expected = WRONG[name]
    result = search(rules)
    assert result.broken == expected, (
        f"{name}: found {result.broken or 'nothing'} after {result.states} states"
    )
