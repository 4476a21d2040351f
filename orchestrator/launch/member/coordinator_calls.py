"""What a member exchanges with the coordinator beside its membership: the transport of its calls, the end of
its generation, and the phases that it reports.

`PhaseReports` decides which phases are reported: those for which others may have to wait (membership rule
23), and the activity of a member that finishes no step for long. It is pure: times are seconds of one
monotonic clock. `unreached` probes other members (membership rule 18). Importing this module does not import
torch.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any, Protocol

import orchestrator
from orchestrator.records.membership import GenerationView
from orchestrator.records.run_status import CODE, DATA, EVALUATES, PEERS, Doing
from orchestrator.trainer.interfaces.loop_interface import ENDING, EVAL, FEED_WAIT, PHASE_LIMITS_S, STEP

_PROBE_S = 3.0  # the timeout of a port


class UnansweredError(Exception):
    """A call was not answered: the coordinator is away, or frozen. Whether it had an effect is unknown."""


class Calls(Protocol):
    """Transports calls to the coordinator."""

    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        """Makes one call. Raises `UnansweredError` without an answer within `limit_s`, and what the call
        itself raised.
        """


def unreached(view: GenerationView) -> tuple[str, ...]:
    """The members whose stores this one cannot reach."""
    ranks = unreached_ranks(view.probe)
    return tuple(member for rank, member in enumerate(view.members) if rank in ranks)


def unreached_ranks(addresses: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """The ranks at these addresses that this process cannot reach, all tried in parallel within
    `_PROBE_S`.
    """

    def reaches(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, timeout=_PROBE_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = pool.map(reaches, addresses)
        return tuple(rank for rank, answer in enumerate(answers) if not answer)


# ------------------------------------------------------------------------------------ the end of a generation
Identity = tuple[int, int]  # (attempt, generation)


class GenerationEnd:
    """The end of one member's generation.

    `heard_at`: since when the member knows that its current generation is over (monotonic clock; None: it is
    not, or the member has left it).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Identity | None = None
        self._act: Callable[[], None] | None = None
        self.heard_at: float | None = None

    def enter(self, generation: Identity) -> None:
        """The member enters this generation."""
        with self._lock:
            self._inside, self._act, self.heard_at = generation, None, None

    def leave(self) -> None:
        """The member has left its generation. The generation's end no longer matters to it."""
        with self._lock:
            self._inside = self._act = self.heard_at = None

    def is_inside(self, generation: Identity) -> bool:
        """Whether the member is still in this generation."""
        return self._inside == generation

    def hear(self, generation: Identity) -> None:
        """Records that this generation is over."""
        with self._lock:
            if self._inside != generation:
                return
            self.heard_at, act = time.monotonic(), self._act
        if act is not None:
            act()

    def when_heard(self, generation: Identity, act: Callable[[], None]) -> None:
        """Registers `act` to be called when the end is recorded, in the thread that records it. Calls it at
        once if the end is already recorded.
        """
        with self._lock:
            assert self._inside == generation, f"a member of {self._inside} waits for the end of {generation}"
            self._act, known = act, self.heard_at is not None
        if known:
            act()


# ----------------------------------------------------------------------------------------------------- phases
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
    if phase in (FEED_WAIT, EVAL):
        return Doing(kind=DATA if phase == FEED_WAIT else EVALUATES, place="", since_s=since_s)
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
