"""Selects a run's point for work with its weights, and makes the document of the result.

`checkpoint.export.export` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.export.export import export_point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import decided
from orchestrator.errors import RefusedError
from orchestrator.records.points import Damage
from orchestrator.storage.open import absolute


def export(
    uri: str,
    store: RunStore,
    out: str | Path,
    point: str | None,
    dtype: str | None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Makes the document of `export --json`. Raises `RefusedError` for a run without points and for an
    unknown point, and as `export_point` does.
    """
    name, damages = which_point(uri, store, point)
    exported = export_point(store, name, out, dtype, say=say)
    return {
        "run": uri,
        "point": name,
        "out": absolute(str(out)),
        "dtype": exported.dtype,
        "weights_digest": exported.weights_digest,
        "bytes": exported.num_bytes,
        "files": [entry.path for entry in exported.files],
        "damages": [asdict(damage) for damage in damages],
    }


def which_point(uri: str, store: RunStore, point: str | None) -> tuple[str, tuple[Damage, ...]]:
    """Returns the named point, also one off the history. Without a name: the newest point on it that is
    healthy by sizes, and the reasons against newer ones.
    """
    if point is not None:
        names = store.point_names()
        if point not in names:
            raise RefusedError(
                f"{uri} has no resume point {point}; it has {', '.join(names) or 'none'}",
                code="point.unknown",
            )
        return point, ()
    found, damages = decided(
        store, lambda seen: choose_point(store, seen, "latest", fast=True), with_steps=False
    )
    if found is None:
        raise RefusedError(
            f"{uri} has no resume point yet; `orchestrator save` asks a running launch for one",
            code="run.no_point",
        )
    return found.name, damages
