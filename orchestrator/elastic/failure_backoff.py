"""Backoff after repeated failures of generations.

It decides which nodes' newcomers wait, when members probe ports, and when the run must stop. It uses only
counts and times.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from orchestrator.elastic.formation import RendezvousSettings, StopRun


class FailureBackoff:
    """Limits every repetition of a failed generation (I6).

    Newcomers are blamed by node, not by name: the process that replaces a killed one has a new name and the
    same broken network.
    """

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._delays: dict[str, tuple[int, float]] = {}  # node -> (times blamed, not before)
        # consecutive generations without a first step, with no member lost and none to blame
        self._formless = 0
        self._probed = False  # members have probed each other's ports since the last of these
        self._strikes = 0  # consecutive generations that lost a member at step `_struck`
        self._struck = -1

    @property
    def probe_ports(self) -> bool:
        """Whether members should probe ports before the next generation.

        True if two consecutive generations failed before their first step with no member to blame.
        """
        return self._formless >= 2 and not self._probed

    def probed(self) -> None:
        """Records that the members were asked to probe."""
        self._probed = True

    def not_before(self, node: str) -> float:
        """Returns the earliest time at which a newcomer from `node` may be admitted (seconds)."""
        return self._delays.get(node, (0, float("-inf")))[1]

    def resting(self, now: float) -> tuple[str, ...]:
        """Returns the nodes whose newcomers have to wait."""
        return tuple(node for node, (_, until) in self._delays.items() if until > now)

    def blame(self, nodes: Iterable[str], now: float, *, first_is_free: bool = False) -> None:
        """Delays newcomers from `nodes`, because a generation with them failed before its first step.

        The delay doubles each time. With `first_is_free` there is none the first time.
        """
        for node in sorted(set(nodes)):
            times = self._delays.get(node, (0, 0.0))[0]
            delay = min(self._settings.forming_s * 2**times, self._settings.longest_delay_s)
            delay = 0.0 if first_is_free and not times else delay
            self._delays[node] = (times + 1, now + delay)

    def failed_to_start(self) -> None:
        """Records a generation that ended before its first step without a loss or a newcomer."""
        self._formless += 1
        self._probed = False

    def lost_member(self, step: int) -> None:
        """Records a generation that ended because a member was lost; `step` is its newest step."""
        self._strikes = self._strikes + 1 if step == self._struck else 1
        self._struck = step

    def progressed(self, step: int, newcomer_nodes: Iterable[str]) -> None:
        """Records an applied step of the running generation. Its newcomers are trusted from now on."""
        self._formless, self._probed = 0, False
        if step > self._struck:
            self._strikes = 0
        for node in newcomer_nodes:
            self._delays.pop(node, None)

    def verdict(self) -> StopRun | None:
        """Returns why the run must stop now, or None."""
        if self._strikes >= self._settings.same_step_failures:
            reason = (
                f"{self._strikes} generations in a row lost a member right after step {self._struck} "
                f"(allowed: {self._settings.same_step_failures - 1}); stopped before it kills the others. "
                f"Look at the journal for what step {self._struck + 1} trains and at the dead workers' logs"
            )
            return StopRun(reason=reason, code="training.deadly_step")
        if self._formless >= self._settings.forming_failures:
            reason = (
                f"{self._formless} generations in a row ended before their first step, with no member lost "
                f"(allowed: {self._settings.forming_failures - 1}); check that the nodes reach each other on "
                "all ports"
            )
            return StopRun(reason=reason, code="cluster.group_not_formed")
        return None

    def copy(self) -> FailureBackoff:
        """An independent copy."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._delays = dict(self._delays)
        return twin

    def snapshot(self) -> Hashable:
        """Returns everything that later answers depend on, except the delays.

        `not_before` returns the delays by node.
        """
        return self._formless, self._probed, self._strikes, self._struck
