"""The value that the driver passes to a coordinator, and the two machines that a coordinator builds from it.

`LaunchMachine` decides which members train, and `CommitMachine` which points exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.node_local.node_folder import Nodes
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.machine.launch_machine import LaunchMachine, LaunchTerms
from orchestrator.elastic.failure import STORAGE_LIMIT_S, FailureBudget, StorageOutage
from orchestrator.elastic.formation import GroupSize, RendezvousSettings
from orchestrator.elastic.rendezvous import Rendezvous

_WITH_CODE = ("model.factory", "train.objective", "train.optimizer")
_GROUPS = "train.param_groups"
VOTE_LIMIT_S = 600.0  # how long a save with missing votes may make no progress


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorStart:
    """What the driver passes to a coordinator: the attempt it claimed, and the run's settings.

    `nodes`: the nodes whose disks may hold parts of points; None: only this machine's disk is reached.
    """

    attempt: Attempt
    storage: str
    size: GroupSize
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
    fixed: bool = False  # no worker can be replaced, so the first one that is lost ends the run
    stop_by: str = ""  # the origin of a request to stop before the budgets are spent
    storage_limit_s: float = STORAGE_LIMIT_S
    rendezvous: RendezvousSettings = RendezvousSettings()
    nodes: Nodes | None = None
    loss_window: int | None = None  # the values that a policy about losses needs; None: there is none


def launch_machine(start: CoordinatorStart, attempt: Attempt) -> LaunchMachine:
    """Builds the launch machine of `attempt`.

    It is `start.attempt`, or an attempt of its launch that a restarted coordinator claimed.
    """
    earlier, point = attempt.earlier, attempt.point
    rendezvous = Rendezvous(
        attempt=attempt.number,
        launch=attempt.launch,
        size=start.size,
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
        StorageOutage(start.storage_limit_s),
        LaunchTerms(
            budgets=attempt.budgets,
            stop_by=start.stop_by,
            sharded=start.sharded,
            fixed=start.fixed,
            plug_ins=plug_ins(start.flat_config),
        ),
        earlier,
        saved=attempt.parent,
    )


def plug_ins(flat_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the settings that name code of the user which computes with weights, as `field=module:name`.

    Callbacks are none: they run in a process without the weights.
    """
    named = [(field, flat_config.get(field)) for field in _WITH_CODE]
    named += [(_GROUPS, group.get("optimizer")) for group in flat_config.get(_GROUPS) or ()]
    return tuple(dict.fromkeys(f"{field}={value}" for field, value in named if value and ":" in value))


def commit_machine(start: CoordinatorStart, attempt: Attempt) -> CommitMachine:
    """Builds the commit machine of `attempt`."""
    return CommitMachine(
        attempt=attempt.number,
        kept=KeptPoints(
            keep_latest=start.keep_latest,
            keep_every=start.keep_every,
            keep_best=start.keep_best,
            best_by=attempt.best_by,
            names=attempt.inherited,
            losses=attempt.losses,
            pinned=attempt.point.name if attempt.point else None,
        ),
        vote_limit_s=VOTE_LIMIT_S,
    )
