"""The feeder through Ray: its first batch, a step asked for again, and its speed to eight consumers: by the
clock, with half as many tokenizers as there are cores (2 to 8), and what a core that it has for itself would
serve.

It starts a Ray of its own; one JSON object is its last line: `python -m benchmarks.data_feeder FOLDER BYTES
DOCUMENTS`.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.data_corpus import Corpus
from orchestrator.config.loading import as_data_job
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.feeder import start_feeder
from orchestrator.data.feed.pipeline_thread import TokenizerPool
from orchestrator.data.feed.remote_feed import RayFeed
from orchestrator.data.spec import DataSpec
from orchestrator.planning.batches import next_range
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.steps import StepRange

_CONSUMERS, _BATCH, _SEQ_LEN = 8, 128, 2048
_EPOCHS = 8
STEPS_AHEAD = 32  # as the training loop asks for steps of this size
_LAUNCH = "measured"
REPLAY_BYTES = 256 << 20  # as data.replay_bytes is by default


def view(launch: str, attempt: int, rank: int, world_size: int) -> GenerationView:
    """A generation of its own."""
    return GenerationView(
        attempt=attempt, generation=0, rank=rank, world_size=world_size, members=(), host="", port=0,
        parent=None, source_rank=None, point=None, cursor=None, step=0, launch=launch,
    )  # fmt: skip


def coming_step(cursor: Cursor, num_samples: int, seq_len: int, after: int = 0) -> StepRange:
    """The step that comes so many after the next one."""
    first, ahead = cursor.consumed_samples + after * num_samples, after * num_samples * seq_len
    step = next_range(first, cursor.consumed_tokens + ahead, num_samples, seq_len)
    assert step is not None, "there is no stop"
    return step


def _step(cursor: Cursor, after: int = 0) -> StepRange:
    return coming_step(cursor, _BATCH, _SEQ_LEN, after)


@ray.remote(num_cpus=0)
class Consumer:
    """A rank that does nothing with its batches."""

    def __init__(self, feeder: Any, rank: int) -> None:
        self._feed, self._rank = RayFeed(feeder, _LAUNCH), rank

    def run(self, warm_steps: int) -> tuple[float, float, int]:
        """(when so many steps had come, when its last had, tokens of all ranks between these)."""
        cursor, began, first = Cursor(), 0.0, 0
        self._feed.open(view(_LAUNCH, 1, self._rank, _CONSUMERS), cursor)
        while True:
            taken = self._feed.get(_step(cursor), self._rank, _CONSUMERS, 1, cursor)
            cursor = taken.cursor
            if not began and cursor.consumed_samples >= warm_steps * _BATCH:
                began, first = time.monotonic(), cursor.consumed_tokens
            if taken.end_of_data:
                return began, time.monotonic(), cursor.consumed_tokens - first
            self._feed.prefetch([_step(cursor, n) for n in range(STEPS_AHEAD)], self._rank, _CONSUMERS, 1)


def _first_and_again(feeder: Any) -> tuple[float, float]:
    """(a warm feeder's first batch at another place, a held step asked for again), seconds, medians."""
    feed, cursors = RayFeed(feeder, _LAUNCH), [Cursor()]
    feed.open(view(_LAUNCH, 1, 0, 1), cursors[0])
    for _ in range(4):
        cursors.append(feed.get(_step(cursors[-1]), 0, 1, _BATCH, cursors[-1]).cursor)
    again, first = list[float](), list[float]()
    for _ in range(9):
        began = time.perf_counter()
        feed.get(_step(cursors[3]), 0, 1, _BATCH, cursors[3])
        again.append(time.perf_counter() - began)
    for attempt in range(2, 5):
        at = cursors[2] if attempt % 2 else cursors[0]  # neither held nor what comes next
        began = time.perf_counter()
        ray.get(feeder.open.remote(_LAUNCH, (attempt, 0), at))
        taken = ray.get(feeder.get.remote(_LAUNCH, (attempt, 0), (_step(at),), 0, 1, _BATCH))
        assert isinstance(taken, tuple), taken
        first.append(time.perf_counter() - began)
    return statistics.median(first), statistics.median(again)


def measure(corpus: Corpus) -> dict[str, float]:
    """All figures, on a Ray that runs."""
    spec = prepare_data(as_data_job(corpus.job(seq_len=_SEQ_LEN, batch=_BATCH, num_epochs=_EPOCHS)))
    feeder = start_feeder(_LAUNCH, spec, tokenizers=TokenizerPool(num=2), replay_bytes=1)
    try:
        first, again = _first_and_again(feeder)
    finally:
        ray.kill(feeder)
    # a tenth of the text, when all tokenizers run, is not measured
    warm_steps = corpus.num_bytes * _EPOCHS // 5 // 10 // (_BATCH * _SEQ_LEN) + 1
    return {"feeder_first_batch_s": first, "replay_ms": again * 1e3, **_speed(spec, warm_steps)}


def num_tokenizers() -> int:
    """Enough to keep a feeder busy, where the machine has cores for them."""
    return max(2, min(8, (os.cpu_count() or 2) // 2))


def _speed(spec: DataSpec, warm_steps: int) -> dict[str, float]:
    """From so many steps on."""
    feeder = start_feeder(
        _LAUNCH, spec, tokenizers=TokenizerPool(num=num_tokenizers()), replay_bytes=REPLAY_BYTES
    )
    try:
        consumers = [Consumer.remote(feeder, rank) for rank in range(_CONSUMERS)]
        running = [each.run.remote(warm_steps) for each in consumers]
        stats = ray.get(feeder.stats.remote())
        while stats.next_sample < warm_steps * _BATCH:
            stats = ray.get(feeder.stats.remote())
            time.sleep(0.05)
        before = cpu_s_of(stats.pid)
        ran = ray.get(running)
        used, end = cpu_s_of(stats.pid) - before, ray.get(feeder.stats.remote()).next_sample
    finally:
        ray.kill(feeder)
    began, ended = min(each[0] for each in ran), max(each[1] for each in ran)
    return {
        "feeder_tokenizers": num_tokenizers(),
        "feeder_tokens_per_s": ran[0][2] / (ended - began),
        "feeder_tokens_per_cpu_s": (end - stats.next_sample) * _SEQ_LEN / used,
    }


def cpu_s_of(pid: int) -> float:
    """CPU seconds of a process and its threads, so far."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    folder, num_bytes, num_documents = sys.argv[1:]
    ray.init("local", num_cpus=16, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    try:
        found = measure(
            Corpus(folder=Path(folder), num_bytes=int(num_bytes), num_documents=int(num_documents))
        )
    finally:
        ray.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")
