"""What the system tests share: a run on a real Ray, kills from outside, and the comparison of contents with
an independent reference.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import orchestrator
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.faults import FaultPlan
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.step_names import step_name
from orchestrator.inspect.run import Run
from orchestrator.launch.api import RunResult
from orchestrator.planning.digest import sample_digest
from orchestrator.storage.files import Storage
from tests.data import reference

LIMIT_S = 300.0  # of whatever a test waits for, on a machine that is busy
ROOT = Path(__file__).resolve().parents[2]


class Job:
    """A job of a test: its configuration, run after run with changes, and what is known of it afterwards."""

    def __init__(self, mapping: Mapping[str, Any], folder: Path) -> None:
        self._mapping, self._folder = mapping, folder
        self.drivers: list[subprocess.Popen[str]] = []  # those still there are killed when the test has ended

    def config(self, **changes: Any) -> JobConfig:
        """The configuration with dotted fields changed (`train__max_steps=4`)."""
        mapping = json.loads(json.dumps(self._mapping))
        for path, value in changes.items():
            section, _, field = path.partition("__")
            mapping.setdefault(section, {})[field] = value
        return parse_config(mapping)

    def copied(self, storage: Path) -> Job:
        """The same job with a copy of all that its run has written."""
        shutil.copytree(self._mapping["run"]["storage"], storage)
        run = {**self._mapping["run"], "storage": str(storage)}
        return Job({**self._mapping, "run": run}, self._folder)

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
        return str([row for row in self.run.list_points() if row["on_lineage"]][-1]["weights_digest"])

    def losses(self) -> list[float]:
        """The loss of every step of the effective history."""
        return [record.loss for record in self.run.records()]


def assert_exactly_once(job: Job, left_out: Mapping[int, tuple[int, int]] | None = None) -> None:
    """Every step of the effective history trained exactly the samples that the reference stream has there,
    each once, in order. `left_out` are (samples, tokens) that were skipped on purpose, by how many samples
    had been trained before.

    The reference reads, orders, tokenizes and cuts by itself; only a sample's digest is the project's own
    function.
    """
    seen = survey(RunStore(Storage(job.run.uri)))
    shapes = {start.id: start.seq_len for start in seen.journal.generations}
    records = seen.lineage.records
    assert records, "nothing was trained"
    left_out = left_out or {}
    all_tokens = records[-1].consumed_tokens + sum(tokens for _, tokens in left_out.values())
    stream = _reference_stream(job, all_tokens + 1)
    samples = position = skipped = passed = 0
    for record in records:
        length, digests = shapes[record.attempt, record.generation], 0
        more = left_out.get(samples, (0, 0))
        skipped, passed = skipped + more[0], passed + more[1]
        while position < record.consumed_tokens:
            run = stream[position + passed : min(position + length, record.consumed_tokens) + passed + 1]
            ids, labels, documents = next(reference.cut(run, length))
            arrays = (np.array(values, np.int32) for values in (ids, labels, documents))
            digests += sample_digest(samples + skipped, 0, length, *arrays)
            samples, position = samples + 1, position + len(run) - 1
        assert samples == record.consumed_samples, (
            f"step {record.step} ends at sample {record.consumed_samples}, the reference at {samples}"
        )
        assert record.digest == f"{digests % 2**64:016x}", (
            f"step {record.step} trained other samples than the reference has"
        )
    for steps in (None, f"{step_name(records, len(records) // 2)}:"):  # whole, and from the nearest cursor on
        report = job.run.audit(steps)
        assert report["exactly_once"], report


@functools.cache
def _reference_documents(pattern: str, data: str) -> tuple[str, ...]:
    """One epoch of documents in plan order."""
    settings = json.loads(data)
    files = sorted(Path(pattern).parent.glob(Path(pattern).name), key=lambda path: path.name.encode())
    sizes = [path.stat().st_size for path in files]
    count = sum(max(1, -(-size // settings["fragment_bytes"])) for size in sizes)
    per_block = max(1, settings["window_bytes"] // (2 * max(1, sum(sizes) // count)))
    return tuple(reference.texts(files, "jsonl", "stdlib", settings, settings.pop("epoch"), per_block))


def _reference_stream(job: Job, num_tokens: int) -> list[tuple[int, int]]:
    """The first tokens of the run's stream."""
    data = job.config().to_json()["data"]
    stream: list[tuple[int, int]] = []
    for epoch in range(100):
        keys = ("fragment_bytes", "window_bytes", "seed", "shuffle")
        settings = json.dumps({**{key: data[key] for key in keys}, "epoch": epoch})
        documents = _reference_documents(data["sources"][0]["path"], settings)
        begun = stream[-1][1] + 1 if stream else 0
        stream += [
            (token, begun + number) for token, number in _reference_tokens(documents, data["tokenizer"])
        ]
        if len(stream) >= num_tokens:
            break
    return stream


