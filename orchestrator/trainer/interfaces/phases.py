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
