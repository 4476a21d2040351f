"""Where a new run may lie: neither inside another run's folder, whose next start deletes what is not its own,
nor around one.

It reads storage and changes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.errors import RefusedError
from orchestrator.resume.run_file import RUN_FILE
from orchestrator.resume.store import RunStore


def refuse_inside(store: RunStore) -> None:
    """Raises `RefusedError` if the new run of `store` would lie in a run's folder, at any depth and also by
    way of a symbolic link. A run's folder has a run.json, or (where that is lost) claims or resume points.
    """
    folder = store.storage.root
    for above in dict.fromkeys((*Path(folder).parents, *Path(os.path.realpath(folder)).parents)):
        other = RunStore(store.storage.beside(str(above)))
        if other.storage.exists(RUN_FILE) or other.claim_numbers() or other.point_names():
            raise RefusedError(
                f"the new run's folder {folder} would lie inside the run {above}: a start of that run takes "
                "what lies in its folder for its own, and deletes what it does not know; nothing is "
                "written. Give a folder that is in no run (for a start: another run.storage or run.name)"
            )


def refuse_around(store: RunStore, known: str) -> None:
    """Raises `RefusedError` if the new run's folder would contain a run: that in the folder `known`, at any
    depth, or one that lies directly in it.
    """
    folder = store.storage.root
    inner = [known] if Path(folder) in Path(known).parents else []
    names = store.storage.list("")
    inner += [f"{folder}/{name}" for name in names if store.storage.exists(f"{name}/{RUN_FILE}")]
    if inner:
        raise RefusedError(
            f"the new run's folder {folder} would contain the run {inner[0]}: the files of both would mix; "
            "nothing is written. Give a folder of its own, e.g. one beside that run"
        )
