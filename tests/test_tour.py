"""The worked example of docs/tour.md is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.planning.batches import rank_samples

TOUR = Path(__file__).resolve().parents[1] / "docs" / "tour.md"
WORDS = ["<eos>", "<unk>", "the", "cat", "sat", "on", "mat", "a", "dog", "ran", "far"]


def rows(head: str) -> list[list[str]]:
    """The cells of the table with this head."""
    table = TOUR.read_text().partition(f"{head}\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def numbers(array: Any) -> str:
    return " ".join(map(str, array.tolist()))


def make_tokenizer(folder: Path) -> None:
    """A token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_example_of_a_batch_is_what_the_stream_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "tokenizer")
    documents = rows("| record | text | tokens |")
    lines = [json.dumps({"text": text}) + "\n" for _, text, _ in documents]
    (tmp_path / "docs.jsonl").write_text("".join(lines))
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, **layers}
    source = {"name": "docs", "path": "docs.jsonl", "format": "jsonl"}
    job = {
        "run": {"name": "tour"},
        "data": {"sources": [source], "tokenizer": "./tokenizer", "shuffle": "block", "bos": False},
        "pack": {"seq_len": 4},
        "model": {"config": model},
        "train": {"global_batch_size": 2, "micro_batch_size": 1, "max_steps": 2, "lr": 1e-3},
    }
    samples = list(orchestrator.open_stream(job))
    assert [
        [str(s.index), numbers(s.input_ids), numbers(s.labels), numbers(s.document_ids)] for s in samples
    ] == rows("| sample | input_ids | labels | document_ids |")
    order = re.search(r"with seed 0 is ([\d, ]+), so its chunk has the tokens\n([\d ]+)\.", TOUR.read_text())
    assert order is not None
    ordered = " ".join(documents[int(record)][2] for record in order[1].split(", "))
    assert order[2] == ordered
    assert [rank_samples(0, 2, 1, rank, 2) for rank in (0, 1)] == [(0, 1), (1, 2)]
