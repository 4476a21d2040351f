"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.files.node_disks import Disks


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    """Three nodes with workers."""
    return Disks(tmp_path, ("a", "b", "c"))
