"""Scripted faults for the tests and the fault campaigns.

A plan says at which named place, step and rank a process dies, freezes, hangs or fails. The stages call a
hook at their named places. Without a plan, the hook does nothing.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

Hook = Callable[[str, int, int], None]  # (place, step, rank; -1 where there is none)
KILL, FREEZE, HANG, FAIL = "kill", "freeze", "hang", "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The fault that strikes a process at `place`, `step` and `rank` (-1: any), once fault number `after` has
    struck (-1: at once). It strikes once.

    `kill`: SIGKILL of the process. `freeze`: SIGSTOP, until it receives SIGCONT. `hang`: this thread waits
    for ever. `fail`: a `RuntimeError`, as when the network does not answer.
    """

    place: str
    step: int = -1
    rank: int = -1
    action: str = KILL
    after: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """The faults of one test. Each leaves a mark in a folder when it strikes, so that it never strikes
    twice.
    """

    folder: str
    faults: tuple[Fault, ...] = ()

    def kill(self, place: str, *, step: int = -1, rank: int = -1, after: int = -1) -> FaultPlan:
        """Returns the plan with one more SIGKILL."""
        return self.add(KILL, place, step=step, rank=rank, after=after)

    def add(self, action: str, place: str, *, step: int = -1, rank: int = -1, after: int = -1) -> FaultPlan:
        """Returns the plan with one more fault; see `Fault`."""
        fault = Fault(action=action, place=place, step=step, rank=rank, after=after)
        return replace(self, faults=(*self.faults, fault))

    def to_json(self) -> str:
        """The plan as text for another process."""
        return json.dumps({"folder": self.folder, "faults": [asdict(f) for f in self.faults]})

    def struck(self) -> list[int]:
        """The numbers of the faults that have struck."""
        return [n for n in range(len(self.faults)) if os.path.exists(self._mark(n))]

    def step_struck(self, number: int) -> int:
        """The step at which fault `number` struck (-1: none). Raises `OSError` if it has not struck."""
        with open(self._mark(number)) as mark:
            return int(mark.read())

    def _mark(self, number: int) -> str:
        return os.path.join(self.folder, f"fault-{number}")

    def strike(self, place: str, step: int, rank: int) -> None:
        """Carries out the plan's fault for exactly this place, step and rank, if there is one."""
        for number, fault in enumerate(self.faults):
            if fault.place != place or fault.step not in (-1, step) or fault.rank not in (-1, rank):
                continue
            if fault.after >= 0 and not os.path.exists(self._mark(fault.after)):
                continue
            try:
                with open(self._mark(number), "x") as mark:
                    mark.write(str(step))
            except FileExistsError:
                continue
            _strike(fault)


def _strike(fault: Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            # to this thread, which takes it before its next step; one to the process is taken by the main
            # thread, and this one would continue until that is awake
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
        case _:
            raise RuntimeError(f"scripted failure at {fault.place}")


def hook(plan_json: str) -> Hook:
    """The hook of a process: that of the plan, or one that does nothing if there is none ("")."""
    if not plan_json:
        return no_fault
    plan = json.loads(plan_json)
    return FaultPlan(folder=plan["folder"], faults=tuple(Fault(**f) for f in plan["faults"])).strike


def no_fault(place: str, step: int, rank: int) -> None:
    """The hook of every run that is not a test."""
