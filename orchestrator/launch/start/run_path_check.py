"""Refuses a new run inside another run's folder, or around one.

A run's next start deletes files in its folder that are not its own. This reads storage and changes nothing.
"""

from __future__ import annotations

import os

from orchestrator.checkpoint.points.run_file import RUN_FILE
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import RefusedError
from orchestrator.storage.open import above, is_bucket


def refuse_inside(store: RunStore) -> None:
    """Raises `RefusedError` if the new run of `store` would be in a run's folder, at any depth.

    Symbolic links are resolved. A run's folder has a run.json, or (if that is lost) claims or resume points.
    """
    folder = store.storage.root
    real = folder if is_bucket(folder) else os.path.realpath(folder)
    for outer in dict.fromkeys((*above(folder), *above(real))):
        other = RunStore(store.storage.beside(outer))
        if other.storage.exists(RUN_FILE) or other.claim_numbers() or other.point_names():
            raise RefusedError(
                f"the new run's folder {folder} would lie inside the run {outer}: a start of that run "
                "deletes files in its folder that are not its own; nothing is written. Give a folder outside "
                "of all runs (for a start: another run.storage or run.name)",
                code="run.inside_run",
            )


def refuse_around(store: RunStore, known: str) -> None:
    """Raises `RefusedError` if the new run's folder would contain a run.

    That is the run in the folder `known`, at any depth, or one directly in the new folder.
    """
    folder = store.storage.root
    inner = [known] if folder in above(known) else []
    names = store.storage.list("")
    inner += [f"{folder}/{name}" for name in names if store.storage.exists(f"{name}/{RUN_FILE}")]
    if inner:
        raise RefusedError(
            f"the new run's folder {folder} would contain the run {inner[0]}: the files of both would mix; "
            "nothing is written. Give a folder of its own, e.g. one beside that run",
            code="run.around_run",
        )
