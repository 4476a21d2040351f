"""Determines for a quick look which steps in a run's journal are no longer steps of the run.

It reads only claims that are newer than these steps, the newest first. `history.claims.lineage` has the whole
history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import REWIND
from orchestrator.history.claims.claims import ClaimParent


class SetAside:
    """Whether a step lies behind a point to which a later attempt went back: by a rewind, or by a start with
    `resume.from`, whatever continued from there since. What only a crash took is no such step: it is trained
    again.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._claims = sorted(store.claim_numbers())  # not read yet
        self._went_back: list[tuple[int, tuple[int, int, int]]] = []  # attempt, its parent

    def __call__(self, step: Mapping[str, Any]) -> bool:
        """`step` is a line of the journal. Raises `StorageError`."""
        attempt, at = step["attempt"], (step["attempt"], step["generation"], step["step"])
        while self._claims and self._claims[-1] > attempt:
            self._look_at(self._claims.pop())
        return any(number > attempt and at > to for number, to in self._went_back)

    def _look_at(self, number: int) -> None:
        try:
            parent = self._store.read_parent(number)
            if not isinstance(parent, ClaimParent) or parent.parent is None:
                return
            if self._store.read_claim(number).why != REWIND:
                return
        except StorageError:
            raise
        except OrchestratorError:
            return  # damaged: its content is unknown, and others report it
        to = parent.parent
        self._went_back.append((number, (to.attempt, to.generation, to.step)))
