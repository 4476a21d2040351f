"""`python -m benchmarks.audit --json`: what the proof of a run costs beside the feed that it checks.

The sample corpus (31 MB of Python's standard library) is taken through the feed once, from its first token to
its last, in steps of `--batch` samples of `--seq-len` tokens, and journalled without a model. `feed_cpu_s` is
the CPU time of that: reading, ordering, tokenizing, packing, digesting. `audit_cpu_s` is that of `audit` over
all steps: the same once more with the audit's own packer, and all files read whole and tokenized again. Both
are in one process; `…_mb_per_cpu_s` is the corpus's text (10^6 bytes) per CPU second. All are medians of
`--repeats`. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import orchestrator
from benchmarks.common import SHAPE, Samples, medians, say
from orchestrator.config.schema import JobConfig, parse_config
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.data.preparing import prepare_data
from orchestrator.data.sample_corpus import build_sample_corpus
from orchestrator.data.spec import DataSpec
from orchestrator.history.claim_files import START
from orchestrator.history.claims import ClaimParent, GenerationStart
from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.records import Cursor, StepRange, StepRecord
from orchestrator.resume.store import RunStore
from orchestrator.storage.files import Storage


def _job(corpus: Path, folder: Path, batch: int, seq_len: int) -> JobConfig:
    return parse_config(
        {
            "run": {"name": "audited", "storage": str(folder)},
            "data": {
                "sources": [{"name": "stdlib", "path": str(corpus / "*.jsonl"), "format": "jsonl"}],
                "tokenizer": str(corpus / "tokenizer"),
            },
            "pack": {"seq_len": seq_len},
            "model": {"config": {**SHAPE, "model_type": "llama", "max_position_embeddings": seq_len}},
            "train": {
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "lr": 1e-3,
                "schedule": "constant",
            },
        }  # fmt: skip
    )


def _begin(job: JobConfig) -> tuple[DataSpec, JournalWriter]:
    """A run of one attempt and one generation, before its first step."""
    folder = Path(job.run.storage) / job.run.name
    store, spec = RunStore(Storage(str(folder))), prepare_data(job, folder)
    run_id = store.create_run(job.run.name, spec.identity()).id
    store.claim(1, "0" * 16, START, "here", run_id)
    store.write_parent(ClaimParent(attempt=1, parent=None))
    journal = JournalWriter(store.storage, 1, run_id=run_id)
    journal.event(
        EventKind.ATTEMPT,
        launch="",
        why="",
        command="",
        host="",
        version="",
        pid=1,
        machine="",
        pid_start="",
        forked_from=None,
        config=job.flat(),
    )
    journal.generation(
        GenerationStart(
            attempt=1, generation=1, parent=None, step=0, consumed_samples=0, consumed_tokens=0,
            target_tokens=0, world_size=1, global_batch_size=job.train.global_batch_size,
            seq_len=job.pack.seq_len,
        )
    )  # fmt: skip
    return spec, journal


def _feed(job: JobConfig, spec: DataSpec, journal: JournalWriter) -> int:
    """Takes every sample, and journals the steps; their number."""
    batch, seq_len = job.train.global_batch_size, job.pack.seq_len
    feed, cursor, step = InProcessFeed(spec), Cursor(), 0
    while True:
        asked = StepRange(
            first_sample=cursor.consumed_samples, num_samples=batch, num_tokens=batch * seq_len,
            seq_len=seq_len,
        )  # fmt: skip
        taken = feed.get(asked, 0, 1, batch, cursor)
        if not taken.step.num_samples:
            break
        step, cursor = step + 1, taken.cursor
        journal.step(
            StepRecord(
                attempt=1, generation=1, step=step, consumed_samples=cursor.consumed_samples,
                consumed_tokens=cursor.consumed_tokens, target_tokens=cursor.target_tokens, loss=1.0,
                grad_norm=1.0, lr=1e-3, digest=f"{taken.step_digest:016x}", step_s=1.0, data_wait_s=0.0,
                save_blocked_s=0.0,
            )
        )  # fmt: skip
        if taken.end_of_data:
            break
    feed.close()
    journal.close()
    return step


def measure(corpus: Path, text_mb: float, batch: int, seq_len: int) -> dict[str, float]:
    """The figures of one run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        job = _job(corpus, Path(folder), batch, seq_len)
        spec, journal = _begin(job)
        began = time.process_time()
        num_steps = _feed(job, spec, journal)
        fed = time.process_time()
        report = orchestrator.open(Path(folder) / job.run.name).audit()
        audited = time.process_time()
    assert report["exactly_once"], report["first_difference"]
    assert (report["steps"], report["not_shown"]) == (num_steps, []), report
    feed_s, audit_s = fed - began, audited - fed
    return {
        "steps": num_steps,
        "tokens": report["tokens"],
        "feed_cpu_s": feed_s,
        "audit_cpu_s": audit_s,
        "feed_mb_per_cpu_s": text_mb / feed_s,
        "audit_mb_per_cpu_s": text_mb / audit_s,
        "audit_to_feed": audit_s / feed_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--repeats", type=int, default=5, help="of each figure")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sample")
    options = parser.parse_args()
    if min(options.repeats, options.batch, options.seq_len) < 1:
        parser.error("--repeats, --batch and --seq-len are at least 1")
    samples: Samples = {}
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        report = build_sample_corpus(Path(folder, "corpus"))
        text_mb = report.text_bytes / 1e6
        for repeat in range(options.repeats):
            found = measure(Path(folder, "corpus"), text_mb, options.batch, options.seq_len)
            for figure, value in found.items():
                samples.setdefault(figure, []).append(value)
            say(f"repeat {repeat + 1}", samples)
    figures: dict[str, Any] = {"text_mb": round(text_mb, 1), **medians(samples)}
    figures |= {"cpus": os.cpu_count(), "load_before": load, "load_after": round(os.getloadavg()[0], 1)}
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
