"""Small corpora in every format, and the specs that read them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.dataset import prepare_data
from orchestrator.data.packing.samples import Sample, open_samples
from orchestrator.data.spec import DataSpec
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from tests.data import reference

WORDS = ["def", "return", "über", "naïve", "日本", "import", "x=1", "\U0001f3f3\ufe0f\u200d\U0001f308"]
WORDS += ["<|endoftext|>", "the", "of", "and\tto", "in"]
SUFFIX = {"jsonl": "jsonl", "jsonl.gz": "jsonl.gz", "jsonl.zst": "jsonl.zst", "parquet": "parquet"}


def some_texts(num: int, longest: int = 60, lines: bool = True) -> list[str]:
    """`num` different texts of up to `longest` words, one in eleven empty."""
    found = []
    for i in range(num):
        count = (i * 7919) % longest + 1
        words = [WORDS[(i * 31 + j * j) % len(WORDS)] + str(j % 7) for j in range(count)]
        text = "".join(w + ("\n" if lines and j % 9 == 8 else " ") for j, w in enumerate(words))
        found.append("" if i % 11 == 5 and lines else f"{i}: {text}")
    return found


def write_corpus(folder: Path, texts: Sequence[str], kind: str, num_files: int = 3) -> None:
    """The texts dealt out to files of a kind: jsonl, jsonl.gz, jsonl.zst, parquet, text, lines."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "text":
        for i, text in enumerate(texts):
            (folder / f"{i:04d}.txt").write_bytes(text.encode())
        return
    for number in range(num_files):
        part = list(texts[number::num_files])
        file = folder / f"part-{number}.{SUFFIX.get(kind, 'txt')}"
        if kind == "parquet":
            pq.write_table(pa.table({"text": part, "n": range(len(part))}), file, row_group_size=7)
            continue
        lines = part if kind == "lines" else [json.dumps({"n": 1, "text": text}) for text in part]
        lines.insert(len(lines) // 2, "")  # a blank line, which is no document
        data = "\n".join(lines).encode() + (b"\n" if number % 2 else b"")
        if kind.endswith("gz"):
            data = gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])
        elif kind.endswith("zst"):
            press = zstandard.ZstdCompressor()
            data = press.compress(data[: len(data) // 2]) + press.compress(data[len(data) // 2 :])
        file.write_bytes(data)


def job(make: Callable[..., dict[str, Any]], folder: Path, kind: str = "jsonl", **data: Any) -> JobConfig:
    """A job on such a corpus; small fragments and windows, other fields of `data` by name."""
    source = {"name": "made", "path": str(folder), "format": kind.partition(".")[0]}
    small = {"fragment_bytes": 900, "window_bytes": 2500, **data}
    return parse_config(make({"data.sources": [source], **{f"data.{k}": v for k, v in small.items()}}))


def spec_of(
    config: JobConfig, piece_bytes: int = 256, chunk_tokens: int = 700, folder: Path | None = None
) -> DataSpec:
    """The spec of a job with small pieces and chunks, so that a small corpus has many."""
    spec = prepare_data(config, None if folder is None else Storage(str(folder)))
    return replace(spec, settings=replace(spec.settings, piece_bytes=piece_bytes, chunk_tokens=chunk_tokens))


def expected(config: JobConfig, spec: DataSpec, seq_len: int) -> list[tuple[list[int], list[int], list[int]]]:
    """The samples of the independent reference."""
    manifest, data = spec.plans[0].manifest, config.data.model_dump()
    files = [Path(manifest.path(i)) for i in range(len(manifest.files))]
    epochs = (
        reference.texts(files, manifest.format, manifest.source, data, e, spec.plans[0].fragments_per_block)
        for e in range(config.data.num_epochs or 1)
    )
    documents = (text for epoch in epochs for text in epoch)
    stream = reference.tokens(documents, Path(config.data.tokenizer), spec.settings.piece_bytes)
    return list(reference.cut(stream, seq_len))


def samples(spec: DataSpec, seq_len: int, cursor: Cursor | None = None) -> list[Sample]:
    """The package's samples from a cursor on."""
    return list(open_samples(spec, cursor or Cursor(), seq_len))


def plain(found: Sequence[Sample]) -> list[tuple[list[int], list[int], list[int]]]:
    """Samples as lists, to be compared."""
    return [(s.input_ids.tolist(), s.labels.tolist(), s.document_ids.tolist()) for s in found]
