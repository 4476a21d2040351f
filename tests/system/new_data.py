"""A run of two sources whose files grow: `a` has a list for each epoch, `b` is started anew. What was read of
them is counted in their files, by the tokenizer's library itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.data import frozen
from orchestrator.storage.files import Storage
from tests.system.harness import Job

_FIRST_TOKENS = 3 * 32 * 32
ANEW = "resume.restart_sources=[b] is done"


def write(folder: Path, name: str, num: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = (f"{name} {i}: " + " ".join(f"w{(i * j) % 13}" for j in range(3 + i % 17)) for i in range(num))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def first_settings(data: Path) -> dict[str, Any]:
    """Of the launch that begins the run: it trains 3 steps, far from the end of an epoch."""
    for name in ("a", "b"):
        write(data / name, "one", 300)
    sources = [{"name": n, "path": str(data / n), "format": "jsonl", "weight": 1} for n in ("a", "b")]
    of_data = {"sources": sources, "on_end": "drop", "num_epochs": 2, "refresh": "epoch"}
    small = {"fragment_bytes": 700, "window_bytes": 1500}
    shape = {"train__global_batch_size": 32, "train__micro_batch_size": 16, "resume__every_steps": 4}
    return {**{f"data__{k}": v for k, v in (of_data | small).items()}, **shape, "train__max_steps": 3}


def second_settings(data: Path, first: dict[str, Any]) -> dict[str, Any]:
    """Of the launch that goes on to the end of the data, when more files have come."""
    for name in ("a", "b"):
        write(data / name, "two", 60)
    return {**first, "train__max_steps": 100_000, "resume__restart_sources": ["b"]}


def assert_lists_were_followed(job: Job) -> None:
    """`a` was trained by its first list, then by that of its next epoch, `b` from the restart on by its new
    one, twice, each to its last token; and the restart was carried out once.
    """
    store, folder = RunStore(Storage(job.run.uri)), Path(job.run.uri)
    lists = {source.name: source for source in store.parents()[0][-1].sources}
    assert [span.start for span in lists["b"].spans] == [0, 1], "it was started anew once"
    versions = frozen.later_versions(Storage(str(folder)))
    assert versions == {"a": ("0e1",), "b": ("1", "1e2")}
    count = _counter(job)
    ended = store.read_point(store.point_names()[-1]).cursor
    texts = {version: _files(folder, *version) for version in (("a", "0e1"), ("b", "1"), ("b", "1e2"))}
    assert {tuple(path.name for path in paths) for paths in texts.values()} == {("one.jsonl", "two.jsonl")}
    of_a = count(texts["a", "0e1"][:1]) + count(texts["a", "0e1"])
    of_b = count(texts["b", "1"]) + count(texts["b", "1e2"])
    trained = {name: share.tokens for name, share in ended.mixture.items()}
    assert trained == {"a": of_a - 1, "b": _FIRST_TOKENS // 2 + of_b - 1}
    report = job.run.audit()
    assert report["exactly_once"], report
    assert any("epoch 0 (its source was restarted" in text for text in report["not_shown"]), report
    assert len(report["not_shown"]) == 1, report


def _files(folder: Path, source: str, version: str) -> list[Path]:
    found = frozen.read_later(Storage(str(folder)), source, version)
    assert found is not None
    return [Path(found.manifest.path(file)) for file in range(len(found.manifest.files))]


def _counter(job: Job) -> Any:
    tokenizer = Tokenizer.from_file(str(Path(job.config().data.tokenizer) / "tokenizer.json"))

    def count(files: list[Path]) -> int:
        texts = [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]
        return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) + 1 for text in texts)

    return count
