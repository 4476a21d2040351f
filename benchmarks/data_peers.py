"""Other loaders on the same text with the same tokenizer: JSON lines in, packed samples of 2,048 tokens out.

`python benchmarks/data_peers.py NAME FOLDER` prints one JSON object. It imports nothing of this package: it
runs in an environment of its own. Each is used as its own documentation packs text; where it has no packing,
ids are concatenated and cut here. CPU seconds count after the imports, of all threads and processes.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SEQ_LEN, BATCH = 2048, 16
MAX_BYTES = 16 << 20  # of files: they take long
Found = tuple[float, int]  # CPU seconds when it began, tokens


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _files(folder: Path) -> list[str]:
    found, size = list[str](), 0
    for path in sorted(folder.glob("part-*.jsonl")):
        found.append(str(path))
        size += path.stat().st_size
        if size >= MAX_BYTES:
            break
    return found


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder / "tokenizer"))


def _texts(files: Iterable[str]) -> Iterator[str]:
    for file in files:
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def _cut(documents: Iterable[list[int]]) -> Iterator[list[int]]:
    held = list[int]()
    for ids in documents:
        held += ids
        whole = len(held) // SEQ_LEN * SEQ_LEN
        for first in range(0, whole, SEQ_LEN):
            yield held[first : first + SEQ_LEN]
        del held[:whole]


def datasets_streaming(folder: Path) -> Found:
    """HF datasets, streaming: batched tokenization and grouping as in transformers' run_clm."""
    import datasets

    tokenizer, begun = _tokenizer(folder), _cpu_s()
    stream = datasets.load_dataset("json", data_files=_files(folder), split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=1000)
    encoded = stream.map(
        lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]},
        batched=True,
        remove_columns=["text"],
    )
    return begun, sum(len(ids) for ids in _cut(row["input_ids"] for row in encoded))


def torchdata_nodes(folder: Path) -> Found:
    """torchdata.nodes: a source node, a mapper that encodes batches of texts, and a batcher of samples."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, Unbatcher

    tokenizer, begun = _tokenizer(folder), _cpu_s()
    texts = Batcher(IterableWrapper(_texts(_files(folder))), batch_size=256, drop_last=False)
    encoded = Loader(Unbatcher(Mapper(texts, lambda batch: tokenizer(batch)["input_ids"])))
    return begun, sum(len(ids) for ids in _cut(encoded))


def grain(folder: Path) -> Found:
    """Grain: a shuffled source, a map that encodes, and its own concatenation."""
    import grain as gr
    import numpy as np

    tokenizer, begun = _tokenizer(folder), _cpu_s()
    texts = list(_texts(_files(folder)))
    encoded = (
        gr.MapDataset.source(texts)
        .shuffle(seed=0)
        .map(lambda text: {"input_ids": np.asarray(tokenizer(text)["input_ids"], np.int32)})
        .to_iter_dataset()
    )
    return begun, sum(len(ids) for ids in _cut(row["input_ids"].tolist() for row in encoded))


def epochraft(folder: Path) -> Found:
    """Epochraft: its chain of calls."""
    from epochraft import CheckpointableDataset

    tokenizer, begun = _tokenizer(folder), _cpu_s()
    chain = (
        CheckpointableDataset.from_files(_files(folder), repeat=False)
        .tokenize(tokenizer)
        .concat_chunk(SEQ_LEN)
        .batch(BATCH)
    )
    return begun, sum(len(ids) for batch in chain for ids in batch["input_ids"])


def torchtitan(folder: Path) -> Found:
    """The text dataset of torchtitan, which packs by itself, over HF datasets' streaming."""
    import datasets
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    text_datasets.DATASETS["lines"] = DatasetConfig(
        path="",
        loader=lambda _: datasets.load_dataset(
            "json", data_files=_files(folder), split="train", streaming=True
        ),
        sample_processor=lambda sample: sample["text"],
    )
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(folder / "tokenizer"))
    begun = _cpu_s()
    stream = text_datasets.HuggingFaceTextDataset("lines", None, tokenizer, SEQ_LEN)
    return begun, sum(len(sample["input"]) for sample, _ in stream)


PEERS: dict[str, Callable[[Path], Found]] = {
    "datasets": datasets_streaming,
    "torchdata": torchdata_nodes,
    "grain": grain,
    "epochraft": epochraft,
    "torchtitan": torchtitan,
}

if __name__ == "__main__":
    begun, tokens = PEERS[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.write(json.dumps({"tokens": tokens, "cpu_s": _cpu_s() - begun}) + "\n")
