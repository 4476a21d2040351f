"""Checks that a joining worker has the coordinator's storage and clock.

A folder of the same path on the worker's own disk does not reach the coordinator. The worker's saves would be
given up one after the other, while its disk fills. A clock that is wrong by hours produces wrong times in the
journal and in metrics, and buckets refuse its requests.
"""

from __future__ import annotations

import asyncio
import time

from orchestrator.checkpoint.commit.commit_driver import in_daemon_thread
from orchestrator.errors import StorageError
from orchestrator.records.membership import MachineProof, StillWaiting, Unfit
from orchestrator.storage.files import Storage

CLOCK_LIMIT_S = 900.0  # the clock error that the servers of buckets tolerate
_TRIES, _AGAIN_S = 3, 0.5  # a network file system may show a new file late


async def checked(storage: Storage, proof: MachineProof) -> Unfit | StillWaiting | None:
    """Returns what is wrong, or None. `StillWaiting`: the storage cannot be read here now."""
    off_s = proof.unix_s - time.time()
    if abs(off_s) > CLOCK_LIMIT_S:
        ahead = "ahead of" if off_s > 0 else "behind"
        return Unfit(
            code="machine.clock",
            text=f"this machine's clock is {abs(off_s):,.0f} s {ahead} the coordinator's "
            f"({_text(proof.unix_s)} instead of {_text(time.time())}, allowed: {CLOCK_LIMIT_S:.0f} s)",
        )
    found: bytes | None = None
    for number in range(_TRIES):
        if number:
            await asyncio.sleep(_AGAIN_S)
        try:
            found = await in_daemon_thread(lambda: storage.read(proof.probe))
        except FileNotFoundError:
            continue
        except StorageError:
            await asyncio.sleep(_AGAIN_S)
            return StillWaiting()
        break
    if found == proof.token.encode():
        return None
    return Unfit(
        code="machine.storage",
        text=f"{storage.root} on this machine is another folder than on the coordinator's: what is written "
        "there does not arrive in the run; mount the run's storage on this machine",
    )


def _text(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
