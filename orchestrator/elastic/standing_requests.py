"""What is asked of every generation at its next step boundary, until it was done: a save, a stop, a re-form.

Pure values; who asks, and which generation hears of it, the rendezvous knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.records.membership import ControlRequests

NOTHING = ControlRequests(ended=False, save=False, stop=False, reform=False, acknowledged_step=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingRequests:
    """`stop`: save and stop. `save` is the name of the save that is asked for, `saves_done` are those that
    have begun.
    """

    stop: bool = False
    save: str | None = None
    saves_done: frozenset[str] = frozenset()

    def on_save(self, request: str) -> StandingRequests:
        """A save is asked for as `request`; one that has begun is not taken up again."""
        return self if request in self.saves_done else replace(self, save=request)

    def on_save_answered(self, request: str) -> StandingRequests:
        """The save asked for as `request` has begun."""
        save = None if self.save == request else self.save
        return replace(self, save=save, saves_done=self.saves_done | {request})

    def of_running(
        self, *, save_only: bool, reform: bool, leaving_saves: bool, in_time: bool, over: bool
    ) -> ControlRequests:
        """What the running generation hears. `save_only`: it was formed for nothing but a save. `reform`:
        others wait to come in, or some wait to leave, with `leaving_saves` after a save. `in_time`: a save is
        committed before any of them is gone. `over`: the run was stopped.

        A stop is also a way to meet again, so it leaves no re-form to be asked for. A re-form waits for the
        save that is asked for with it: one that it does not need comes after it, but for the one before a
        `resize`, for which nobody waits.
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
