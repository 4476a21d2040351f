"""Fixtures of the tests that look at runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files.node_disks import Disks
from tests.inspect.trained_run import Make, made_in


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    """Three nodes with workers."""
    return Disks(tmp_path, ("a", "b", "c"))


@pytest.fixture
def mapping(tmp_path: Path, tiny_config: Make) -> dict[str, Any]:
    """With files of its own, which the test may change."""
    return made_in(tmp_path, tiny_config)
