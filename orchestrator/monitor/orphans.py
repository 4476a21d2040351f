"""Deletes the resume points that no history leads to any more: those behind which the run was rewound, or
which a launch that was cut off committed. Nothing else deletes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.resume.store import RunStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What became of an orphan: `deleted`, or why it was `kept` ("": a dry run, it would be deleted)."""

    point: str
    deleted: bool = False
    kept: str = ""


def prune(store: RunStore, orphans: Iterable[str], by: str, run_id: str, dry_run: bool) -> list[Pruned]:
    """Deletes `orphans`, oldest first, each COMMIT first; those that are pinned or another run's stay.

    A launch may work on the run meanwhile: it never goes on from an orphan. After a kill in the middle the
    same call goes on. Raises `StorageError`.
    """
    return [_prune(store, name, by, run_id, dry_run) for name in orphans]


def _prune(store: RunStore, name: str, by: str, run_id: str, dry_run: bool) -> Pruned:
    if store.is_foreign(name):
        return Pruned(point=name, kept="it belongs to another run")
    if (pin := store.pins().get(name)) is not None:
        return Pruned(point=name, kept=f"pinned by {pin.by}: {pin.reason}" if pin.by else pin.reason)
    if dry_run:
        return Pruned(point=name)
    if not store.may_delete(name, by, "an orphan is pruned", run_id):
        return Pruned(point=name, kept="somebody has just pinned it")
    store.delete_point(name)
    store.deleted(name)
    return Pruned(point=name, deleted=True)
