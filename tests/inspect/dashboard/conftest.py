"""A small run that nobody trained, and its server, for a module of tests that only read."""

from __future__ import annotations

import pytest

from tests.inspect.dashboard.serving import Served, served


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """120 steps, 12 points, 6 attempts; it vanished without an end."""
    return served(tmp_path_factory.mktemp("storage"))
