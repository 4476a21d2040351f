"""What a second tokenizer brings: tokens per second of the feeder with two over those with one, for many
plain files and for one large .jsonl.gz.

`python -m benchmarks.data_scaling [--megabytes 150] [--repeats 3] [--encoder auto]`; last line: JSON. The
text is Python source that is installed here, each document once in an epoch. The clock runs from the first
step that the feeder hands out to the last, so that no start of a process is in it; feeder and Ray share the
machine's cores with the tokenizers. On two cores one tokenizer, the feeder and Ray fill more than one and a
half already; with the encoder `tokenizers`, which takes 1 us for a token, tokenizing alone is what limits. It
is measured with less text (`--epochs 1`) in smaller windows, the unit of which each tokenizer takes one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from benchmarks.data_feeder import REPLAY_BYTES, STEPS_AHEAD, coming_step, view
from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.feeder import start_feeder
from orchestrator.data.feed.pipeline_thread import TokenizerPool
from orchestrator.data.feed.remote_feed import RayFeed
from orchestrator.data.sample_corpus import train_tokenizer
from orchestrator.records.cursor import Cursor

FILE_BYTES = 8 << 20
VOCAB_SIZE, TOKENIZER_BYTES = 16_000, 4 << 20
SEQ_LEN, STEP_SAMPLES = 2048, 128
KINDS = ("many", "one_gz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The same documents as `many` plain files and as `one_gz`, and a tokenizer for them."""

    folder: Path
    num_bytes: int
    epochs: int
    window_bytes: int

    def path(self, kind: str) -> str:
        """What `data.sources` needs."""
        return str(self.folder / {"many": "many/*.jsonl", "one_gz": "one.jsonl.gz"}[kind])


def documents(num_bytes: int) -> Iterator[str]:
    """Python sources that are installed here, about so many bytes, each once."""
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")):
        for file in sorted(Path(root).rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if 1000 < len(text) < 1_000_000:
                yield text
                num_bytes -= len(text)
            if num_bytes < 0:
                return


def make_corpus(folder: Path, num_bytes: int, epochs: int, window_bytes: int) -> Corpus:
    """Writes it. Where fewer sources are installed it is smaller."""
    (folder / "many").mkdir(parents=True)
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in documents(num_bytes)]
    number = size = 0
    with gzip.open(folder / "one.jsonl.gz", "wb", compresslevel=4) as packed:
        for line in lines:
            packed.write(line)
            with (folder / "many" / f"part-{number:04d}.jsonl").open("ab") as file:
                file.write(line)
            size += len(line)
            number = size // FILE_BYTES
    train_tokenizer(documents(TOKENIZER_BYTES), VOCAB_SIZE, folder / "tokenizer")
    return Corpus(folder=folder, num_bytes=size, epochs=epochs, window_bytes=window_bytes)


def job(corpus: Corpus, kind: str, encoder: str) -> dict[str, Any]:
    """A job that reads it."""
    source = {"name": "made", "path": corpus.path(kind), "format": "jsonl"}
    data = {"sources": [source], "tokenizer": str(corpus.folder / "tokenizer"), "encoder": encoder}
    return {
        "run": {"name": "scaling", "storage": str(corpus.folder / "runs")},
        "data": {**data, "num_epochs": corpus.epochs, "window_bytes": corpus.window_bytes},
        "pack": {"seq_len": SEQ_LEN},
        "model": {"factory": "nobody:model"},
        "train": {"global_batch_size": STEP_SAMPLES, "micro_batch_size": 1, "max_steps": 1, "lr": 0.1},
        "cluster": {"num_workers": 1},
    }


def tokens_per_s(corpus: Corpus, kind: str, num_tokenizers: int, encoder: str, launch: str) -> float:
    """Of all epochs, after the first step. A rank of many takes its small share and asks ahead as ranks do:
    who takes is not measured. `ray.init` comes before.
    """
    spec = prepare_data(parse_config(job(corpus, kind, encoder)))
    feeder = start_feeder(
        launch, spec, tokenizers=TokenizerPool(num=num_tokenizers), replay_bytes=REPLAY_BYTES
    )
    try:
        cursor, began, first = Cursor(), 0.0, 0
        feed, rank = RayFeed(feeder, launch), (0, STEP_SAMPLES, 1)
        feed.open(view(launch, 1, 0, STEP_SAMPLES), cursor)
        while True:
            found = feed.get(coming_step(cursor, STEP_SAMPLES, SEQ_LEN), *rank, cursor)
            cursor = found.cursor
            if not began:
                began, first = time.monotonic(), cursor.consumed_tokens
            if found.end_of_data:
                return (cursor.consumed_tokens - first) / (time.monotonic() - began)
            feed.prefetch([coming_step(cursor, STEP_SAMPLES, SEQ_LEN, n) for n in range(STEPS_AHEAD)], *rank)
    finally:
        ray.kill(feeder)


def measure(corpus: Corpus, repeats: int, encoder: str) -> dict[str, Any]:
    """Medians of both kinds, taken in turns; `scaling_2_over_1` is of many files."""
    found: dict[tuple[str, int], list[float]] = {(kind, n): [] for kind in KINDS for n in (1, 2)}
    for repeat in range(repeats):
        for (kind, num), speeds in found.items():
            launch = f"{kind}-{num}-{repeat}"
            speeds.append(tokens_per_s(corpus, kind, num, encoder, launch))
            sys.stderr.write(f"{launch}: {speeds[-1] / 1e6:.2f} M tokens/s\n")
    speed = {key: statistics.median(speeds) for key, speeds in found.items()}
    rounded = {f"tokens_per_s_{kind}_{num}": round(value) for (kind, num), value in speed.items()}
    return {
        "scaling_2_over_1": round(speed["many", 2] / speed["many", 1], 3),
        "scaling_2_over_1_one_gz": round(speed["one_gz", 2] / speed["one_gz", 1], 3),
        **rounded,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--window-mib", type=int, default=16)
    parser.add_argument("--encoder", default="auto", choices=["auto", "gigatoken", "tokenizers"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        sizes = arguments.megabytes * 1_000_000, arguments.epochs, arguments.window_mib << 20
        corpus = make_corpus(Path(folder) / "corpus", *sizes)
        ray.init(
            "local", num_cpus=4, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False
        )
        try:
            figures = measure(corpus, arguments.repeats, arguments.encoder)
        finally:
            ray.shutdown()
    sys.stdout.write(json.dumps({"megabytes": corpus.num_bytes / 1e6, **figures}) + "\n")


if __name__ == "__main__":
    main()
