"""How long a step may take before whoever waits in it gives up: a first one, one that may compile, one like
those before it.

Pure; it knows no group and no clock.
"""

from __future__ import annotations

from orchestrator.trainer.phases import PHASE_LIMITS_S, SAVE_WAIT

COMPILE_LIMIT_S = 1800.0  # of a step in which blocks may be compiled: the first, and any with a new shape


def step_limit_s(least_s: float, last_step_s: float | None, may_compile: bool) -> float:
    """Seconds that a collective waits for a peer that says nothing: five times the last step, at least
    `least_s`. `last_step_s` None: some member's process makes its first step, of which nobody knows how long
    it takes. `may_compile`: a peer may be compiling, in any step, for it sees shapes that others do not.
    """
    limit_s = PHASE_LIMITS_S[SAVE_WAIT] if last_step_s is None else max(least_s, 5 * last_step_s)
    return max(limit_s, COMPILE_LIMIT_S) if may_compile else limit_s
