"""The text that the data benchmarks read: Python sources that are installed here, each once, and a tokenizer
trained on others of them.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from orchestrator.data.sample_corpus import train_tokenizer

VOCAB_SIZE, FILE_BYTES = 32_000, 8 << 20
_TRAIN_ONE_IN, _TRAIN_BYTES = 8, 24 << 20
_SHORTEST, _LONGEST = 200, 1_000_000  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A folder with `part-….jsonl`, `parquet/` of the same documents, and `tokenizer/`."""

    folder: Path
    num_bytes: int  # of the documents' text in UTF-8
    num_documents: int

    def job(
        self,
        kind: str = "jsonl",
        seq_len: int = 2048,
        batch: int = 16,
        files: str = "*.jsonl",
        **data: Any,
    ) -> dict[str, Any]:
        """What reads it, or those `files` of it; `data` are further fields of that section."""
        path = self.folder / (files if kind == "jsonl" else "parquet")
        source = {"name": "python", "path": str(path), "format": kind}
        return {
            "run": {"name": "measured", "storage": str(self.folder / "runs")},
            "data": {"sources": [source], "tokenizer": str(self.folder / "tokenizer"), **data},
            "pack": {"seq_len": seq_len},
            "train": {"global_batch_size": batch, "micro_batch_size": 1},
        }


def documents(measured: bool) -> Iterator[str]:
    """Installed sources, each text once: those that are measured, or those that train the tokenizer."""
    seen = set[int]()
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            digest = xxhash.xxh3_64_intdigest(text.encode())
            if not _SHORTEST < len(text) < _LONGEST or digest in seen:
                continue
            seen.add(digest)
            if (digest % _TRAIN_ONE_IN != 0) == measured:
                yield text


def make_corpus(folder: Path, max_bytes: int) -> Corpus:
    """Writes it, of at most about so many bytes of text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "parquet").mkdir(parents=True)
    num_documents = num_bytes = 0
    held: list[str] = []
    held_bytes = part = 0

    def write() -> None:
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in held)
        (folder / f"part-{part:04d}.jsonl").write_text(lines, encoding="utf-8")
        table = pa.table({"text": held})
        pq.write_table(table, folder / "parquet" / f"part-{part:04d}.parquet", row_group_size=400)

    for text in documents(measured=True):
        held.append(text)
        held_bytes += len(text.encode())
        num_documents += 1
        if held_bytes >= FILE_BYTES:
            write()
            num_bytes, part, held_bytes = num_bytes + held_bytes, part + 1, 0
            held.clear()
        if num_bytes + held_bytes >= max_bytes:
            break
    if held:
        write()
        num_bytes += held_bytes
    train_tokenizer(_of_bytes(_TRAIN_BYTES), VOCAB_SIZE, folder / "tokenizer")
    return Corpus(folder=folder, num_bytes=num_bytes, num_documents=num_documents)


def make_many_files(folder: Path, num_files: int) -> None:
    """Small files, a thousand in a folder."""
    for number in range(num_files):
        if number % 1000 == 0:
            here = folder / f"{number // 1000:04d}"
            here.mkdir(parents=True)
        (here / f"{number:06d}.jsonl").write_text(json.dumps({"text": f"document {number} " * 20}) + "\n")


def some_lines(corpus: Corpus, num_bytes: int) -> list[str]:
    """The first texts of the corpus, about so many bytes."""
    found = list[str]()
    for path in sorted(corpus.folder.glob("part-*.jsonl")):
        for line in path.open(encoding="utf-8"):
            found.append(json.loads(line)["text"])
            num_bytes -= len(found[-1])
            if num_bytes < 0:
                return found
    return found


def _of_bytes(num_bytes: int) -> Iterator[str]:
    taken = 0
    for text in islice(documents(measured=False), 100_000):
        yield text
        taken += len(text)
        if taken >= num_bytes:
            return
