"""`python -m benchmarks.recovery --json`: how long training pauses when something dies, comes or starts.

It acts from outside only (the command line, SIGKILL, a node's removal), times steps where they happen
(`benchmarks.common`; better than 1 ms, far below the noise of a busy machine), and takes from the journal
only which step a new group began with.

A pause is the time from the fault to the first step that the new group made, less one step of the new group
(the median of its next steps, at most ten). `join_pause_s` (after a SIGKILL) and `node_join_pause_s`: from
the last step of the old group to the first of the one that a replacement has joined, less one step of it.
`steps_lost`: steps that were made and had to be made again, at worst. `start_s`, `full_restart_s`: from the
command to its first step. `start_cpu_s`: CPU seconds of the whole process tree up to then. The fields with
`plain_` are the same for plain Ray Train. All are medians of `--repeats` (`plain_start_…`: one start); every
fault strikes in the middle between two saves.

The last line of the output is one JSON object; `samples` in it are all measured values.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import plain_ray
from benchmarks.common import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    SAVE_EVERY,
    SEQ_LEN,
    Command,
    Samples,
    Step,
    StepLog,
    kill_descendants,
    medians,
    owned_processes,
    say,
    work_folder,
)
from orchestrator.data.sample_corpus import build_sample_corpus
from orchestrator.history.claims import GenerationStart
from orchestrator.history.journal_reader import read_journal
from orchestrator.storage.files import Storage


@dataclass(kw_only=True, slots=True)
class Job:
    """A run of this package: its folders, its command, and the steps that its workers log."""

    folder: Path
    name: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: StepLog = field(init=False)
    command: Command = field(init=False)

    def __post_init__(self) -> None:
        self.log = StepLog(self.folder / f"{self.name}-steps")
        config = _config(self.folder, self.name, str(self.log.folder))
        for section, fields in self.changes.items():
            config.setdefault(section, {}).update(fields)
        self._path.write_text(json.dumps(config))

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.name}.yaml"  # JSON is YAML

    def start(self) -> Command:
        """The command, the same for a start and a restart."""
        arguments = ["-m", "orchestrator.cli.commands", "train", str(self._path)]
        self.command = Command(arguments, self.folder / f"{self.name}.log")
        return self.command

    def generations(self) -> list[GenerationStart]:
        """All generations that have begun, in order."""
        storage = Storage(str(self.folder / "runs" / self.name))
        return list(read_journal(storage).generations)

    def new_group(self, known: int, world_size: int | None = None) -> GenerationStart:
        """The first generation beyond the first `known` ones, of this size if one is given."""

        def found() -> GenerationStart | None:
            fitting = (g for g in self.generations()[known:] if world_size in (None, g.world_size))
            return next(fitting, None)

        size = world_size or "any number of"
        return self.command.wait_for(found, f"generation {known + 1} of {size} workers")

    def step_after(self, label: int, moment: float) -> Step:
        """The step `label` made after this moment, as soon as it is."""
        return self.command.wait_for(lambda: self.log.first(label, moment), f"step {label}")

    def one_step(self, begin: Step, last_label: int | None = None) -> float:
        """The duration of a step of the group that made `begin`."""
        return self.command.wait_for(
            lambda: self.log.step_s(begin, last_label=last_label), f"the steps after {begin.label}"
        )


def _config(folder: Path, name: str, logs: str) -> dict[str, Any]:
    return {
        "run": {"name": name, "storage": str(folder / "runs")},
        "data": {
            "sources": [{"name": "stdlib", "path": str(folder / "corpus/*.jsonl"), "format": "jsonl"}],
            "tokenizer": str(folder / "corpus/tokenizer"),
            "num_epochs": None,
            "num_tokenizers": 1,
        },
        "pack": {"seq_len": SEQ_LEN},
        "model": {"factory": "benchmarks.common:make_model", "factory_args": {"folder": logs}},
        "train": {
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": MICRO_BATCH,
            "lr": 0.001,
            "max_steps": 1_000_000,
        },
        "cluster": {"num_workers": 2},
        "resume": {"every_steps": SAVE_EVERY},
    }


# -------------------------------------------------------------------------------------------- the scenarios
def measure_start(folder: Path, repeats: int) -> Samples:
    """A start on a new local Ray; then all is killed, the driver too, and the same command starts again."""
    names = ("start_s", "start_cpu_s", "full_restart_s", "full_restart_steps_again")
    samples: Samples = {name: [] for name in names}
    for number in range(repeats):
        job = Job(folder=folder, name=f"start-{number}")
        command = job.start()
        step, cpu_s = command.first_step(job.log)
        samples["start_cpu_s"].append(cpu_s)
        samples["start_s"].append(step.time - command.began)
        job.command.fault_time(job.log)
        kill_descendants()
        made = job.log.newest()
        command = job.start()
        again, _ = command.first_step(job.log)
        samples["full_restart_s"].append(again.time - command.began)
        samples["full_restart_steps_again"].append(made - (again.label - 1))
        kill_descendants()
        say(f"start {number + 1}", samples)
    return samples


def measure_sigkill(folder: Path, repeats: int) -> Samples:
    """SIGKILL of one worker of two on one node, again and again in one run; each time Ray replaces it."""
    samples: Samples = {"sigkill_s": [], "sigkill_steps_lost": [], "join_pause_s": []}
    job = Job(folder=folder, name="sigkill")
    job.start()
    for number in range(repeats):
        job.command.fault_time(job.log)
        pid = job.log.training()[number % 2]
        pause, lost, join = _fault(job, functools.partial(os.kill, pid, signal.SIGKILL), lambda: None)
        samples["sigkill_s"].append(pause)
        samples["sigkill_steps_lost"].append(lost)
        samples["join_pause_s"].append(join)
        say(f"sigkill {number + 1}", samples)
    kill_descendants()
    return samples


def measure_node_loss(folder: Path, repeats: int) -> Samples:
    """One node of two that hold a worker each is removed, and another one is added."""
    from ray.cluster_utils import Cluster

    samples: Samples = {"node_loss_s": [], "node_loss_steps_lost": [], "node_join_pause_s": []}
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [_add_node(cluster), _add_node(cluster)]
        changes = {"cluster": {"num_workers": 2, "address": cluster.address, "cpus_per_worker": 2}}
        job = Job(folder=folder, name="node", changes=changes)
        job.start()
        for number in range(repeats):
            job.command.fault_time(job.log)
            pause, lost, join = _fault(
                job,
                lambda: cluster.remove_node(nodes.pop(0), allow_graceful=False),
                lambda: nodes.append(_add_node(cluster)),
            )
            samples["node_loss_s"].append(pause)
            samples["node_loss_steps_lost"].append(lost)
            samples["node_join_pause_s"].append(join)
            say(f"node loss {number + 1}", samples)
        job.command.process.kill()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    finally:
        kill_descendants()
    return samples


def _add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=2, object_store_memory=100 << 20)


def _fault(job: Job, strike: Callable[[], Any], replace: Callable[[], Any]) -> tuple[float, float, float]:
    """Pause (s), steps lost, and pause of the survivors when the replacement joins (s)."""
    known = len(job.generations())
    struck = time.monotonic()
    strike()
    alone = job.new_group(known)
    first = job.step_after(alone.step + 1, struck)
    made = max(step.label for step in job.log.read() if step.time < first.time)
    replace()
    together = job.new_group(known + 1, world_size=2)
    joined = job.step_after(together.step + 1, first.time)
    old = job.step_after(together.step, struck)
    pause = first.time - struck - job.one_step(first, last_label=together.step)
    return pause, made - alone.step, joined.time - old.time - job.one_step(joined)


# ---------------------------------------------------------------------------------------------- the command
PARTS: dict[str, Callable[[Path, int], Samples]] = {
    "start": measure_start,
    "sigkill": measure_sigkill,
    "node": measure_node_loss,
    "plain": plain_ray.measure,
}


def report(samples: Samples) -> dict[str, Any]:
    """The figures of the parts that were measured."""
    figures: dict[str, Any] = dict(medians(samples))
    lost = [*samples.get("sigkill_steps_lost", []), *samples.get("node_loss_steps_lost", [])]
    if lost:
        figures["steps_lost"] = max(lost)
    if "sigkill_s" in samples and "plain_sigkill_s" in samples:
        ratio = figures["plain_sigkill_s"] / max(figures["sigkill_s"], 0.001)
        figures["sigkill_plain_to_ours"] = round(ratio, 1)
    for name in ("start_s", "start_cpu_s"):
        if name in samples and f"plain_{name}" in samples:
            ratio = figures[f"plain_{name}"] / figures[name]
            figures[f"{name.removesuffix('_s')}_plain_to_ours"] = round(ratio, 2)
    figures["samples"] = {name: [round(value, 3) for value in values] for name, values in samples.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--repeats", type=int, default=3, help="faults and starts of each kind")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {','.join(PARTS)}, e.g. sigkill,start")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown or options.repeats < 1:
        parser.error(f"--only knows {', '.join(PARTS)}, not {unknown}; --repeats is at least 1")
    samples: Samples = {}
    load = round(os.getloadavg()[0], 1)
    with work_folder() as folder, owned_processes():
        build_sample_corpus(folder / "corpus")
        for name in chosen:
            samples.update(PARTS[name](folder, options.repeats))
    figures = report(samples)
    figures |= {"cpus": os.cpu_count(), "load_before": load, "load_after": round(os.getloadavg()[0], 1)}
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
