"""The rendezvous as a value, for a search: worlds that differ elsewhere share it and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from orchestrator.elastic.rendezvous import Rendezvous


class SharedRendezvous:
    """A `Rendezvous` in one state, which is never changed: an event leads to another one. Those of one search
    are one object where their states are equal in everything, names included, so that what an event leads to
    is worked out once.

    `everyone` and `told` are the numbers of the machine's `snapshot`.
    """

    __slots__ = ("_after", "_known", "_machine", "attempt", "control_requests", "everyone", "told")

    def __init__(
        self,
        machine: Rendezvous,
        known: dict[Hashable, SharedRendezvous],
        everyone: Hashable,
        told: dict[str, Hashable],
    ) -> None:
        self._machine, self._known = machine, known
        self._after: dict[Hashable, tuple[Any, SharedRendezvous]] = {}
        self.attempt, self.control_requests = machine.attempt, machine.control_requests
        self.everyone, self.told = hash(everyone), {name: hash(facts) for name, facts in told.items()}

    def after(self, event: Hashable, happens: Callable[[Rendezvous], Any]) -> tuple[Any, SharedRendezvous]:
        """What the machine answers to an event, and itself after it; equal events must do the same."""
        found = self._after.get(event)
        if found is None:
            machine = self._machine.copy()
            answer = happens(machine)
            found = self._after[event] = answer, self.another(machine)
        return found

    def another(self, machine: Rendezvous) -> SharedRendezvous:
        """A machine of the same search."""
        return shared(machine, self._known)

    def forget(self) -> None:
        """Ends the search: its machines lead to one another, and only looking for garbage would find them."""
        for machine in self._known.values():
            machine._after.clear()
        self._known.clear()


def shared(machine: Rendezvous, known: dict[Hashable, SharedRendezvous]) -> SharedRendezvous:
    """The one of `known` in the state of `machine`, which nobody else may change from now on."""
    everyone, told = machine.snapshot()
    group, states = machine._group, machine._states
    # The snapshot, and what it leaves out: in which order members came, the formations, delays of nodes whose
    # members are gone, and whether a formation waits for its journal. Of requests the model's members say
    # nothing but what the snapshot holds; settings and bounds are those of the search.
    state = (
        everyone,
        frozenset(told.items()),
        tuple(group.waiting),
        tuple(states.formed.values()),
        frozenset(machine._backoff._delays.items()),
        frozenset(group._deadlines.items()),
        machine._pending is not None,
    )
    found = known.get(state)
    if found is None:
        found = known[state] = SharedRendezvous(machine, known, everyone, told)
    return found
