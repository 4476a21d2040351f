"""The figures of `benchmarks.data`, each measured in a process of its own that has seen none of the text.

`python -m benchmarks.data_figures NAME FOLDER` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import orchestrator
from benchmarks.audit import measure as measure_audit
from benchmarks.data_corpus import Corpus, some_lines
from orchestrator.config.loading import as_data_job
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.data.spec import DataSpec
from orchestrator.planning.batches import next_range
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.storage.files import Storage

Figures = dict[str, float]
_SLOW_BYTES = 8 << 20  # what `tokenizers` is measured on: a second of it is 3 MB
_BATCH, _SEQ_LEN = 16, 2048


_EARLY, _LATE = range(1, 6), range(86, 91)  # percent of the corpus


def cpu_s() -> float:
    """CPU seconds of this process, its threads, and the children that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def bare(corpus: Corpus) -> Figures:
    """`encode_batch_fast` of `tokenizers` alone, in batches of 1,000 texts that lie in memory."""
    from tokenizers import Tokenizer

    texts = some_lines(corpus, _SLOW_BYTES)
    tokenizer = Tokenizer.from_file(str(corpus.folder / "tokenizer" / "tokenizer.json"))
    began, tokens = cpu_s(), 0
    for first in range(0, len(texts), 1000):
        encoded = tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
        tokens += sum(len(each) for each in encoded)
    return {"tokens": tokens, "cpu_s": cpu_s() - began}


def _spec(corpus: Corpus, **changes: Any) -> DataSpec:
    return prepare_data(as_data_job(corpus.job(**changes)))


def _feed(spec: DataSpec) -> Figures:
    """Reads, parses, encodes, packs, and takes the arrays of the only rank, to the end."""
    view = GenerationView(
        attempt=1, generation=1, rank=0, world_size=1, members=(), host="", port=0, parent=None,
        source_rank=None, point=None, cursor=None, step=0, launch="",
    )  # fmt: skip
    began, cursor, feed = cpu_s(), Cursor(), InProcessFeed(spec)
    feed.open(view, cursor)
    while True:
        step = next_range(cursor.consumed_samples, cursor.consumed_tokens, _BATCH, _SEQ_LEN)
        assert step is not None, "there is no stop"
        taken = feed.get(step, 0, 1, 1, cursor)
        cursor = taken.cursor
        if taken.end_of_data:
            break
    feed.close()
    return {"tokens": cursor.consumed_tokens, "cpu_s": cpu_s() - began}


def jsonl(corpus: Corpus) -> Figures:
    """The whole pipeline."""
    return _feed(_spec(corpus))


def parquet(corpus: Corpus) -> Figures:
    """The same from Parquet."""
    return _feed(_spec(corpus, kind="parquet"))


def fallback(corpus: Corpus) -> Figures:
    """The same with `tokenizers` as encoder, of one file, about the text of the bare encoder: to its end, for
    what is read ahead of a stop would be counted.
    """
    return _feed(_spec(corpus, encoder="tokenizers", files="part-0000.jsonl"))


def open_stream_256(corpus: Corpus) -> Figures:
    """`open_stream`, sample by sample."""
    stream = orchestrator.open_stream(corpus.job(seq_len=256))
    began = cpu_s()
    for _ in stream:
        pass
    return {"tokens": stream.cursor.consumed_tokens, "cpu_s": cpu_s() - began}


def first_batch(corpus: Corpus) -> Figures:
    """From `open_stream` at a state to the first batch; and from a prepared stream at 86 to 90 % over at 1 to
    5 %: what documents lie at a place makes more of a difference than where it is.
    """
    config = corpus.job()
    total = sum(1 for _ in orchestrator.open_stream(config))
    stream, states, at = orchestrator.open_stream(config), dict[int, Any](), 0
    for percent in (*_EARLY, 50, *_LATE):
        for _ in islice(stream, total * percent // 100 - at):
            pass
        at = total * percent // 100
        states[percent] = stream.state_dict()

    def opened(percent: int) -> float:
        began = time.perf_counter()
        stream.load_state_dict(states[percent])
        next(stream)
        return time.perf_counter() - began

    def opened_anew() -> float:
        began = time.perf_counter()
        with orchestrator.open_stream(config, states[50]).batches() as loader:
            next(loader)
        return time.perf_counter() - began

    fresh = [opened_anew() for _ in range(3)]
    times: dict[int, list[float]] = {percent: [] for percent in (*_EARLY, *_LATE)}
    for _ in range(5):
        for percent, found in times.items():
            found.append(opened(percent))
    early, late = (statistics.median(min(times[p]) for p in places) for places in (_EARLY, _LATE))
    return {"open_stream_first_batch_s": statistics.median(fresh), "first_batch_90_over_1": late / early}


def audit(corpus: Corpus) -> Figures:
    """`audit` of a run that read all of it once."""
    how = argparse.Namespace(batch=_BATCH, seq_len=_SEQ_LEN, cursor_tokens=1 << 22, processes=2)
    found = measure_audit(corpus, how)
    return {"audit_tokens_per_cpu_s": found["tokens"] / found["audit_cpu_s"]}


def prepare(corpus: Corpus) -> Figures:
    """The first start's look at the small files in `many/`: listed, looked at, frozen in a run's folder."""
    source = {"name": "many", "path": str(corpus.folder / "many"), "format": "jsonl"}
    job = as_data_job({**corpus.job(), "data": {**corpus.job()["data"], "sources": [source]}})
    began = time.perf_counter()
    spec = prepare_data(job, Storage(str(corpus.folder / "frozen")))
    return {"files": len(spec.plans[0].manifest.files), "wall_s": time.perf_counter() - began}


FIGURES: dict[str, Callable[[Corpus], Figures]] = {
    each.__name__: each
    for each in (bare, jsonl, parquet, fallback, open_stream_256, first_batch, audit, prepare)
}


if __name__ == "__main__":
    name, folder, num_bytes, num_documents = sys.argv[1:]
    of = Corpus(folder=Path(folder), num_bytes=int(num_bytes), num_documents=int(num_documents))
    sys.stdout.write(json.dumps(FIGURES[name](of)) + "\n")
