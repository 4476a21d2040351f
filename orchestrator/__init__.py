"""Elastic LLM training on Ray: a run survives anything and continues at exactly the next unread token.

The public API. Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from orchestrator.config.loading import load_config
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.loading.sample_stream import SampleStream
    from orchestrator.data.sources.formats.base import RecordFormat
    from orchestrator.errors import BadDocument, OrchestratorError
    from orchestrator.inspect.run import Run
    from orchestrator.inspect.run import open_run as open  # noqa: A004  the public name is orchestrator.open
    from orchestrator.inspect.submitted import runs, submit
    from orchestrator.launch.api import RunResult, open_stream, plan, train

_HOMES = {
    "BadDocument": "errors",
    "JobConfig": "config.schema",
    "load_config": "config.loading",
    "OrchestratorError": "errors",
    "RecordFormat": "data.sources.formats.base",
    "SampleStream": "data.loading.sample_stream",
    "Run": "inspect.run",
    "open": "inspect.run",
    "RunResult": "launch.api",
    "open_stream": "launch.api",
    "plan": "launch.api",
    "runs": "inspect.submitted",
    "submit": "inspect.submitted",
    "train": "launch.api",
}
__all__ = [
    "BadDocument",
    "JobConfig",
    "OrchestratorError",
    "RecordFormat",
    "Run",
    "RunResult",
    "SampleStream",
    "load_config",
    "open",
    "open_stream",
    "plan",
    "runs",
    "submit",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    module = importlib.import_module(f"orchestrator.{_HOMES[name]}")
    return getattr(module, "open_run" if name == "open" else name)


def __dir__() -> list[str]:
    return sorted(__all__)
