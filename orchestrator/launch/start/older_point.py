"""Continues an older resume point within the same start, if the workers found the newest one damaged.

The driver compares sizes and headers before it claims. The workers compare the digests of what they load. The
damage that they report ends their attempt. The driver then verifies it, marks the point and plans the next
attempt of the same start, as a manual start would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import ReadAtOnce
from orchestrator.coordinator.attempt.begin_launch import mark_damaged
from orchestrator.errors import StorageError
from orchestrator.launch.start.preview import look_ahead
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.records.points import Damage, damaged_point
from orchestrator.records.run_status import RunStatus

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec


def is_damaged_load(status: RunStatus) -> bool:
    """Whether the attempt ended because its workers could not load a damaged point, without a request to
    stop.
    """
    return status.ended == "failed" and bool(status.damages) and not status.stopping


def plan_older_point(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    found: Sequence[Damage],
    known: Sequence[Damage],
    attempt: int,
    say: Callable[[str], None],
) -> ResumePlan:
    """The plan of the next attempt after the workers of `attempt` found these damages.

    `known` are those that this start has found before; the plan's `damages` are all of them. Marks the
    damaged point.

    Raises `StorageError` if this process reads the committed bytes correctly although a worker did not, or
    cannot read them: then nothing is known to be damaged (membership rule 16). Raises `WantedPointError` for
    a point that `resume.from` names, `ResumePointError` if no older point is whole, and `RefusedError` if the
    configuration may not continue the older one.
    """
    before = {damage.point for damage in known}
    if before.issuperset(damage.point for damage in found):
        raise damaged_point(found)  # it should not have been loaded again
    for damage in found:
        say(f"attempt {attempt} ends: its workers cannot load {damage}")
    confirmed = store.confirmed(found, ReadAtOnce(store.storage, say, "reading the damaged file again"))
    if not confirmed:
        listed = "; ".join(map(str, found))
        raise StorageError(
            f"{listed}, as a worker read it; this process reads the bytes that were committed, so that the "
            f"point is not damaged. Check the memory, the disk and the mount of {store.storage.root} on the "
            "worker's machine, then start the same command again",
            code="point.read_differently",
        )
    mark_damaged(store, confirmed, f"attempt {attempt}")
    damages = (*known, *confirmed)
    plan = look_ahead(store, job, spec, draw=True, known=damages)
    if plan.action == "refuse":
        raise plan.refusal
    return replace(plan, damages=damages)
