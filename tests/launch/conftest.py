"""What the tests of launches share."""

from __future__ import annotations

import math

import pytest

from orchestrator.launch.process import stop_signals


@pytest.fixture(autouse=True)
def own_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace time of a SIGTERM that a test sends ends with that test."""
    monkeypatch.setattr(stop_signals._Grace, "until", math.inf)
