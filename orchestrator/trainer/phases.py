"""What a member is doing, as far as others may have to wait for it, and for how many seconds they do.

A save or a load may take longer than a rendezvous waits for the unresponsive (membership rule 23).
"""

from __future__ import annotations

STEP, FORMING, LOAD, FEED_WAIT, SAVE_WAIT = "step", "forming", "load", "feed wait", "save wait"
BETWEEN = "between steps"  # a step was finished just now
# it has heard that its generation is over and is still in a step (it computes, or compiles, or waits for
# NCCL); it says itself how long that may take
ENDING = "ending a step"
# a group forms in four steps (store, rendezvous, process group, comparison) of at most 10 s each
PHASE_LIMITS_S = {STEP: 0.0, BETWEEN: 0.0, FORMING: 45.0, LOAD: 900.0, FEED_WAIT: 900.0, SAVE_WAIT: 900.0}
