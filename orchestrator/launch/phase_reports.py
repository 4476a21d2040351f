"""Which of its phases a member reports to the coordinator, and when: those that others may have to wait
for (membership rule 23).

Pure: times are seconds of one monotonic clock. It knows no call: neither how a report is sent nor how often.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.trainer.phases import ENDING, FEED_WAIT, PHASE_LIMITS_S, STEP

LONG_PHASE_S = 1.0  # a shorter one is nobody's business
AGAIN_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseReports:
    """`told` is the phase that the coordinator knows of, since `told_at`; a member begins in a step, which
    need not be told.
    """

    told_at: float
    told: str = STEP

    def due_s(self, phase: str, since: float, step_limit_s: float, now: float) -> float | None:
        """For how many seconds the others are to wait for this member, which is in `phase` since `since`;
        None: nothing is to be said. `step_limit_s`: how long its step may last once its generation has ended.

        A step is reported at once, because it ends the phase that was reported before; another phase only
        when it lasts.
        """
        new = phase != self.told and (phase == STEP or now - since > LONG_PHASE_S)
        # waiting for the feed ends no generation: the feed has its own limit (rule 23)
        again = phase == self.told == FEED_WAIT and now - self.told_at > AGAIN_S
        if not new and not again:
            return None
        return step_limit_s if phase == ENDING else PHASE_LIMITS_S[phase]
