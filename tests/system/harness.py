"""What the system tests share: a run on a real Ray, kills from outside, and the comparison of contents with an independent reference."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import orchestrator
from orchestrator.config import JobConfig, parse_config
from orchestrator.faults import FaultPlan
from orchestrator.history import Run
from orchestrator.plan.digest import sample_digest
from orchestrator.run import RunResult
from tests.data.reference import reference_stream

LIMIT_S = 120.0


class Job:
    """A job of a test: its configuration, run after run with changes, and what is known of it afterwards."""

    def __init__(self, mapping: Mapping[str, Any], folder: Path) -> None:
        self._mapping, self._folder = mapping, folder

    def config(self, **changes: Any) -> JobConfig:
        """The configuration with dotted fields changed (`train__max_steps=4`)."""
        mapping = json.loads(json.dumps(self._mapping))
        for path, value in changes.items():
            section, _, field = path.partition("__")
            mapping.setdefault(section, {})[field] = value
        return parse_config(mapping)

    def train(self, faults: FaultPlan | None = None, **changes: Any) -> RunResult:
        """One launch in this process."""
        return orchestrator.train(self.config(**changes), fault_plan=faults.to_json() if faults else "")

    def faults(self) -> FaultPlan:
        """An empty plan with a folder of its own."""
        folder = self._folder / f"faults-{len(list(self._folder.glob('faults-*')))}"
        folder.mkdir(parents=True)
        return FaultPlan(folder=str(folder))

    @property
    def run(self) -> Run:
        """The run as it lies in storage."""
        return Run(self.config().run.run_uri)

    def final_digest(self) -> str:
        """The weights' digest of the newest point on the lineage."""
        return str([row for row in self.run.points() if row["on_lineage"]][-1]["weights_digest"])

    def losses(self) -> list[float]:
        """The loss of every step of the effective history."""
        return [record.loss for record in self.run.steps()]


def assert_exactly_once(job: Job) -> None:
    """Every step of the effective history trained exactly the samples that the reference stream has there, each once, in order.

    The reference reads, orders, tokenizes and cuts by itself; only the sample's digest is the project's own function.
    """
    tokens, starts = reference_stream(job.config())
    begins = np.zeros(len(tokens), np.int64)
    begins[starts] = 1
    samples = position = 0
    shapes = {start.id: start.seq_len for start in _generations(job.run)}
    records = job.run.steps()
    assert records, "nothing was trained"
    for record in records:
        length, expected = shapes[record.attempt, record.generation], 0
        while position < record.consumed_tokens:
            stop = min(position + length, record.consumed_tokens, len(tokens) - 1)
            real = stop - position
            input_ids, labels = np.zeros(length, np.int32), np.full(length, -100, np.int32)
            documents = np.full(length, -1, np.int32)
            input_ids[:real], labels[:real] = tokens[position:stop], tokens[position + 1 : stop + 1]
            flags = begins[position:stop].copy()
            flags[0] = 0
            documents[:real] = np.cumsum(flags)
            expected += sample_digest(samples, 0, length, input_ids, labels, documents)
            samples, position = samples + 1, stop
        assert samples == record.consumed_samples, f"step {record.step} ends at sample {record.consumed_samples}, not {samples}"
        assert record.digest == f"{expected % 2**64:016x}", f"step {record.step} trained other samples than the reference has"
    report = job.run.audit()
    assert report["exactly_once"], report


def _generations(run: Run) -> Any:
    from orchestrator.attempt import survey

    return survey(run._store).journal.generations


def when_step(job: Job, step: int, act: Callable[[], None]) -> threading.Thread:
    """Calls `act` once, as soon as the journal has `step`; join the thread after the launch."""

    def watch() -> None:
        never = threading.Event()
        for _ in range(int(LIMIT_S / 0.05)):
            try:
                steps = job.run.steps()
            except orchestrator.OrchestratorError:
                steps = ()
            if steps and steps[-1].step >= step:
                act()
                return
            never.wait(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def sigkill(pid: int) -> None:
    """A real SIGKILL."""
    os.kill(pid, signal.SIGKILL)
