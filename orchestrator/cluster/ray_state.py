"""Ray's knowledge of actors: whether one is dead, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.cluster.ray_inventory import ACTOR_IDS, ACTOR_TABLE
from orchestrator.records.run_status import MemberInfo

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

NO_ERROR = "its process died without an error (SIGKILL, out of memory, or a crash)"

NODE_DIED = "its node died"


def cause_of_death(row: Mapping[str, Any] | None) -> str:
    """Why an actor died, by its row in Ray's table (`DeathCause`). Ray has neither signals nor exit codes, so
    some causes cannot be distinguished.
    """
    text = str((row or {}).get("DeathCause") or "")
    if "oom_context" in text or "NODE_OUT_OF_MEMORY" in text:
        return "killed by Ray: its node ran out of memory"
    if "NODE_DIED" in text or "node has crashed" in text or "node has died" in text:
        return NODE_DIED
    if "OWNER_DIED" in text:
        return "its node's agent died"
    if "RAY_KILL" in text:
        return "its node group was stopped"
    detail = re.search(r"Worker exit type: (\w+) Worker exit detail: ([^.]*)", text)
    if detail is None or detail.group(1) == "SYSTEM_ERROR":
        return NO_ERROR
    return f"its process ended ({detail.group(1)}: {detail.group(2)})"


def why_not_created(error: RayActorError) -> str | None:
    """What an actor's constructor raised, as `type: text`; None if the actor died of something else. Ray does
    not start such an actor again, even after an earlier restart.
    """
    if not error.actor_init_failed:
        return None
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    _, _, behind = text.rpartition('\n  File "')  # of the traceback: its frames, then the error
    raised = re.search(r"\n(\S.*)", behind, re.DOTALL)
    return raised.group(1) if raised else text


def ray_says(info: MemberInfo) -> str | None:
    """How the member's process ended, as Ray says; None if it lives.

    Also None if Ray says nothing: a GCS that does not answer, or has forgotten the actor, or a Ray without
    this table.
    """
    table = ACTOR_TABLE.found()  # the public state API needs the dashboard process
    row = table[0](info.actor_id) if table else None
    return cause_of_death(row) if row and row["State"] == "DEAD" else None


def is_death_of(row: Mapping[str, Any] | None, text: str) -> bool:
    """Returns whether a message of Ray's says that the process of the actor of this row has died. Ray names
    only the process.
    """
    pid, node = (row or {}).get("Pid"), ((row or {}).get("Address") or {}).get("NodeID")
    return bool(pid and node) and f"Worker PID: {pid} " in text and f"Node ID: {node} " in text


def told_of(actor: Any, text: str) -> bool:
    """`is_death_of` for a handle; False if that is unknown."""
    table = ACTOR_TABLE.found()
    if table is None or not ACTOR_IDS.found():
        return False
    return is_death_of(table[0](actor._actor_id.hex()), text)
