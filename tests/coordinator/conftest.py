"""A claimed run, and a coordinator that is given all the time it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator import actor as coordinator_module
from orchestrator.coordinator import journal_notes
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.storage.files import Storage
from tests.coordinator.builders import LAUNCH, LIMIT_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: what can be answered is not asked for again."""
    monkeypatch.setattr(coordinator_module, "ANSWER_S", LIMIT_S)
    monkeypatch.setattr(journal_notes, "NOTES_LIMIT_S", LIMIT_S)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A run whose first attempt is claimed and has not begun."""
    store = RunStore(Storage(str(tmp_path / "run")))
    store.claim(1, LAUNCH, START, "host")
    store.write_parent(ClaimParent(attempt=1, parent=None))
    return store
