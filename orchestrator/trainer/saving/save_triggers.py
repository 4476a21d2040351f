"""The state machine that decides at which steps a save is due, from steps, minutes and requests.

Rank 0 queries it. Every rank updates it, so that another rank that becomes rank 0 gives the same answers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from orchestrator.records.membership import ControlRequests

# control bits that rank 0 adds to the summary of a step
SAVE, STOP, REFORM = 1, 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveTriggers:
    """The configured triggers and the last save.

    `every_steps` and `every_minutes` are as configured (None: disabled). `step` is the newest state that a
    save was begun of, or that the generation began with. `since_s` is the time of that, in seconds of one
    clock.

    Guarantees: a save that is due stays due until one has begun. If it could not begin because another was
    undecided, it begins later, once. Afterwards saves are due at the same multiples of `every_steps` as if
    none had been late.
    """

    every_steps: int | None
    every_minutes: float | None
    since_s: float
    step: int = 0

    def due(self, step: int, now_s: float) -> bool:
        """Whether the state of `step` is to be saved without a request."""
        by_steps = self.every_steps is not None and step // self.every_steps > self.step // self.every_steps
        return by_steps or (
            self.every_minutes is not None and now_s - self.since_s >= 60 * self.every_minutes
        )

    def begun(self, step: int, now_s: float) -> SaveTriggers:
        """All ranks have begun the save of `step`."""
        return dataclasses.replace(self, step=step, since_s=now_s)

    def formed(self, step: int) -> SaveTriggers:
        """A generation continues from the state of `step`.

        States saved beyond `step` are trained again and become due again. Saves that were due before stay
        due.
        """
        return dataclasses.replace(self, step=min(self.step, step))

    def first(self, step: int) -> SaveTriggers:
        """This member's first generation continues from `step`. Earlier saves were due on other members."""
        return dataclasses.replace(self, step=step)


def asked_for(wanted: ControlRequests, *, due: bool, is_free: bool, num_busy: int) -> int:
    """Computes the control bits that rank 0 adds to a summary.

    They are the coordinator's requests for the generation, and a save that is `due` or that precedes a
    planned re-form. `is_free`: no save of rank 0 is undecided. `num_busy`: the number of ranks with an
    undecided save at the previous step.

    A save that the coordinator did not request waits until rank 0 is free; with a re-form it waits until all
    ranks were free. Thus it does not prevent a requested save or re-form. A request of the
    coordinator is repeated until the first vote for it has arrived.
    """
    free = is_free and not (wanted.reform and num_busy)
    save = SAVE if wanted.save or (free and (due or wanted.resize)) else 0
    return save | (STOP if wanted.stop else 0) | (REFORM if wanted.reform else 0)


def carried_out(control: int, num_busy: int) -> int:
    """Returns the control bits of a summary that all ranks carry out at its step.

    `num_busy` of the ranks hold a save that is not answered. A save is begun by all ranks or by none, and
    only if all are free. A re-form that was requested together with the save waits for it, because no other
    rank may hold the group's state.
    """
    return control & ~(SAVE | REFORM) if num_busy and control & SAVE else control
