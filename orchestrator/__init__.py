"""Elastic LLM training on Ray: a run survives anything and continues at exactly the next unread token.

The public API. Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orchestrator.config import JobConfig, load_config
    from orchestrator.errors import OrchestratorError
    from orchestrator.history import Run
    from orchestrator.history import open_run as open  # noqa: A004  the public name is orchestrator.open
    from orchestrator.run import RunResult, open_stream, plan, train

_HOMES = {
    "JobConfig": "config",
    "load_config": "config",
    "OrchestratorError": "errors",
    "Run": "history",
    "open": "history",
    "RunResult": "run",
    "open_stream": "run",
    "plan": "run",
    "train": "run",
}
__all__ = [
    "JobConfig",
    "OrchestratorError",
    "Run",
    "RunResult",
    "load_config",
    "open",
    "open_stream",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    module = importlib.import_module(f"orchestrator.{_HOMES[name]}")
    return getattr(module, "open_run" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
