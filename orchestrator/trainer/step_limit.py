"""Computes how long a step may take before a collective that waits in it times out."""

from __future__ import annotations

from orchestrator.trainer.interfaces.phases import PHASE_LIMITS_S, SAVE_WAIT

# limit for a step in which blocks may be compiled: the first, and any with a new shape
COMPILE_LIMIT_S = 1800.0


def step_limit_s(least_s: float, last_step_s: float | None, may_compile: bool) -> float:
    """Returns the seconds that a collective waits for a silent peer: five times the last step, at least
    `least_s`.

    `last_step_s` None: some member's process makes its first step, of unknown duration. `may_compile`: a peer
    may be compiling, in any step, because it can get shapes that others do not.
    """
    limit_s = PHASE_LIMITS_S[SAVE_WAIT] if last_step_s is None else max(least_s, 5 * last_step_s)
    return max(limit_s, COMPILE_LIMIT_S) if may_compile else limit_s
