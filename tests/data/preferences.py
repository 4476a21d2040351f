"""Pairs of answers in files, jobs on them, and their rows as a reference in plain Python makes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig

Make = Callable[..., dict[str, Any]]
Row = tuple[list[int], list[int], list[int]]  # inputs, labels, document ids
WORDS = ["the", "fox", "über", "def f(x):", "jumps", "日本", "and", "return", "over", "\n"]


def pairs(num: int, longest: int = 5) -> list[dict[str, Any]]:
    """`num` different pairs of texts."""

    def text(seed: int) -> str:
        return " ".join(WORDS[(seed * 7 + j * j) % len(WORDS)] for j in range(seed * 31 % longest + 1))

    return [
        {
            "prompt": f"{i}: {text(i)}? ",
            "chosen": f"{text(3 * i + 1)} yes{i}",
            "rejected": f"{text(5 * i)} no{i}",
        }
        for i in range(num)
    ]


def write_pairs(folder: Path, records: Sequence[dict[str, Any]], num_files: int = 3) -> None:
    """The records dealt out to files of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        lines = [json.dumps(record) + "\n" for record in records[number::num_files]]
        (folder / f"part-{number}.jsonl").write_text("".join(lines))


def preference_job(
    make: Make, folder: Path, overrides: dict[str, Any] | None = None, **source: Any
) -> JobConfig:
    """A job on the pairs in a folder, with small fragments and windows."""
    return parse_config(preference_mapping(make, folder, overrides, **source))


def preference_mapping(
    make: Make, folder: Path, overrides: dict[str, Any] | None = None, **source: Any
) -> dict[str, Any]:
    """The same as a mapping."""
    whole = {"name": "pairs", "path": str(folder), "format": "jsonl", "content": "preference", **source}
    return make(
        {
            "data.sources": [whole],
            "data.fragment_bytes": 900,
            "data.window_bytes": 2500,
            "pack.mode": "pad",
            "pack.seq_len": 48,
            "train.objective": "tests.trainer.preference_objectives:margin",
            "train.objective_units": "samples",
            **(overrides or {}),
        }
    )


def reference_rows(
    tokenizer: Path, record: dict[str, Any], seq_len: int, ends: tuple[list[int], list[int]]
) -> tuple[Row, Row]:
    """The rows of a pair of texts. `ends`: the ids before and after each text."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return encoder.encode(text, add_special_tokens=False).ids

    def row(answer: str, number: int) -> Row:
        given = [*ends[0], *ids(record["prompt"])]
        tokens = [*given, *ids(answer), *ends[1]]
        return padded(tokens, len(given), seq_len, number)

    return row(record["chosen"], 0), row(record["rejected"], 1)


def padded(tokens: list[int], num_given: int, seq_len: int, number: int) -> Row:
    """A row of `tokens`, of which the first `num_given` are no targets."""
    assert len(tokens) - 1 <= seq_len
    inputs, labels = tokens[:-1], [t if i >= num_given else -100 for i, t in enumerate(tokens)][1:]
    missing = seq_len - len(inputs)
    return (
        inputs + [0] * missing,
        labels + [-100] * missing,
        [number] * len(inputs) + [-1] * missing,
    )


def rows_of(samples: Iterable[Any]) -> list[tuple[Row, Row]]:
    """The rows of samples of the package."""
    found = []
    for sample in samples:
        columns = (sample.input_ids, sample.labels, sample.document_ids)
        assert all(column.shape[0] == 2 and column.dtype == np.int32 for column in columns)
        found.append(tuple(tuple(column[row].tolist() for column in columns) for row in (0, 1)))
    return found
