"""The stream once more, written independently: read, order, tokenize with `tokenizers`, concatenate, cut.

It shares with the package the order's hash and permutation, whose values stand in golden vectors.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import zstandard
from tokenizers import Tokenizer

from orchestrator.planning.order import block_at, record_hash

OPEN = {".gz": gzip.open, ".zst": zstandard.open}


def fragments(files: list[Path], form: str, size: int) -> Iterator[list[bytes]]:
    """The physical records of each fragment, in file order."""
    joined: list[bytes] = []
    joined_size = 0
    for file in files:
        stored = file.stat().st_size
        if form == "parquet":
            groups = pq.ParquetFile(file)
            for number in range(groups.num_row_groups):
                yield [t.encode() for t in groups.read_row_group(number)["text"].to_pylist()]
            continue
        with OPEN.get(file.suffix, open)(file, "rb") as opened:
            data = opened.read()
        records = [data] if form == "text" else data.splitlines(keepends=True)
        ranges = -(-stored // size) if form != "text" and file.suffix not in OPEN else 1
        if joined and (ranges > 1 or joined_size + stored > size):
            yield joined
            joined, joined_size = [], 0
        if ranges > 1:
            begins = [len(b"".join(records[:i])) for i in range(len(records))]
            for k in range(ranges):
                low, high = k * stored // ranges, (k + 1) * stored // ranges
                yield [r for r, begin in zip(records, begins, strict=True) if low <= begin < high]
        else:
            joined, joined_size = joined + records, joined_size + stored
    if joined:
        yield joined


def texts(files: list[Path], form: str, name: str, data: dict, epoch: int, per_block: int) -> Iterator[str]:
    """The documents of an epoch in the order of the stream."""
    listed = list(fragments(files, form, data["fragment_bytes"]))
    for position in range(-(-len(listed) // per_block)):
        block = block_at(data["seed"], name, epoch, position, -(-len(listed) // per_block), data["shuffle"])
        windows: list[list[tuple[int, int, bytes]]] = [[]]
        for number in range(block * per_block, min((block + 1) * per_block, len(listed))):
            for i, record in enumerate(listed[number]):
                held = sum(len(r) for _, _, r in windows[-1])
                if windows[-1] and held + len(record) > data["window_bytes"]:
                    windows.append([])
                windows[-1].append((number, i, record))
        for window in windows:
            if data["shuffle"] == "block":
                window.sort(key=lambda r: record_hash(data["seed"], name, epoch, r[0], r[1]))
            for _, _, record in window:
                if form == "jsonl":
                    yield from [json.loads(record)["text"]] if record.strip() else []
                elif form == "lines":
                    yield from [record.decode().rstrip("\n")] if record.strip() else []
                else:
                    yield record.decode()


def pieces(text: str, limit: int) -> Iterator[str]:
    """A document's pieces."""
    data = text.encode()
    while len(data) > limit:
        tail = data[limit - limit // 16 : limit]
        border = b"\n" if b"\n" in tail else b" "
        cut = limit - len(tail) + tail.rfind(border) + 1 if border in tail else limit
        while data[cut] >> 6 == 0b10:
            cut -= 1
        yield data[:cut].decode()
        data = data[cut:]
    yield data.decode()


def tokens(documents: Iterator[str], tokenizer: Path, limit: int) -> list[tuple[int, int]]:
    """(token, number of its document) of all documents, with EOS behind each."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    encoder.encode_special_tokens = True
    eos = encoder.token_to_id("<|endoftext|>")
    stream: list[tuple[int, int]] = []
    for number, text in enumerate(t for t in documents if t):
        ids = [
            i for piece in pieces(text, limit) for i in encoder.encode(piece, add_special_tokens=False).ids
        ]
        stream += [(i, number) for i in [*ids, eos]]
    return stream


def cut(stream: list[tuple[int, int]], seq_len: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """(inputs, labels, document ids) of each sample, the last one padded."""
    for p in range(0, len(stream) - 1, seq_len):
        run = stream[p : p + seq_len + 1]
        ids, labels, documents = [i for i, _ in run[:-1]], [i for i, _ in run[1:]], [d for _, d in run[:-1]]
        order = {d: k for k, d in enumerate(dict.fromkeys(documents))}
        pad = seq_len - len(ids)
        yield ids + [0] * pad, labels + [-100] * pad, [order[d] for d in documents] + [-1] * pad
