"""`python -m benchmarks.data --json`: what the data plane costs beside a bare tokenizer, and how soon its
first batch comes.

The text is the Python sources that are installed here (`--megabytes`, each once); the tokenizer, a
byte-level BPE of 32,000 entries, is trained on other ones. `cpu_ratio_…` is tokens per CPU-second of all
processes for the whole way from the files to the arrays of a rank, over that of `encode_batch_fast` of
`tokenizers` alone on texts in memory, both with one thread of `tokenizers`, as a tokenizer process of a run
has; each is measured in a process of its own, in turns with the bare one and over the one of its turn, and is
the median of `--repeats`: `jsonl`, `parquet`, `fallback` (with `tokenizers` as encoder),
`open_stream_256` (sample by sample at seq_len 256). `open_stream_first_batch_s`: from `open_stream` at a
state in the middle to its first batch. `first_batch_90_over_1`: the same of a stream that is prepared, at
86 to 90 % of the corpus over at 1 to 5 %. `feeder_first_batch_s`: a warm feeder at a place that it does not
hold; `replay_ms`: a step that it holds; `feeder_tokens_per_s`: by the clock, to eight consumers, with
`feeder_tokenizers` tokenizers, all on this machine's cores; `feeder_tokens_per_cpu_s`: of the feeder's
process alone, which is what one serves that has a core for itself. `prepare_100k_files_s`: the first start's
look at 100,000 files. `scaling_…`: see `benchmarks.data_scaling`; `scaling_…_fallback` with `tokenizers` as
encoder. With `--peers PYTHON` (a Python that has them, `make bench-peers`) `peers` has ours over theirs for
each loader that is installed there. `--quick` is a small corpus and 2,000 files: it shows that all of it
runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.data_corpus import Corpus, make_corpus, make_many_files
from benchmarks.data_peers import PEERS

_RATIOS = ("jsonl", "parquet", "fallback", "open_stream_256")
_LIMIT_S = 3600


def _child(arguments: Sequence[str], python: str = sys.executable) -> dict[str, Any]:
    """The last line of a process as JSON. Raises `RuntimeError` with what it said if it failed."""
    inherited = os.environ.get("PYTHONPATH")
    path = str(ROOT) + (os.pathsep + inherited if inherited else "")
    ended = subprocess.run(
        [python, *arguments],
        # as every process of a run has it: else the threads of `tokenizers`, one per core, are measured, too
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{ended.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _figure(name: str, corpus: Corpus) -> dict[str, Any]:
    found = _child(["-m", "benchmarks.data_figures", name, *_given(corpus)])
    sys.stderr.write(f"{name}: {json.dumps(found)}\n")
    return found


def _given(corpus: Corpus) -> list[str]:
    return [str(corpus.folder), str(corpus.num_bytes), str(corpus.num_documents)]


def _speed(found: dict[str, Any]) -> float:
    return float(found["tokens"] / found["cpu_s"])


def measure_ratios(corpus: Corpus, repeats: int) -> dict[str, float]:
    """Speeds in tokens per CPU-second, and the ratios."""
    speeds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name in ("bare", *_RATIOS):
            speeds.setdefault(name, []).append(_speed(_figure(name, corpus)))
    ratios = {
        name: [mine / bare for mine, bare in zip(speeds[name], speeds["bare"], strict=True)]
        for name in _RATIOS
    }
    return {
        **{f"cpu_ratio_{name}": statistics.median(values) for name, values in ratios.items()},
        **{f"{name}_tokens_per_cpu_s": statistics.median(values) for name, values in speeds.items()},
    }


def measure_peers(corpus: Corpus, python: str, repeats: int, ours: float) -> dict[str, float]:
    """Ours over theirs, in tokens per CPU-second, for those that this Python has."""
    found = {}
    for name in PEERS:
        arguments = [str(ROOT / "benchmarks" / "data_peers.py"), name, str(corpus.folder)]
        values = list[float]()
        for _ in range(repeats):
            try:
                values.append(_speed(_child(arguments, python)))
            except RuntimeError as error:
                sys.stderr.write(f"{name} is left out: {error}\n")
                break
        if values:
            found[name] = ours / statistics.median(values)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--quick", action="store_true", help="a small corpus, once")
    parser.add_argument("--megabytes", type=int, default=150, help="of text at most")
    parser.add_argument("--repeats", type=int, default=3, help="of each ratio")
    parser.add_argument("--peers", default="", metavar="PYTHON", help="a Python that has other loaders")
    options = parser.parse_args()
    megabytes, repeats, files = options.megabytes, options.repeats, 100_000
    if options.quick:
        megabytes, repeats, files = min(megabytes, 12), 1, 2_000
    if min(megabytes, repeats) < 1:
        parser.error("--megabytes and --repeats are at least 1")
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        corpus = make_corpus(Path(folder, "corpus"), megabytes * 1_000_000)
        figures: dict[str, Any] = measure_ratios(corpus, repeats)
        figures |= _figure("first_batch", corpus) | _figure("audit", corpus)
        figures |= _child(["-m", "benchmarks.data_feeder", *_given(corpus)])
        make_many_files(corpus.folder / "many", files)
        prepared = _figure("prepare", corpus)
        figures["prepare_100k_files_s"] = None if options.quick else prepared["wall_s"]
        figures |= {"prepare_files": prepared["files"], "prepare_s": prepared["wall_s"]}
        if options.peers:
            figures["peers"] = measure_peers(
                corpus, options.peers, repeats, figures["jsonl_tokens_per_cpu_s"]
            )
    if importlib.util.find_spec("benchmarks.data_scaling") is not None:
        sized = ["--megabytes", str(megabytes), "--repeats", str(repeats)]
        figures |= _child(["-m", "benchmarks.data_scaling", *sized])
        sized = f"--megabytes {min(megabytes, 60)} --repeats 1 --epochs 1 --window-mib 2".split()
        slow = _child(["-m", "benchmarks.data_scaling", *sized, "--encoder", "tokenizers"])
        figures |= {f"{name}_fallback": value for name, value in slow.items()}
    figures = {name: _rounded(value) for name, value in figures.items()}
    figures |= {"text_mb": round(corpus.num_bytes / 1e6, 1), "cpus": os.cpu_count()}
    figures |= {"load_before": load, "load_after": round(os.getloadavg()[0], 1)}
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value if value is None or isinstance(value, str) else float(f"{value:.4g}")


if __name__ == "__main__":
    main()
