"""Deletes resume points on request: orphans, and points that retention lets go.

Orphans are on no history any more: the run was rewound to before them, or an interrupted launch committed
them. Nothing else deletes orphans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.checkpoint.commit.retention import NEEDED_TO_RELEASE, spared, to_delete
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import Survey, mean_losses
from orchestrator.inspect.status.point_rows import names_of

if TYPE_CHECKING:
    from orchestrator.config.schema import ResumeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result for a point: `deleted`, or why it was `kept` ("": in a dry run, it would be deleted). `why`
    is the reason for its deletion.
    """

    point: str
    deleted: bool = False
    kept: str = ""
    why: str = field(default="", compare=False)


def orphans_of(store: RunStore, seen: Survey) -> dict[str, str]:
    """The committed points that are off the history, each with the reason."""
    keys = {name: parse_point_name(name) for name in names_of(store, seen)}
    why = {name: seen.lineage.why_orphan(key) for name, key in keys.items() if key}
    return {name: f"orphan: {reason}" for name, reason in why.items() if reason}


def prune(store: RunStore, orphans: Mapping[str, str], by: str, run_id: str, dry_run: bool) -> list[Pruned]:
    """Deletes `orphans` (with why each is one), oldest first, each COMMIT first. Pinned ones and another
    run's stay.

    A launch may be active on the run meanwhile: it never continues from an orphan. After a kill, repeating
    the call continues. Raises `StorageError`.
    """
    return [_prune(store, name, why, by, run_id, dry_run) for name, why in orphans.items()]


def _prune(store: RunStore, name: str, why: str, by: str, run_id: str, dry_run: bool) -> Pruned:
    if kept := _why_kept(store, name):
        return Pruned(point=name, kept=kept, why=why)
    if dry_run:
        return Pruned(point=name, why=why)
    if not store.may_delete(name, by, "an orphan is pruned", run_id):
        return Pruned(point=name, kept="somebody has just pinned it", why=why)
    store.delete_point(name)
    store.deleted(name)
    return Pruned(point=name, deleted=True, why=why)


def _why_kept(store: RunStore, name: str) -> str:
    if store.is_foreign(name):
        return "it belongs to another run"
    if (pin := store.pins().get(name)) is not None:
        return pin.why
    return ""


def release(
    store: RunStore, seen: Survey, keep: ResumeConfig, by: str, run_id: str, dry_run: bool
) -> list[Pruned]:
    """Deletes the points of the history that `keep` lets go, oldest first, each COMMIT first.

    That somebody deletes them is durable before, under the name that a pin would take, and stays: so nobody
    misses them. While the newest attempt has not said its end, none goes: a launch that lives does this by
    itself, and one that begins may need any of them. A point counts as kept only if its digests are right;
    damaged ones stay, and count for nothing. Raises `StorageError`.
    """
    newest = store.newest_claim()
    if newest is None:
        return []
    healthy = list[str]()
    damaged = set[str]()
    for name in reversed(seen.points):
        if len(healthy) >= max(keep.keep_latest, NEEDED_TO_RELEASE):
            break
        healthy += [] if store.verify_point(name) else [name]
        damaged |= set() if name in healthy else {name}
    points = [name for name in seen.points if name not in damaged]
    also = spared(points, keep.keep_every, keep.keep_best, mean_losses(seen))
    claim = store.parents()[0][-1] if store.parents()[0] else None
    parent = claim.parent.point_name if claim is not None and claim.parent is not None else None
    # damaged points may be those that would release an older one: two whole ones stay then, at least
    latest = max(keep.keep_latest, NEEDED_TO_RELEASE) if damaged else keep.keep_latest
    names = to_delete(points, latest, parent, healthy, also)
    why = f"retention: {latest} newer ones are kept (resume.keep_latest)"
    ended = store.read_end(newest.number) is not None
    if ended and not dry_run:
        for name in store.deletions().intersection(store.leftovers()):
            store.discard(name)  # a kill interrupted its deletion
    return [_release(store, name, newest.number if ended else 0, why, by, run_id, dry_run) for name in names]


def _release(
    store: RunStore, name: str, attempt: int, why: str, by: str, run_id: str, dry_run: bool
) -> Pruned:
    """`attempt`: the newest one, which has ended; 0: it has not."""
    if not attempt:
        return Pruned(point=name, kept="the newest attempt has not ended: a launch may need it", why=why)
    if kept := _why_kept(store, name):
        return Pruned(point=name, kept=kept, why=why)
    if dry_run:
        return Pruned(point=name, why=why)
    if not store.may_delete(name, by, "resume.keep_latest", run_id):
        return Pruned(point=name, kept="somebody has just pinned it", why=why)
    if store.next_claim_exists(attempt):
        store.deleted(name)
        return Pruned(point=name, kept="a launch has begun meanwhile, and may need it", why=why)
    store.delete_point(name)
    return Pruned(point=name, deleted=True, why=why)
