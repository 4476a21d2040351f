"""At which steps a save is wanted: a pure machine over steps, minutes and requests.

Rank 0 asks it; every rank tells it what happened, so that whoever becomes rank 0 goes on with the same
answers. It knows neither why a save was asked for nor what became of one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from orchestrator.records.membership import ControlRequests

# control bits that rank 0 adds to the summary of a step
SAVE, STOP, REFORM = 1, 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTriggers:
    """`every_steps` and `every_minutes` as configured (None: not). `step` is the newest state that a save was
    begun of, or that the generation began with, and `since_s` when that was, in seconds of one clock.

    Guarantees: a save that is due stays due until one has begun, so that one which could not begin because
    another was undecided begins later, once; afterwards saves are due at the same multiples of `every_steps`
    as if none had been late.
    """

    every_steps: int | None
    every_minutes: float | None
    since_s: float
    step: int = 0

    def due(self, step: int, now_s: float) -> bool:
        """Whether the state of `step` is to be saved, if nobody asks for it."""
        by_steps = self.every_steps is not None and step // self.every_steps > self.step // self.every_steps
        return by_steps or (
            self.every_minutes is not None and now_s - self.since_s >= 60 * self.every_minutes
        )

    def begun(self, step: int, now_s: float) -> SaveTriggers:
        """All ranks have begun the save of `step`."""
        return dataclasses.replace(self, step=step, since_s=now_s)

    def formed(self, step: int) -> SaveTriggers:
        """A generation goes on from the state of `step`. What was saved beyond it is trained again, and so is
        due again; what was due before it stays due.
        """
        return dataclasses.replace(self, step=min(self.step, step))

    def first(self, step: int) -> SaveTriggers:
        """This member's first generation goes on from the state of `step`: what was due before is others'."""
        return dataclasses.replace(self, step=step)


def asked_for(wanted: ControlRequests, *, due: bool, is_free: bool, num_busy: int) -> int:
    """The control bits that rank 0 adds to a summary: what the coordinator wants of the generation, and a
    save that is `due`, or that comes before a planned re-form. `is_free`: no save of rank 0 is undecided;
    `num_busy` ranks held one at the step before.

    A save that the coordinator did not ask for waits until rank 0 is free, and with a re-form until all were,
    so that it keeps none from happening. What the coordinator wants is repeated until its first vote came.
    """
    free = is_free and not (wanted.reform and num_busy)
    save = SAVE if wanted.save or (free and (due or wanted.resize)) else 0
    return save | (STOP if wanted.stop else 0) | (REFORM if wanted.reform else 0)


def carried_out(control: int, num_busy: int) -> int:
    """What of a summary's control bits all ranks do at its step, where `num_busy` of them hold a save that is
    not answered.

    A save is begun by all or by none, and only where all are free. A re-form that was asked for together
    with it waits for it: what the group holds may be in nobody else's hands.
    """
    return control & ~(SAVE | REFORM) if num_busy and control & SAVE else control
