"""Sources as syntax trees, each parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from orchestrator.paused_gc import paused_gc


@cache
def parsed(path: Path) -> ast.Module:
    """The collector never looks at the nodes: of all sources there are millions."""
    with paused_gc():
        return ast.parse(path.read_text(encoding="utf-8"))
