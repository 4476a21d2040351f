"""What the driver hands to a coordinator, and the two machines that a coordinator makes of it: who trains
(`LaunchMachine`), and which points exist (`CommitMachine`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.coordinator.attempt import Attempt
from orchestrator.coordinator.launch_machine import LaunchMachine
from orchestrator.elastic.failure_budget import FailureBudget
from orchestrator.elastic.formation import RendezvousSettings
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.elastic.storage_trouble import STORAGE_LIMIT_S, StorageTrouble
from orchestrator.parts.node_folder import Nodes
from orchestrator.resume.commit_machine import CommitMachine
from orchestrator.resume.kept_points import KeptPoints

VOTE_LIMIT_S = 600.0  # how long a save of which votes are missing may stand still


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorStart:
    """What the driver hands to coordinator: the attempt it claimed, and what the run needs from then on.
    `nodes`: on whose disks parts of points may lie; None: this machine's alone are reached.
    """

    attempt: Attempt
    storage: str
    min_workers: int
    max_workers: int
    expected: int
    max_failures: int
    keep_latest: int
    run: str
    global_batch_size: int
    seq_len: int
    flat_config: dict[str, Any]
    rng: dict[str, Any]
    fault_plan: str = ""
    keep_every: int | None = None
    keep_best: int = 0
    sharded: bool = False  # no worker holds the whole state
    stop_by: str = ""  # who wants the launch to stop before its budgets are spent
    storage_limit_s: float = STORAGE_LIMIT_S
    rendezvous: RendezvousSettings = RendezvousSettings()
    nodes: Nodes | None = None


def launch_machine(start: CoordinatorStart, attempt: Attempt) -> LaunchMachine:
    """Who trains in `attempt`, which is `start.attempt` or one of its launch that a restarted coordinator
    claimed.
    """
    earlier, point = attempt.earlier, attempt.point
    rendezvous = Rendezvous(
        attempt=attempt.number,
        launch=attempt.launch,
        min_workers=start.min_workers,
        max_workers=start.max_workers,
        expected=start.expected,
        settings=start.rendezvous,
        previous=earlier.previous,
        first_attempt=start.attempt.number,
        rebase=lambda parent, cursor: attempt.step_label,  # noqa: ARG005
    )
    if point is not None:
        rendezvous.set_newest_point(point.key, point.cursor, point.name)
    return LaunchMachine(
        rendezvous,
        FailureBudget(start.max_failures, earlier.failures, attempt.step_label),
        StorageTrouble(start.storage_limit_s),
        last_step=earlier.last_step,
        previous=earlier.previous.members if earlier.previous else (),
        infos=earlier.members,
        finished={member: (reason, step) for member, reason, step in earlier.finished},
        ended=earlier.ended,
        saved=attempt.parent,
        answered=earlier.answered,
        reported=earlier.reported,
        budgets=attempt.budgets,
        stop_by=start.stop_by,
        sharded=start.sharded,
    )


def commit_machine(start: CoordinatorStart, attempt: Attempt) -> CommitMachine:
    """Which points of `attempt` are committed and kept."""
    return CommitMachine(
        attempt=attempt.number,
        kept=KeptPoints(
            keep_latest=start.keep_latest,
            keep_every=start.keep_every,
            keep_best=start.keep_best,
            names=attempt.inherited,
            losses=attempt.losses,
            pinned=attempt.point.name if attempt.point else None,
        ),
        vote_limit_s=VOTE_LIMIT_S,
    )
