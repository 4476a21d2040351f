"""The phases of a member, and how many seconds the other members wait for it in each.

A save or a load may take longer than a rendezvous waits for unresponsive members (membership rule 23).
"""

from __future__ import annotations

STEP, FORMING, LOAD, FEED_WAIT, SAVE_WAIT = "step", "forming", "load", "feed wait", "save wait"
BETWEEN = "between steps"  # a step has just finished
# The member knows that its generation is over and is still in a step (it computes, compiles or waits for
# NCCL). It reports how long that may take.
ENDING = "ending a step"
# a group forms in four stages (store, rendezvous, process group, comparison) of at most 10 s each
PHASE_LIMITS_S = {STEP: 0.0, BETWEEN: 0.0, FORMING: 45.0, LOAD: 900.0, FEED_WAIT: 900.0, SAVE_WAIT: 900.0}


# Computes how long a step may take before a collective that waits in it times out.
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
