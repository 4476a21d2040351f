"""Limits how long a run continues although something fails repeatedly.

`FailureBackoff` limits failed generations, `FailureBudget` failures without a finished step between them
(`cluster.max_failures`), and `StorageOutage` the time for which storage fails. They use only counts and
times. The journal stores what a restarted coordinator needs: each failure with the step after which it
occurred, and the newest step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.elastic.formation import RendezvousSettings, StopRun
from orchestrator.errors import StorageError
from orchestrator.storage.tries import Backoff


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
        backoff = Backoff(first_s=self._settings.forming_s, most_s=self._settings.longest_delay_s)
        for node in sorted(set(nodes)):
            times = self._delays.get(node, (0, 0.0))[0]
            delay = 0.0 if first_is_free and not times else backoff.nth(times)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something ended unexpectedly, when `step` was the last finished step."""

    step: int
    reason: str


class FailureBudget:
    """The failures of one launch.

    The arguments `failures` and `last_step` are the state before its coordinator was restarted.
    """

    def __init__(self, max_failures: int, failures: Iterable[Failure] = (), last_step: int = 0) -> None:
        self._max = max_failures
        self.failures: tuple[Failure, ...] = tuple(failures)
        self._last_step = last_step

    def failed(self, reason: str) -> Failure:
        """Counts a failure, after the last finished step."""
        failure = Failure(step=self._last_step, reason=reason)
        self.failures = (*self.failures, failure)
        return failure

    def applied(self, step: int) -> None:
        """Records `step` as the newest step.

        Failures before it no longer count, unless the run goes back before them.
        """
        self._last_step = step

    def verdict(self) -> str | None:
        """Returns why the run must stop now, or None."""
        here = [failure.reason for failure in self.failures if failure.step >= self._last_step]
        if len(here) <= self._max:
            return None
        listed = "\n".join(f"  {reason}" for reason in dict.fromkeys(here))
        return (
            f"{len(here)} failures after step {self._last_step} without a finished step between them, "
            f"cluster.max_failures={self._max}:\n{listed}"
        )

    def copy(self) -> FailureBudget:
        """An independent copy."""
        return FailureBudget(self._max, self.failures, self._last_step)


Result = TypeVar("Result")
AGAIN_S = 0.5  # between two attempts
# How long training continues without a journal on disk, and how long a finished run tries to save its last
# state.
STORAGE_LIMIT_S = 300.0


class StorageOutage:
    """When a storage failure began, and its reason. All times are seconds of one monotonic clock."""

    def __init__(self, limit_s: float = STORAGE_LIMIT_S, meanwhile: str = "Training continues") -> None:
        """`meanwhile`: the state of the run, for reports to the user."""
        self._limit_s, self._meanwhile = limit_s, meanwhile
        self._since: float | None = None
        self._reason = ""

    def failed(self, reason: str, since: float) -> str | None:
        """Records that an operation that began at `since` failed.

        Returns what to report to the user; None if the failure was already reported.
        """
        self._reason = reason
        if self._since is not None:
            return None
        self._since = since
        return (
            f"{reason}. {self._meanwhile}; once it has failed for {self._limit_s:g} s the run stops. "
            "Nothing that was committed is lost"
        )

    def worked(self) -> str | None:
        """Records that an operation succeeded.

        Returns what to report to the user; None if there was no failure.
        """
        if self._since is None:
            return None
        self._since = None
        return "storage works again"

    def verdict(self, now: float) -> str | None:
        """Returns why the run must stop now, or None."""
        if self._since is None or now - self._since < self._limit_s:
            return None
        return (
            f"storage has failed for {now - self._since:.0f} s (allowed: {self._limit_s:g} s): "
            f"{self._reason}; when storage works again, start the same command: it continues from the newest "
            "resume point"
        )


def until_storage_works(
    work: Callable[[], Result],
    limit_s: float,
    meanwhile: str,
    tell: Callable[[str], None] = lambda text: None,
    wait: Callable[[float], None] = time.sleep,
) -> Result:
    """Returns what `work` returns, and retries it while storage fails.

    Raises a `StorageError` with the duration of the failure once that reaches `limit_s`. `tell` is called at
    the first failure, and when storage works again.
    """
    trouble = StorageOutage(limit_s, meanwhile)
    while True:
        began = time.monotonic()
        try:
            result = work()
        except StorageError as error:
            if text := trouble.failed(str(error), began):
                tell(text)
            if reason := trouble.verdict(time.monotonic()):
                raise StorageError(reason, code="storage.outage") from error
        else:
            if text := trouble.worked():
                tell(text)
            return result
        wait(AGAIN_S)
