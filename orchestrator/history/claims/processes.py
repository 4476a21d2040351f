"""Determines whether the processes that could write for an attempt have ended, on this machine.

For processes of other machines the answer is no. It ends none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from orchestrator.cluster.machine import Process, machine_id, process_start
from orchestrator.history.claims.claim_files import ClaimFiles
from orchestrator.history.claims.claims import Claim


class AllEnded:
    """Whether all processes that could write for an attempt are known to have ended.

    They are the driver of its launch, and the process that writes its journal, both of this machine. A dead
    driver is not enough, because its coordinator may live on for a while. An attempt without a journal is not
    known to have ended, because its coordinator may be about to begin.
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
    """Whether the launch that made the claim was started on this machine, by a process that has ended."""
    driver = next((c for c in store.claims() if c.launch == claim.launch and c.pid), None)
    if driver is None:
        return False
    if driver.machine:
        return has_ended(driver.machine, driver.pid, driver.pid_start)
    if driver.host != socket.gethostname():  # a claim of a version that stored only this
        return False
    try:
        os.kill(driver.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is alive, and another user's
    return False


def has_ended(machine: str, pid: int, pid_start: str) -> bool:
    """Whether this process has certainly ended.

    It was a process of this machine since its last boot, and its pid is now unused, or used by a later
    process. False if that cannot be determined.
    """
    if not (machine and pid_start) or machine != machine_id():
        return False
    found = process_start(pid)
    return found is not None and found != pid_start
