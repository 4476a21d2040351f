"""Audits in many small parts, whose messages are pickled as between processes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

import orchestrator
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.inspect.audit import audit_run
from orchestrator.inspect.audit.audit_processes import Found, InThisProcess, Task
from orchestrator.inspect.audit.history_parts import history_of
from tests.inspect.trained_run import TrainedRun


class HereButPickled(InThisProcess):
    """Carries out what goes to other processes in this one, over the same messages; like them it is a
    context.
    """

    def __init__(self, spec: Any, num_processes: int) -> None:
        assert num_processes > 1
        super().__init__(pickle.loads(pickle.dumps(spec)))

    def __enter__(self) -> HereButPickled:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, tasks: Sequence[Task], advanced: Any) -> list[Found]:
        found: list[Found] = pickle.loads(
            pickle.dumps(super().run(pickle.loads(pickle.dumps(tasks)), advanced))
        )
        return found


def in_parts(run: TrainedRun, monkeypatch: pytest.MonkeyPatch, least_tokens: int, **how: Any) -> Any:
    """The report of an audit in parts of at least so many tokens."""
    with monkeypatch.context() as small:
        small.setattr(audit_run, "PART_TOKENS", least_tokens)
        small.setattr(audit_run, "PART_BYTES", 1)
        small.setattr(audit_run, "_PARTS_OF_A_PROCESS", 1 << 30)
        small.setattr(audit_run, "AuditProcesses", HereButPickled)
        return orchestrator.open(run.folder).audit(**how, processes=2)


def num_parts(run: TrainedRun) -> int:
    spec = run.spec.made_by(run.encoders)
    history = history_of(spec, survey(run.store))
    return len(history.parts(range(len(history.records)), 1))
