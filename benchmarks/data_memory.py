"""The memory of the feed under corpora that would fill it: its peak beside `data.memory_bytes`.

`python -m benchmarks.data_memory --json [--only NAME …] [--mib N]`; the last line is one JSON object. Each
case (`CASES`) has a feeder and two tokenizers of its own, and a consumer that takes some steps, stands still,
and goes on. `peak_mb` is the most that was there at one time, looked at every 20 ms, of: memory of the
feeder's and the tokenizers' processes that is theirs alone (`RssAnon` of /proc), their parts of mapped files
(`Pss_File`), and the bytes of objects in Ray's object store. The peaks of the three kinds of holders are
given beside it; they need not have been at the same time. `bound_mb` is what `data.memory_bytes` comes to.
`refused` is the message where a corpus does not fit into it, which is how a bound is kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from benchmarks.data_feeder import STEPS_AHEAD, coming_step, view
from benchmarks.data_scaling import documents
from orchestrator.config.loading import as_data_job
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.feeder import start_feeder
from orchestrator.data.feed.memory import memory_of
from orchestrator.data.feed.pipeline_thread import TokenizerPool
from orchestrator.data.feed.remote_feed import RayFeed
from orchestrator.data.sample_corpus import train_tokenizer
from orchestrator.errors import OrchestratorError
from orchestrator.records.cursor import Cursor

SEQ_LEN, STEP_SAMPLES, NUM_TOKENIZERS = 2048, 64, 2
_LOOK_S, _FILES_EVERY = 0.02, 50
_MB = 1_000_000


# ------------------------------------------------------------------------------------------------ corpora
@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a case reads: sources, and further settings of the section `data`."""

    sources: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)


def _one(path: Path, kind: str, **settings: Any) -> Made:
    return Made(sources=[{"name": "made", "path": str(path), "format": kind}], settings=settings)


