"""Measures how long a process was silent although it could run and its judge could hear it.

A process on a busy host is late for everything and has failed at nothing. Linux counts for each thread how
long it ran and how long it waited for a CPU (`/proc/<pid>/task/<tid>/schedstat`), also under a CPU quota.
Where the system does not tell, only the judge's own delays are left out of the silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
_RUNS, _STOPPED = "R", "Tt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """A thread's seconds on a CPU and in wait for one since it began, and its state (`R`, `S`, `T`, ...)."""

    ran_s: float
    waited_s: float
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLook:
    """A process at the time `at_s` (monotonic clock of its machine). `threads` by their ids; none if the
    process is gone.
    """

    at_s: float
    threads: Mapping[int, Thread] = field(default_factory=dict)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return bool(self.threads) and all(thread.state in _STOPPED for thread in self.threads.values())


def look_at_process(pid: int, now: float, root: Path = _PROC) -> ProcessLook | None:
    """The process at this moment; None if the system does not tell, or there is no `pid` (0)."""
    if not pid or not (root / "self" / "schedstat").exists():
        return None
    threads = dict[int, Thread]()
    with suppress(OSError):  # it has ended
        for folder in (root / str(pid) / "task").iterdir():
            with suppress(OSError, ValueError, IndexError):  # this thread has
                ran, waited, _ = (folder / "schedstat").read_text().split()
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                threads[int(folder.name)] = Thread(
                    ran_s=int(ran) / 1e9, waited_s=int(waited) / 1e9, state=state
                )
    return ProcessLook(at_s=now, threads=threads)


def ran_s(before: ProcessLook, after: ProcessLook) -> float:
    """The CPU time that the process used between two looks."""
    return sum(max(0.0, now.ran_s - then.ran_s) for then, now in _pairs(before, after))


def starved_share(before: ProcessLook, after: ProcessLook) -> float:
    """The share of the CPU time that the process wanted between two looks and did not get, from 0 to 1: so
    much of the time between them it could not run. 0 for one that wanted none.
    """
    passed_s = max(0.0, after.at_s - before.at_s)
    ran, waited = ran_s(before, after), 0.0
    for then, now in _pairs(before, after):
        never_ran = then.state == now.state == _RUNS and now.ran_s == then.ran_s
        # Linux adds a wait when it ends
        waited += passed_s if never_ran else max(0.0, now.waited_s - then.waited_s)
    if (before.is_stopped or after.is_stopped) and ran > 0:
        return 1.0  # it is stopped and continued repeatedly
    return waited / (ran + waited) if waited else 0.0


def starved_s(before: ProcessLook, after: ProcessLook) -> float:
    """For how long the process could not run between two looks; see `starved_share`."""
    return max(0.0, after.at_s - before.at_s) * starved_share(before, after)


def _pairs(before: ProcessLook, after: ProcessLook) -> list[tuple[Thread, Thread]]:
    new = Thread(ran_s=0.0, waited_s=0.0, state="")
    return [(before.threads.get(tid, new), thread) for tid, thread in after.threads.items()]


class Silence:
    """The silence of one process. `lasts_s` is its duration. `counted_s` leaves out the time in which the
    process was starved or the judge was late. All times are seconds of one monotonic clock.
    """

    def __init__(self, now: float, look_every_s: float, process: ProcessLook | None = None) -> None:
        """Starts the silence `now`. The judge means to look every `look_every_s` seconds; `process` is its
        first look.
        """
        self.counted_s = self.lasts_s = 0.0
        self._every_s, self._last = look_every_s, now
        self._newest = process
        self._idle_s = 0.0  # counted since the process was seen at work
        self._worked = False  # between the last two looks

    def look(self, now: float, process: ProcessLook | None = None) -> float:
        """Notes that the process is still silent. Returns `counted_s`."""
        passed_s, before = now - self._last, self._newest
        excused_s = max(0.0, passed_s - self._every_s)
        self._worked, is_first = False, before is None and process is not None
        if before is not None and process is not None:
            excused_s = max(excused_s, passed_s * starved_share(before, process))
            self._worked = ran_s(before, process) > 0 or _wants_cpu(process)
        counted_s = max(0.0, passed_s - excused_s)
        self.lasts_s += passed_s
        self.counted_s += counted_s
        # nobody has seen what it did before the first look
        self._idle_s = 0.0 if self._worked or is_first else self._idle_s + counted_s
        self._last, self._newest = now, process
        return self.counted_s

    @property
    def is_at_work(self) -> bool:
        """Returns whether the process used CPU time between the last two looks, or waits for a CPU. False if
        the system does not tell.
        """
        return self._worked

    def stands_still(self, frozen_s: float, hung_s: float) -> bool:
        """Returns whether the process must be ended: it could run for the last `frozen_s` and did not, or
        could answer for `hung_s` and did not. False for one that is gone.
        """
        if self._newest is not None and not self._newest.threads:
            return False
        return self._idle_s > frozen_s or self.counted_s > hung_s


def _wants_cpu(process: ProcessLook) -> bool:
    return any(thread.state == _RUNS for thread in process.threads.values())
