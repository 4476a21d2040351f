"""How well documents are shuffled, against a full permutation: `python -m benchmarks.shuffle [--json]`.

Computed from the order itself (`planning.order`), for a corpus of equal documents: nothing is read. A block
of fragments that follow each other in the files is a window, blocks come in a keyed permutation, and
documents are permuted inside a block. So neighbours in the stream come from one stretch of `window_bytes /
2`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from orchestrator.planning.order import block_at, window_order

FRAGMENT_BYTES = 2 << 20
DOCUMENT_BYTES = 4 << 10
BATCH_TOKENS = (1 << 17, 1 << 19, 1 << 22)
BYTES_PER_TOKEN = 4


def stream_order(corpus_bytes: int, window_bytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(num_documents,) the number in file order of each document of the stream."""
    per_fragment = FRAGMENT_BYTES // DOCUMENT_BYTES
    num_fragments = corpus_bytes // FRAGMENT_BYTES
    per_block = max(1, window_bytes // (2 * FRAGMENT_BYTES))
    num_blocks = -(-num_fragments // per_block)
    found = []
    for position in range(num_blocks):
        block = block_at(seed, "web", 0, position, num_blocks, "block")
        fragments = range(block * per_block, min((block + 1) * per_block, num_fragments))
        runs = [(fragment, 0, per_fragment) for fragment in fragments]
        found.append(
            fragments.start * per_fragment + window_order(runs, seed, "web", 0, "block").astype(np.int64)
        )
    return np.concatenate(found)


def quality(order: np.ndarray[Any, np.dtype[np.int64]], file_bytes: int) -> dict[str, float]:
    """What is measured of an order: the mean distance in the files of neighbours in the stream, as a share of
    a full permutation's (a third of the corpus); the mean length of runs from one file, in documents; and, by
    the tokens of a batch, how many files it holds, as a share of what a full permutation would hold.
    """
    num, files = len(order), order // max(1, file_bytes // DOCUMENT_BYTES)
    runs = 1 + int(np.count_nonzero(np.diff(files)))
    figures = {
        "neighbour_distance": float(np.abs(np.diff(order)).mean() / (num / 3)),
        "run_length": num / runs,
    }
    shuffled = np.random.default_rng(0).permutation(files)
    for tokens in BATCH_TOKENS:
        size = tokens * BYTES_PER_TOKEN // DOCUMENT_BYTES
        figures[f"files_in_batch_{tokens}"] = _files(files, size) / _files(shuffled, size)
    return figures


def _files(files: np.ndarray[Any, np.dtype[np.int64]], size: int) -> float:
    starts = range(0, max(1, len(files) - size + 1), size)
    return float(np.mean([len(np.unique(files[start : start + size])) for start in starts]))


def measure(corpus_bytes: int, file_bytes: int) -> list[dict[str, float]]:
    """The figures for some sizes of the window, and for a full permutation."""
    rows = []
    for window_mib in (4, 16, 64, 256, 1024):
        order = stream_order(corpus_bytes, window_mib << 20)
        rows.append({"window_mib": float(window_mib), **quality(order, file_bytes)})
    full = np.random.default_rng(1).permutation(corpus_bytes // DOCUMENT_BYTES)
    return [*rows, {"window_mib": float("inf"), **quality(full, file_bytes)}]


def main() -> None:
    """Prints a table, with `--json` as its last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus-gib", type=int, default=8)
    parser.add_argument("--file-mib", type=int, default=64, help="size of a file whose documents are alike")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.corpus_gib << 30, arguments.file_mib << 20)
    for row in rows:
        sys.stdout.write("  ".join(f"{name} {value:.3f}" for name, value in row.items()) + "\n")
    if arguments.json:
        document = [{k: None if v == float("inf") else v for k, v in row.items()} for row in rows]
        sys.stdout.write(
            json.dumps({"corpus_gib": arguments.corpus_gib, "file_mib": arguments.file_mib, "rows": document})
            + "\n"
        )


if __name__ == "__main__":
    main()
