"""Decides which phases a member reports to the coordinator, and when.

They are phases for which others may have to wait (membership rule 23), and the member's activity if no step
is finished for long. Pure: times are seconds of one monotonic clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import FrameSummary

import orchestrator
from orchestrator.records.run_status import CODE, DATA, PEERS, Doing
from orchestrator.trainer.interfaces.job import ENDING, FEED_WAIT, PHASE_LIMITS_S, STEP

LONG_PHASE_S = 1.0  # shorter phases are not reported
AGAIN_S = 60.0
QUIET_S = 3.0  # a member without a step for this long reports its activity
_PACKAGE = os.path.dirname(os.path.abspath(orchestrator.__file__)) + os.sep
_COLLECTIVES = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    os.path.join(_PACKAGE, "trainer", "comm", "interruptible.py"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseReports:
    """Tracks the reported phase: `told` since `told_at`. A member begins in a step, which need not be
    reported.
    """

    told_at: float
    told: str = STEP

    def due_s(self, phase: str, since: float, step_limit_s: float, now: float) -> float | None:
        """The seconds for which the others must wait for this member, in `phase` since `since`; None: no
        report is due.

        `step_limit_s`: how long its step may last once its generation has ended. A step is reported at once,
        because it ends the phase reported before. Another phase is reported only when it lasts.
        """
        new = phase != self.told and (phase == STEP or now - since > LONG_PHASE_S)
        # waiting for the feed does not end a generation: the feed has its own limit (rule 23)
        again = phase == self.told == FEED_WAIT and now - self.told_at > AGAIN_S
        if not new and not again:
            return None
        return step_limit_s if phase == ENDING else PHASE_LIMITS_S[phase]


def doing(phase: str, stack: Sequence[FrameSummary], since_s: float) -> Doing:
    """The activity of a loop whose thread has this stack, the innermost frame last."""
    files = [frame.filename for frame in stack]
    if phase == FEED_WAIT:
        return Doing(kind=DATA, place="", since_s=since_s)
    if any(name in file for file in files for name in _COLLECTIVES):
        return Doing(kind=PEERS, place="", since_s=since_s)
    own = [frame for frame in stack if not _is_installed(frame.filename)]
    frame = (own or list(stack))[-1] if stack else None
    place = "" if frame is None else f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return Doing(kind=CODE, place=place, since_s=since_s)


def _is_installed(file: str) -> bool:
    """Whether a file belongs to this package, a library or the interpreter."""
    libraries = (
        f"{os.sep}site-packages{os.sep}",
        f"{os.sep}dist-packages{os.sep}",
        os.path.dirname(os.__file__),
    )
    return file.startswith((_PACKAGE, "<")) or any(part in file for part in libraries)