def plain(folder: Path, megabytes: int) -> Made:
    """Source code as JSON lines."""
    folder.mkdir()
    _json_lines(folder / "0.jsonl", min(megabytes, 100) * _MB)
    for number in range(1, -(-megabytes // 100)):
        # no links: one file is read once, whatever it is called
        shutil.copyfile(folder / "0.jsonl", folder / f"{number}.jsonl")
    return _one(folder, "jsonl")


def words(folder: Path, megabytes: int) -> Made:
    """Words of letters that never come again: ten million are 100 MB."""
    folder.mkdir()
    letters = str.maketrans("0123456789", "ghijklmnop")
    with (folder / "words.txt").open("w") as file:
        for first in range(0, megabytes * 100_000, 1000):
            numbers = range(10_000_000 + first, 10_001_000 + first)
            file.write(
                " ".join(f"{n * 2654435761 % (1 << 36):09x}".translate(letters) for n in numbers) + "\n"
            )
    return _one(folder, "lines")


def document(folder: Path, megabytes: int) -> Made:
    """One text of so many bytes, and a JSON line of half as many, each in a source of its own."""
    folder.mkdir()
    text = "".join(documents(min(megabytes, 50) * _MB))
    text = (text * (megabytes * _MB // len(text) + 1))[: megabytes * _MB]
    (folder / "one.txt").write_text(text)
    (folder / "one.jsonl").write_text(json.dumps({"text": text[: megabytes * _MB // 2]}) + "\n")
    kinds = {"text": "txt", "jsonl": "jsonl"}
    sources = [{"name": k, "path": str(folder / f"one.{end}"), "format": k} for k, end in kinds.items()]
    return Made(sources=sources)


def sources(folder: Path, megabytes: int) -> Made:
    """Fifty sources of equal weights."""
    folder.mkdir()
    for number in range(50):
        _json_lines(folder / f"{number}.jsonl", megabytes * _MB // 50)
    found = [
        {"name": f"s{n}", "path": str(folder / f"{n}.jsonl"), "format": "jsonl", "weight": 1.0}
        for n in range(50)
    ]
    return Made(sources=found)


def packed(folder: Path, megabytes: int) -> Made:
    """One large .jsonl.gz."""
    folder.mkdir()
    _json_lines(folder / "part", min(megabytes, 100) * _MB)
    with gzip.open(folder / "part.gz", "wb", compresslevel=1) as file, (folder / "part").open("rb") as part:
        shutil.copyfileobj(part, file)
    member = (folder / "part.gz").read_bytes()
    with (folder / "one.jsonl.gz").open("wb") as file:
        for _ in range(-(-megabytes // 100)):
            file.write(member)
    return _one(folder / "one.jsonl.gz", "jsonl")


def row_groups(folder: Path, megabytes: int) -> Made:
    """A Parquet file of one row group, of values of 2 KB."""
    return _parquet(folder, megabytes, 2000, data_page_size=1 << 20)


def large_pages(folder: Path, megabytes: int) -> Made:
    """Values of 100 KB, of which pyarrow puts a thousand in a page."""
    return _parquet(folder, megabytes, 100_000)


def short_lines(folder: Path, megabytes: int) -> Made:
    """Documents of a letter each: what is noted of one is more than the letter."""
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a\n" * (megabytes * _MB // 2))
    return _one(folder, "lines")


def empty(folder: Path, megabytes: int) -> Made:
    """Documents without a token, and source code behind them."""
    folder.mkdir()
    line = b'{"text": ""}\n'
    with (folder / "0.jsonl").open("wb") as file:
        for _ in range(megabytes):
            file.write(line * (_MB // len(line)))
    _json_lines(folder / "1.jsonl", 50 * _MB)
    return _one(folder, "jsonl", shuffle="none")


def slow_encoder(folder: Path, megabytes: int) -> Made:
    """Source code, encoded by `tokenizers`."""
    made = plain(folder, megabytes)
    return Made(sources=made.sources, settings={"encoder": "tokenizers"})


def _json_lines(path: Path, num_bytes: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        while num_bytes > 0:
            for text in documents(num_bytes):
                num_bytes -= file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def _parquet(folder: Path, megabytes: int, value_bytes: int, **options: Any) -> Made:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    text = "".join(documents(40 * _MB))
    starts = range(0, len(text) - value_bytes, value_bytes)
    column = pa.chunked_array(
        [pa.array([text[at : at + value_bytes] for at in starts])] * (-(-megabytes * _MB // len(text)))
    )
    table = pa.table({"text": column})
    pq.write_table(table, folder / "a.parquet", row_group_size=1 << 30, use_dictionary=False, **options)
    return _one(folder, "parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A corpus of `megabytes`, of which `steps` are taken, a pause of `pause_s` after the third."""

    make: Callable[[Path, int], Made]
    megabytes: int
    steps: int
    pause_s: float = 8.0


CASES: dict[str, Case] = {
    "stalled": Case(make=plain, megabytes=1200, steps=300, pause_s=20.0),
    "words": Case(make=words, megabytes=100, steps=10_000),
    "document": Case(make=document, megabytes=200, steps=60),
    "sources": Case(make=sources, megabytes=1000, steps=200),
    "packed": Case(make=packed, megabytes=1200, steps=600),
    "row_groups": Case(make=row_groups, megabytes=1000, steps=600),
    "large_pages": Case(make=large_pages, megabytes=400, steps=300),
    "short_lines": Case(make=short_lines, megabytes=64, steps=60),
    "empty": Case(make=empty, megabytes=60, steps=60, pause_s=1.0),
    "slow_encoder": Case(make=slow_encoder, megabytes=100, steps=10),
}


# ------------------------------------------------------------------------------------------------ looking
class Peak:
    """The most memory that a feeder and its tokenizers had, looked at by a thread."""

    def __init__(self, feeder_pid: int) -> None:
        self._feeder, self._raylet = feeder_pid, _parent(feeder_pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.all = self.feeder = self.tokenizers = self.store = 0
        self._files = dict[int, int]()  # Pss_File by process
        nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
        (node,) = (node for node in nodes if node["Alive"])
        self._address = (node["NodeManagerAddress"], node["NodeManagerPort"])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Looks until the block is left."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(_LOOK_S):
            if looks % _FILES_EVERY == 0:
                self._files = {pid: _field(pid, "smaps_rollup", "Pss_File") for pid in self._processes()}
            looks += 1
            held = {pid: _field(pid, "status", "RssAnon") + extra for pid, extra in self._files.items()}
            feeder, store = held.pop(self._feeder, 0), self._store_bytes()
            tokenizers = sum(held.values())
            self.feeder, self.store = max(self.feeder, feeder), max(self.store, store)
            self.tokenizers = max(self.tokenizers, tokenizers)
            self.all = max(self.all, feeder + tokenizers + store)

    def _processes(self) -> list[int]:
        """The feeder, and the actors of its pipeline: processes of this Ray that are no idle workers."""
        found = [self._feeder]
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                name = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::") and b"Tokenizer" in name and _parent(int(entry)) == self._raylet:
                found.append(int(entry))
        return found

    def _store_bytes(self) -> int:
        from ray._private.internal_api import node_stats

        stats: Any = node_stats(*self._address, include_memory_info=False)  # type: ignore[no-untyped-call]
        return int(stats.store_stats.object_store_bytes_used)


def _parent(pid: int) -> int:
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _field(pid: int, file: str, name: str) -> int:
    """A field in kB of a file in /proc, in bytes; 0 of a process that ended."""
    try:
        lines = Path("/proc", str(pid), file).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


# ------------------------------------------------------------------------------------------------ a case
def run_case(
    name: str, case: Case, folder: Path, tokenizer: Path, memory_bytes: int | None
) -> dict[str, Any]:
    """The peaks of one case. Ray runs."""
    made = case.make(folder / name, case.megabytes)
    job = as_data_job(
        {
            "run": {"name": "memory", "storage": str(folder / "runs")},
            "data": {
                "sources": made.sources,
                "tokenizer": str(tokenizer),
                "num_tokenizers": NUM_TOKENIZERS,
                "memory_bytes": memory_bytes,
                **made.settings,
            },
            "pack": {"seq_len": SEQ_LEN},
            "train": {"global_batch_size": STEP_SAMPLES, "micro_batch_size": 1},
        }
    )
    spec = prepare_data(job)
    memory = memory_of(job, spec)
    feeder = start_feeder(
        name,
        spec,
        tokenizers=TokenizerPool(num=NUM_TOKENIZERS),
        replay_bytes=job.data.replay_bytes,
        memory=memory,
    )
    try:
        peak = Peak(ray.get(feeder.stats.remote()).pid)
        began = time.monotonic()
        with peak.watched():
            taken, refused = _take(feeder, name, case)
        seconds = time.monotonic() - began
    finally:
        ray.kill(feeder)
        shutil.rmtree(folder / name)
    return {
        "peak_mb": round(peak.all / _MB),
        "bound_mb": round(memory.memory_bytes / _MB),
        "feeder_mb": round(peak.feeder / _MB),
        "tokenizers_mb": round(peak.tokenizers / _MB),
        "store_mb": round(peak.store / _MB),
        "tokens": taken,
        "seconds": round(seconds),
        **({"refused": refused} if refused else {}),
    }


def _take(feeder: Any, launch: str, case: Case) -> tuple[int, str]:
    """(tokens that were taken, why no more were)."""
    feed, cursor = RayFeed(feeder, launch), Cursor()
    feed.open(view(launch, 1, 0, 1), cursor)
    try:
        for number in range(case.steps):
            steps = [coming_step(cursor, STEP_SAMPLES, SEQ_LEN, n) for n in range(STEPS_AHEAD)]
            taken = feed.get(steps[0], 0, 1, 1, cursor)
            cursor = taken.cursor
            if taken.end_of_data:
                break
            feed.prefetch(steps[1:], 0, 1, 1)
            if number == 2:  # noqa: PLR2004
                time.sleep(case.pause_s)
    except OrchestratorError as error:
        return cursor.consumed_tokens, str(error)
    return cursor.consumed_tokens, ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--mib", type=int, help="data.memory_bytes of every case; default: the usual one")
    options = parser.parse_args()
    asked = None if options.mib is None else options.mib << 20
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as place:
        folder = Path(place)
        train_tokenizer(documents(4 * _MB), 16_000, folder / "tokenizer")
        ray.init(
            "local", num_cpus=4, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False
        )
        try:
            for name in options.only:
                figures[name] = run_case(name, CASES[name], folder, folder / "tokenizer", asked)
                sys.stderr.write(f"{name}: {json.dumps(figures[name])}\n")
        finally:
            ray.shutdown()
    figures |= {"cpus": os.cpu_count(), "load_after": round(os.getloadavg()[0], 1)}
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
