"""Runs that are stored in git, and the names of their points."""

from __future__ import annotations

import shutil
from pathlib import Path

from orchestrator.storage.files import Storage

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "tests" / "examples"
NUMBERED = EXAMPLES / "numbered"
REWOUND_TO, ORPHAN, NEWEST = "00000006-a0002-g0001", "00000008-a0002-g0001", "00000010-a0003-g0001"
UNCOMMITTED = "00000011-a0003-g0001"  # a save of which the vote lies in storage
POINTS = [REWOUND_TO, ORPHAN, "00000008-a0003-g0001", NEWEST]


def kinds_in(folder: Path) -> Storage:
    """A run of format 2 with a file of each kind that it has not by itself."""
    shutil.copytree(EXAMPLES / "format2" / "example", folder)
    shutil.rmtree(folder / "journal" / "a0003")  # it lies there in pieces
    shutil.copytree(EXAMPLES / "kinds" / "run", folder, dirs_exist_ok=True)
    return Storage(str(folder))
