"""All interleavings of three members, three generations, two steps and two coordinators over the real rendezvous.

The rules of MEMBERSHIP.md hold in every state; each wrong version planted here is caught by the same search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import pytest

from orchestrator.elastic.formation import NewestPoint
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.records import JoinRequest, StateKey
from tests.elastic.group_model import Rules, search

Choice = tuple[StateKey | None, str | None, NewestPoint | None]


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """The search keeps everything it makes; looking for garbage in it takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


class ByStepAlone(Rendezvous):
    """The newest state is that of the greatest step: a member that was cut off wins over the history that went on without it."""

    def _newest(self, requests: Iterable[JoinRequest]) -> Choice:
        held = [(r.key.step, r.member, r.key) for r in requests if r.key is not None]
        if held:
            _, member, key = max(held, key=lambda h: h[:2])
            return key, member, None
        return super()._newest(())


class PointsIgnored(Rendezvous):
    """A point newer than every member that is left is forgotten."""

    def _newest(self, requests: Iterable[JoinRequest]) -> Choice:
        requests = list(requests)
        point = self._point
        if any(r.key is not None for r in requests):
            self._point = None
        found = super()._newest(requests)
        self._point = point
        return found


class AttemptsIgnored(Rendezvous):
    """Generations of two attempts are compared by number."""

    def _newest(self, requests: Iterable[JoinRequest]) -> Choice:
        held = [r for r in requests if r.key is not None]
        point = self._point
        best = max(held, key=lambda r: (r.key.generation, r.key.step), default=None)  # type: ignore[union-attr]
        if best is None or best.key is None:
            return super()._newest(())
        if point is not None and (point.key.generation, point.key.step) > (best.key.generation, best.key.step):
            return point.key, None, point
        return best.key, best.member, None


class NobodyIsMissed(Rendezvous):
    """Silent members are waited for without end."""

    def _silent_from(self, member: str) -> float:  # noqa: ARG002
        return float("inf")


def test_three_members_three_generations_two_steps_and_two_coordinators_keep_every_rule():
    result = search(Rules(faults=3))
    assert result.broken == "", "\n".join((result.broken, *result.trace))
    assert result.states > 100_000, f"only {result.states} states: the model lost some of its events"


WRONG = {
    "by step alone": (Rules(machine=ByStepAlone, attempts=1), "a committed point|weights and journal|does not hold"),
    "points ignored": (Rules(machine=PointsIgnored, attempts=1), "without a committed point"),
    "attempts ignored": (Rules(machine=AttemptsIgnored, num_members=2, generations=4), "weights and journal|without a committed point"),
    "silent members waited for": (Rules(machine=NobodyIsMissed), "no generation forms"),
    "received over the old state": (Rules(receiver_is_blank=False, num_members=2, generations=4), "torn weights in use"),
    "parents not chained": (Rules(chained_parents=False), "weights and journal disagree"),
    "voted saves never given up": (Rules(gives_up=False), "without a committed point"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_search_catches(name: str):
    rules, expected = WRONG[name]
    result = search(rules)
    assert any(e in result.broken for e in expected.split("|") if result.broken), f"{name} was not caught"
    print(name, result)
