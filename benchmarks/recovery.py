"""`python -m benchmarks.recovery --json`: how long training pauses when something dies, comes or starts.

It acts from outside only (the command line, SIGKILL, a node's removal), times steps where they happen
(`benchmarks.common`; better than 1 ms, far below the noise of a busy machine), and takes from the journal
only which step a new group began with.

A pause is the time from the fault to the first step that the new group made, less one step of the new group
(the median of its next steps, at most ten). `join_pause_s` (after a SIGKILL) and `node_join_pause_s`: from
the last step of the old group to the first of the one that a replacement has joined, less one step of it.
`steps_lost`: steps that were made and had to be made again, at worst.

The fields with `fsdp2_` are the same under `train.parallel: shard` on three workers (for
`fsdp2_node_loss_s` on a node each), those with `hsdp_` under `{shard: 2, replicate: 2}` on four, both with a
memory point every `MEMORY_EVERY` steps. There the first fault of a run strikes as a memory point begins, each
next one a step later behind one. `fsdp2_steps_lost_beyond_interval`: how many more than `MEMORY_EVERY` were
lost, at worst.

`start_s`, `full_restart_s`: from the command to its first step. `start_cpu_s`: CPU seconds of the whole
process tree up to then. The fields with `plain_` are the same for plain Ray Train. All are medians of
`--repeats` (`plain_start_…`: one start); every fault strikes in the middle between two saves,
or less than `MEMORY_EVERY` steps later.

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
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.storage.files import Storage

MEMORY_EVERY = 5  # steps; a divisor of SAVE_EVERY // 2, so that the first fault meets a memory point


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Who holds the state in a scenario: the beginning of its figures' names, the workers, and what the
    configuration of its run says beside that of all.
    """

    prefix: str
    workers: int
    changes: dict[str, dict[str, Any]]

    def later(self, number: int) -> int:
        """How many steps behind the middle between two saves the fault `number` strikes."""
        return number % MEMORY_EVERY if self.prefix else 0


def _sharded(prefix: str, workers: int, parallel: str | dict[str, int]) -> Layout:
    changes: dict[str, dict[str, Any]] = {
        "train": {"parallel": parallel},
        "resume": {"memory_every_steps": MEMORY_EVERY},
    }
    return Layout(prefix=prefix, workers=workers, changes=changes)


REPLICATE = Layout(prefix="", workers=2, changes={})
FSDP2 = _sharded("fsdp2_", 3, "shard")
HSDP = _sharded("hsdp_", 4, {"shard": 2, "replicate": 2})


@dataclass(kw_only=True, slots=True)
class Job:
    """A run of this package: its folders, its command, and the steps that its workers log."""

    folder: Path
    name: str
    layout: Layout = REPLICATE
    cluster: dict[str, Any] = field(default_factory=dict)
    log: StepLog = field(init=False)
    command: Command = field(init=False)

    def __post_init__(self) -> None:
        self.log = StepLog(self.folder / f"{self.name}-steps")
        config = _config(self.folder, self.name, str(self.log.folder))
        for section, fields in self.layout.changes.items():
            config[section].update(fields)
        config["cluster"] = {"num_workers": self.layout.workers, **self.cluster}
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


def measure_sigkill(folder: Path, repeats: int, layout: Layout) -> Samples:
    """SIGKILL of one worker on one node, again and again in one run; each time Ray replaces it."""
    names = ("sigkill_s", "sigkill_steps_lost", "join_pause_s")
    samples: Samples = {layout.prefix + name: [] for name in names}
    job = Job(folder=folder, name=f"{layout.prefix}sigkill", layout=layout)
    job.start()
    for number in range(repeats):
        job.command.fault_time(job.log, layout.workers, layout.later(number))
        pid = job.log.training()[number % layout.workers]
        seen = _fault(job, functools.partial(os.kill, pid, signal.SIGKILL), lambda: None)
        for name, value in zip(samples, seen, strict=True):
            samples[name].append(value)
        say(f"{job.name} {number + 1}", samples)
    kill_descendants()
    return samples


def measure_node_loss(folder: Path, repeats: int, layout: Layout) -> Samples:
    """One node of those that hold a worker each is removed, and another one is added."""
    from ray.cluster_utils import Cluster

    names = ("node_loss_s", "node_loss_steps_lost", "node_join_pause_s")
    samples: Samples = {layout.prefix + name: [] for name in names}
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [_add_node(cluster) for _ in range(layout.workers)]
        where = {"address": cluster.address, "cpus_per_worker": 2}
        job = Job(folder=folder, name=f"{layout.prefix}node", layout=layout, cluster=where)
        job.start()
        for number in range(repeats):
            job.command.fault_time(job.log, layout.workers, layout.later(number))
            seen = _fault(
                job,
                lambda: cluster.remove_node(nodes.pop(0), allow_graceful=False),
                lambda: nodes.append(_add_node(cluster)),
            )
            for name, value in zip(samples, seen, strict=True):
                samples[name].append(value)
            say(f"{job.name} loss {number + 1}", samples)
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
    job.step_after(job.log.newest() + 1, struck)  # a step that the group before has not made
    replace()
    together = job.new_group(known + 1, world_size=job.layout.workers)
    joined = job.step_after(together.step + 1, struck)
    old = job.step_after(together.step, struck)
    join = joined.time - old.time - job.one_step(joined)
    first = job.command.wait_for(
        lambda: job.log.first_again(alone.step + 1, struck, together.step), f"step {alone.step + 1} again"
    )
    made = max(step.label for step in job.log.read() if step.time < first.time)
    pause = first.time - struck - job.one_step(first, last_label=together.step)
    return pause, made - alone.step, join


# ---------------------------------------------------------------------------------------------- the command
PARTS: dict[str, Callable[[Path, int], Samples]] = {
    "start": measure_start,
    "sigkill": functools.partial(measure_sigkill, layout=REPLICATE),
    "node": functools.partial(measure_node_loss, layout=REPLICATE),
    "fsdp2": functools.partial(measure_sigkill, layout=FSDP2),
    "fsdp2-node": functools.partial(measure_node_loss, layout=FSDP2),
    "hsdp": functools.partial(measure_sigkill, layout=HSDP),
    "plain": plain_ray.measure,
}


def report(samples: Samples) -> dict[str, Any]:
    """The figures of the parts that were measured."""
    figures: dict[str, Any] = dict(medians(samples))
    for layout in (REPLICATE, FSDP2, HSDP):
        kinds = (f"{layout.prefix}{kind}_steps_lost" for kind in ("sigkill", "node_loss"))
        lost = [steps for kind in kinds for steps in samples.get(kind, [])]
        if lost:
            figures[f"{layout.prefix}steps_lost"] = max(lost)
    if "fsdp2_steps_lost" in figures:
        figures["fsdp2_steps_lost_beyond_interval"] = max(0, figures["fsdp2_steps_lost"] - MEMORY_EVERY)
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
