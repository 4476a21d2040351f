"""Requests that are repeated to every generation at its next step boundary until they are done.

The requests are a save, a stop and a re-form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.records.membership import ControlRequests

NOTHING = ControlRequests(ended=False, save=False, stop=False, reform=False, acknowledged_step=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingRequests:
    """`stop`: save and stop. `save`: the name of the requested save. `saves_done`: those that have begun."""

    stop: bool = False
    save: str | None = None
    saves_done: frozenset[str] = frozenset()

    def on_save(self, request: str) -> StandingRequests:
        """Requests a save as `request`. One that has begun is not started again."""
        return self if request in self.saves_done else replace(self, save=request)

    def on_save_answered(self, request: str) -> StandingRequests:
        """The save requested as `request` has begun."""
        save = None if self.save == request else self.save
        return replace(self, save=save, saves_done=self.saves_done | {request})

    def of_running(
        self, *, save_only: bool, reform: bool, leaving_saves: bool, in_time: bool, over: bool
    ) -> ControlRequests:
        """Computes the requests to the running generation.

        `save_only`: it was formed only for a save. `reform`: other members wait to be admitted, or some wait
        to leave, with `leaving_saves` after a save. `in_time`: a save will be committed before any of them is
        gone. `over`: the run was stopped.

        A stop also makes the members meet again, and thus replaces a re-form. A re-form waits for the save
        that is requested together with it. A save that the re-form does not need comes after it. The
        exception is the save before a `resize`, for which nothing waits.
        """
        reform = reform and not self.stop
        return ControlRequests(
            ended=over,
            save=save_only or (leaving_saves if reform else self.save is not None),
            stop=self.stop,
            reform=reform,
            acknowledged_step=0,
            resize=reform and in_time,
        )
