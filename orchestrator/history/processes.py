"""Whether the processes that could write for an attempt are known to have ended, on the machine that asks.

Of other machines' processes it knows nothing, and says so; it ends none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from orchestrator.cluster.machine import Process, machine_id, process_start
from orchestrator.history.claim_files import ClaimFiles
from orchestrator.history.claims import Claim


class AllEnded:
    """Whether all that could write for an attempt is known to have ended: the driver of its launch, and the
    process that writes its journal, both of this machine.

    That a driver is dead is not enough: its coordinator may live on for a while. An attempt without a journal
    is not known to have ended, for its coordinator may be about to begin.
    """

    def __init__(self, store: ClaimFiles, process_of: Callable[[int], Process | None]) -> None:
        """`process_of`: the process that writes an attempt's journal, None while that is not known."""
        self._store, self._process_of = store, process_of
        self._processes: dict[int, Process] = {}

    def __call__(self, claim: Claim) -> bool:
        """See the class."""
        if claim.number not in self._processes and (found := self._process_of(claim.number)):
            self._processes[claim.number] = found
        process = self._processes.get(claim.number)
        return process is not None and has_ended(*process) and driver_was_killed(self._store, claim)


def driver_was_killed(store: ClaimFiles, claim: Claim) -> bool:
    """Whether the launch that made the claim was begun on this machine, by a process that is no more."""
    driver = next((c for c in store.claims() if c.launch == claim.launch and c.pid), None)
    if driver is None:
        return False
    if driver.machine:
        return has_ended(driver.machine, driver.pid, driver.pid_start)
    if driver.host != socket.gethostname():  # a claim of a version that said no more
        return False
    try:
        os.kill(driver.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives, and is another user's
    return False


def has_ended(machine: str, pid: int, pid_start: str) -> bool:
    """Whether this process is surely no more: it was one of this machine since that was booted, and none has
    its pid now, or another one that began later. False where nobody can know.
    """
    if not (machine and pid_start) or machine != machine_id():
        return False
    found = process_start(pid)
    return found is not None and found != pid_start
