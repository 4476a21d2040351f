"""`python -m benchmarks.journal --json`: what it costs to write a run's journal and to read it back.

A journal of `--records` steps (1,000,000) in segments as the coordinator writes them, one generation per
100,000 steps and an event per 100, is written, then read in a process of its own per figure: `whole`, every
step record decoded (`read_journal`); `history`, the effective history from it (what `steps`, `audit` and a
start need); `outline`, all but the contents of step records (`read_outline`); `chain`, which points are on
the history, from the outline (what a restarted coordinator needs while members wait for it, 60 s at most);
`columns`, every step record, as the views of a run keep them; `views`, what a page needs (`RunViews`):
`first_read_s` of a run never read before, `refresh_s` when 1,000 steps are new, and of the views then, each
for the second time, `summary_s`, `timeline_s` and `series_s` (6 metrics, 1,000 pixels); `first_read_cpu_s`
is the CPU of the first, and so of the others.

At 1,000,000 steps all of it takes about three minutes of CPU a repeat, of which writing is a quarter and
reading records whole another half; `--only` measures some of it.

`…_s` are wall seconds for all records, `…_cpu_us` microseconds of CPU per record, `…_mb` the process's peak
resident memory in 10^6 bytes. All are medians of `--repeats`. The files are in the page cache: reading is
CPU, not disk. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Samples, medians, say
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.claims.claims import Claim, ClaimParent, GenerationStart
from orchestrator.history.claims.lineage import effective_chain, effective_history
from orchestrator.history.journal.journal_reader import read_journal, read_outline
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.views.facts.columns import read_columns
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.json_form import encode, seal
from orchestrator.planning.resume.identity import RunIdentity
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage

PER_GENERATION, PER_EVENT, PER_FLUSH = 100_000, 100, 1000
BATCH, TOKENS = 16, 2048
NEW_STEPS, PIXELS = 1000, 1000
METRICS = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "data_wait_share")
CLAIMS = [Claim(number=1, launch="one", why="start", host="here", created="")]
PARENTS = [ClaimParent(attempt=1, parent=None)]


def write(storage: Storage, num_records: int) -> None:
    """The journal of a run of so many steps."""
    journal, parent, generation = JournalWriter(storage, 1), None, 0
    for step in range(1, num_records + 1):
        if step % PER_GENERATION == 1:
            generation += 1
            journal.generation(_start(generation, step - 1, parent))
        record = _record(generation, step)
        journal.step(record)
        parent = record.key
        if step % PER_EVENT == 0:
            journal.event(
                EventKind.SAVE_GIVEN_UP, point=parent.point_name, reason="a vote is missing", retry_s=5.0
            )
        if step % PER_FLUSH == 0:
            journal.flush()
    journal.close()


def _write_claim(storage: Storage) -> None:
    """What makes a run of the journal: run.json, one claim and what it continues."""
    identity = RunIdentity(
        format_version=1, order_version=1, tokenizer="t", tokenizer_digest="", encoder_name="e",
        encoder_version="1", settings={}, manifests={},
    )  # fmt: skip
    run = RunFile(format=2, name="run", created="2026-11-22T00:00:00+00:00", identity=identity)
    (claim,), (parent,) = CLAIMS, PARENTS
    storage.create("run.json", seal(encode(run)))
    storage.create("attempts/0001.json", seal(encode(claim)))
    storage.create("attempts/0001.parent.json", seal(encode(parent)))


def _start(generation: int, step: int, parent: StateKey | None) -> GenerationStart:
    return GenerationStart(
        attempt=1, generation=generation, parent=parent, step=step, consumed_samples=BATCH * step,
        consumed_tokens=TOKENS * step, target_tokens=TOKENS * step, world_size=2, global_batch_size=BATCH,
        seq_len=TOKENS // BATCH, members=("a" * 16, "b" * 16),
    )  # fmt: skip


def _record(generation: int, step: int) -> StepRecord:
    return StepRecord(
        attempt=1, generation=generation, step=step, consumed_samples=BATCH * step,
        consumed_tokens=TOKENS * step, target_tokens=TOKENS * step, loss=2 + 1 / step, grad_norm=1 + 1 / step,
        lr=3e-4 / step, digest=f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}", step_s=0.5 + 1 / step,
        data_wait_s=0.001 / step, save_blocked_s=0.0,
    )  # fmt: skip


def _history(storage: Storage) -> int:
    journal = read_journal(storage)
    return len(effective_history(CLAIMS, PARENTS, journal.generations, journal.records).records)


def _chain(storage: Storage) -> int:
    outline = read_outline(storage)
    assert not effective_chain(CLAIMS, PARENTS, outline.generations).errors, "the chain is sound"
    return max(outline.last_steps.values())


# each returns how many steps it found
READERS: dict[str, Callable[[Storage], int]] = {
    "whole": lambda storage: len(read_journal(storage).records),
    "history": _history,
    "outline": lambda storage: max(read_outline(storage).last_steps.values()),
    "chain": _chain,
    "columns": lambda storage: len(read_columns(storage)),
}


def measure(name: str, folder: str, num_records: int) -> dict[str, float]:
    """The figures of one reader, or of `write`, in this process."""
    storage = Storage(folder)
    began, cpu = time.perf_counter(), time.process_time()
    if name == "write":
        write(storage, num_records)
    else:
        found = READERS[name](storage)
        assert found == num_records, f"{found} steps were read, {num_records} written"
    return {
        f"{name}_s": time.perf_counter() - began,
        f"{name}_cpu_us": (time.process_time() - cpu) / num_records * 1e6,
        f"{name}_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def measure_views(folder: str, num_records: int) -> dict[str, float]:
    """What a page waits for, in this process."""
    storage = Storage(folder)
    _write_claim(storage)
    segment = max(Path(folder, "journal", "a0001").iterdir())
    content = segment.read_bytes()
    lines = content.splitlines(keepends=True)
    cut = len(content) - sum(map(len, lines[-NEW_STEPS:]))
    os.truncate(segment, cut)
    views, figures = RunViews(RunStore(storage)), dict[str, float]()

    def timed(name: str, call: Callable[[], Any]) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        call()
        figures[f"{name}_s"] = time.perf_counter() - began
        figures[f"{name}_cpu_s"] = time.process_time() - cpu

    timed("first_read", views.refresh)
    figures["views_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    views.summary(), views.timeline(), views.series("tokens", METRICS, px=PIXELS)
    with segment.open("ab") as file:
        file.write(content[cut:])
    timed("refresh", views.refresh)
    timed("summary", views.summary)
    timed("timeline", views.timeline)
    timed("series", lambda: views.series("tokens", METRICS, px=PIXELS))
    assert views.summary()["progress"]["step"] == num_records, "all steps are shown"
    return figures


def _alone(name: str, folder: str, num_records: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.journal",
        "--records",
        str(num_records),
        "--part",
        name,
        folder,
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--records", type=int, default=1_000_000, help="steps in the journal")
    parser.add_argument("--repeats", type=int, default=3, help="of each figure")
    parser.add_argument("--only", nargs="+", choices=(*READERS, "views"), help="what is read; default: all")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.records < 1 or options.repeats < 1:
        parser.error("--records and --repeats are at least 1")
    if options.part:
        name, folder = options.part
        measured = (
            measure_views(folder, options.records)
            if name == "views"
            else measure(name, folder, options.records)
        )
        print(json.dumps(measured))
        return
    samples: Samples = {}
    load = round(os.getloadavg()[0], 1)
    for repeat in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="journal-") as folder:
            for name in ("write", *(options.only or (*READERS, "views"))):
                for figure, value in _alone(name, str(Path(folder, "run")), options.records).items():
                    samples.setdefault(figure, []).append(value)
        say(f"repeat {repeat + 1}", samples)
    figures: dict[str, Any] = {"records": options.records, **medians(samples)}
    if {"whole_s", "outline_s"} <= figures.keys():
        figures["outline_times_faster_than_whole"] = round(figures["whole_s"] / figures["outline_s"], 1)
    figures |= {"cpus": os.cpu_count(), "load_before": load, "load_after": round(os.getloadavg()[0], 1)}
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
