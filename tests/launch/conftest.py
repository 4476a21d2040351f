"""What the tests of launches share."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.spec import DataSpec
from orchestrator.launch.process import stop_signals
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage


@pytest.fixture(autouse=True)
def own_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace time of a SIGTERM that a test sends ends with that test."""
    monkeypatch.setattr(stop_signals._Grace, "until", math.inf)


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 100_000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return starting.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)
