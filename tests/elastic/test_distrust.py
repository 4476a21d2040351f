"""After replicas differed, no generation continues a state that may be wrong, in any order of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from orchestrator.elastic.formation import Form, Formation, GroupSize
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import JoinRequest
from orchestrator.records.steps import StateKey
from tests.elastic.builders import ATTEMPT, key, rendezvous, request

NAMES = "abc"
ACTS = 60
SEEDS = 400


@dataclass
class Group:
    """Members that train, leave with what they hold and join again, over the real rendezvous. `wrong` are the
    states that no generation may continue.
    """

    machine: Rendezvous
    random: Random
    now: float = 0.0
    states: dict[str, StateKey | None] = field(default_factory=lambda: dict.fromkeys(NAMES))
    inside: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(NAMES))
    point: StateKey | None = None
    wrong: set[StateKey] = field(default_factory=set)
    formed: list[Formation] = field(default_factory=list)
    step: int = 0

    def act(self) -> None:
        self.now += self.random.choice([0.1, 1.0, 20.0])
        name = self.random.choice(NAMES)
        self.random.choice([self.join, self.join, self.die, self.train, self.train, self.save, self.differ])(
            name
        )
        for action in self.machine.tick(self.now):
            if isinstance(action, Form):
                self.form(action.formation)

    def join(self, name: str) -> None:
        leaves = self.inside[name]
        asked: JoinRequest = request(name, self.states[name], leaves)
        self.machine.join(asked, self.now)

    def die(self, name: str) -> None:
        self.machine.dead(name, self.now)
        self.states[name] = self.inside[name] = None

    def train(self, _: str) -> None:
        """All members of the newest generation that still train do one step."""
        if not self.formed:
            return
        newest = self.formed[-1]
        self.step += 1
        for member in newest.members:
            state = self.states[member]
            if self.inside[member] == newest.generation and state is not None and self.trains(member):
                self.states[member] = key(newest.generation, state.step + 1)

    def trains(self, member: str) -> bool:
        return self.machine.view_for(member) is not None

    def save(self, _: str) -> None:
        """The newest state of the newest generation is committed."""
        states = [self.states[m] for m in self.formed[-1].members if self.trains(m)] if self.formed else []
        keys = [state for state in states if state is not None]
        if keys and (self.point is None or max(keys) > self.point):
            self.point = max(keys)
            self.machine.set_newest_point(self.point, Cursor(), self.point.point_name)

    def differ(self, _: str) -> None:
        """The replicas of the newest generation differ at a save."""
        if not self.formed or self.random.random() < 0.5:
            return
        at = key(self.formed[-1].generation, 0)
        self.wrong |= {
            state
            for state in self.states.values()
            if state is not None and (self.point is None or state > self.point)
        }
        self.machine.distrust(at, self.now)

    def form(self, formation: Formation) -> None:
        parent = formation.parent
        assert parent not in self.wrong, f"generation {formation.generation} continues {parent}"
        self.machine.formed(formation.generation, self.now)
        self.formed.append(formation)
        for member in formation.members:
            self.inside[member] = formation.generation
            self.states[member] = key(formation.generation, formation.step)


class Trusting(Rendezvous):
    """Forgets what was distrusted."""

    def distrust(self, key: StateKey, now: float) -> None:
        super().distrust(key, now)
        self._states.distrusted = None


def played(made: Callable[[], Rendezvous]) -> list[Group]:
    """One random history of each seed."""
    groups = [Group(made(), Random(seed)) for seed in range(SEEDS)]
    for group in groups:
        for _ in range(ACTS):
            group.act()
    return groups


def test_no_order_of_events_continues_a_state_of_differing_replicas() -> None:
    groups = played(rendezvous)
    after = [g for g in groups if g.wrong and max(w.generation for w in g.wrong) < g.formed[-1].generation]
    assert len(after) > SEEDS // 4, "groups must have been formed after replicas differed"


def test_the_search_catches_a_rendezvous_that_trusts_what_members_bring_back() -> None:
    def trusting() -> Rendezvous:
        return Trusting(
            attempt=ATTEMPT, launch="launch", size=GroupSize(min_workers=1, max_workers=3, expected=3)
        )

    with pytest.raises(AssertionError, match="continues"):
        played(trusting)