@functools.cache
def _reference_tokens(documents: tuple[str, ...], tokenizer: str) -> list[tuple[int, int]]:
    return reference.tokens(iter(documents), Path(tokenizer), 1 << 20)


def assert_same_training(job: Job, unbroken: tuple[str, list[float]]) -> None:
    """It trained exactly what the undisturbed run on one worker did, to the last bit."""
    digest, losses = unbroken
    assert_exactly_once(job)
    assert job.losses() == losses
    assert job.final_digest() == digest


def when_step(job: Job, step: int, act: Callable[[], None]) -> threading.Thread:
    """Calls `act` once, as soon as the journal has `step`; join the thread after the launch."""
    return _when(lambda: bool(records := job.run.records()) and records[-1].step >= step, act)


def when_saved(job: Job, act: Callable[[], None]) -> threading.Thread:
    """Calls `act` once, as soon as the run has a resume point; join the thread after the launch."""
    return _when(lambda: bool(job.run.list_points()), act)


def _when(true: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        never = threading.Event()
        for _ in range(int(LIMIT_S / 0.05)):
            is_true = False
            with suppress(orchestrator.OrchestratorError):  # the run has not begun
                is_true = true()
            if is_true:
                act()
                return
            never.wait(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def log_text(job: Job) -> str:
    """All that the run's launches have said, from their log files."""
    folder = Path(job.config().run.run_uri) / "logs"
    return "".join(file.read_text() for file in sorted(folder.glob("*.log")))


def when_said(job: Job, text: str, act: Callable[[], None]) -> None:
    """Waits until a launch of the run has said `text`, and calls `act`."""
    never = threading.Event()
    for _ in range(int(LIMIT_S / 0.05)):
        if text in log_text(job):
            act()
            return
        never.wait(0.05)
    raise AssertionError(f"nobody said {text!r}:\n{log_text(job)}")


def assert_survivors_stayed(job: Job) -> None:
    """No node group ended before the run did: whoever was not killed went on in its process, and whoever was
    killed came back beside it.
    """
    ended = [e.fields for e in read_journal(Storage(job.run.uri)).events if e.kind == "group ended"]
    assert not ended, ended


def when_struck(plan: FaultPlan, number: int, act: Callable[[], None]) -> None:
    """Waits until the fault `number` has struck, and calls `act`."""
    never = threading.Event()
    for _ in range(int(LIMIT_S / 0.05)):
        if number in plan.struck():
            act()
            return
        never.wait(0.05)
    raise AssertionError(f"fault {number} of {plan} did not strike")


def spawn(
    job: Job, cluster: Any, faults: FaultPlan, before: str = "", **changes: Any
) -> subprocess.Popen[str]:
    """A launch with a driver of its own, on a cluster that runs; it prints its outcome. `before`: a function
    (module.name) that is called first in each process of the launch. What it starts as `python` is what this
    process does.
    """
    path = Path(faults.folder) / "job.json"
    path.write_text(json.dumps(job.config(cluster__address=cluster.address, **changes).to_json()))
    setup = f"""
import importlib, ray
module, name = {before!r}.rsplit(".", 1)
getattr(importlib.import_module(module), name)()
ray.init({cluster.address!r}, runtime_env={{"worker_process_setup_hook": {before!r}}}, log_to_driver=False)
"""
    program = (setup if before else "") + (
        "import sys, json, orchestrator; from orchestrator.config.loading import parse_config; "
        "sys.executable = sys.argv[3]; "
        "config = parse_config(json.load(open(sys.argv[1]))); "
        "result = orchestrator.train(config, fault_plan=sys.argv[2]); print(result.outcome, result.reason)"
    )
    command = [sys.executable, "-c", program, str(path), faults.to_json(), sys.executable]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def sigkill(pid: int) -> None:
    """A real SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def thaw(pid: int, act: Callable[[], object]) -> None:
    """Waits until the process is stopped, calls `act`, and lets it go on, if it is there still."""
    never = threading.Event()
    for _ in range(int(LIMIT_S / 0.05)):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
        never.wait(0.05)
    else:
        raise AssertionError(f"process {pid} is not stopped, but {state}")
    act()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _living(prefix: str) -> dict[str, Any]:
    from ray._private.state import actors

    never = threading.Event()
    for _ in range(int(LIMIT_S / 0.1)):  # that of the test before may be about to end
        living = [row for row in actors().values() if row["State"] == "ALIVE"]
        rows = [row for row in living if row["Name"].startswith(prefix)]
        if len(rows) == 1:
            return dict(rows[0])
        never.wait(0.1)
    raise AssertionError(f"{len(rows)} actors {prefix}… live")


def feeder_pid() -> int:
    """The process of the feeder that lives now."""
    return int(_living("feeder-")["Pid"])
