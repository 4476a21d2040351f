"""What was found out of a tokenizer is found out once, by content, and never needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.data.dataset import prepare_data
from orchestrator.data.tokens import encoder, tokenizer_files
from orchestrator.storage import home
from orchestrator.storage.home import CACHE_VARIABLE, remembered
from tests.data.making import job, plain, some_texts, write_corpus

Make = Callable[..., dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    number: int
    words: tuple[str, ...] = ()


class Finder:
    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> Found:
        self.asked += 1
        return Found(number=7, words=("a", "b"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    new_process(monkeypatch)
    return tmp_path / "cache"


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process holds is gone."""
    monkeypatch.setattr(home, "_held", {})
    monkeypatch.setattr(tokenizer_files, "_examined", {})


def test_what_was_found_is_not_looked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Finder()
    for _ in range(2):
        assert remembered(Found, ["x", 1], find) == find() == Found(number=7, words=("a", "b"))
        new_process(monkeypatch)
    assert find.asked == 1 + 2
    remembered(Found, ["x", 2], find)
    assert find.asked == 4
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"check": "", "value": {"number": 1}}'])
def test_a_damaged_file_is_found_out_anew_and_replaced(
    damage: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Finder()
    remembered(Found, ["x"], find)
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    for content in (damage, whole.replace(b"7", b"8")):
        kept.write_bytes(content)
        new_process(monkeypatch)
        assert remembered(Found, ["x"], find).number == 7
        assert kept.read_bytes() == whole
    assert find.asked == 3


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    find = Finder()
    assert remembered(Found, ["x"], find).number == 7
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert remembered(Found, ["x"], find).number == 7
    assert find.asked == 2


def test_a_stream_opened_again_compares_no_encoders_and_gives_the_same_samples(
    folder: Path, tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "data", some_texts(60), "jsonl")
    config = job(tiny_config, tmp_path / "data")
    first = list(orchestrator.open_stream(config))
    assert len(list(folder.iterdir())) == 2
    new_process(monkeypatch)

    class ComparedError(Exception):
        pass

    def never(*_: Any) -> None:
        raise ComparedError

    monkeypatch.setattr(encoder, "find_difference", never)
    again = list(orchestrator.open_stream(config, first[9].cursor))
    assert plain(again) == plain(first[10:])
    assert prepare_data(config).identity() == prepare_data(config).identity()
    write_corpus(tmp_path / "data", [*some_texts(60), "one more"], "jsonl")
    with pytest.raises(ComparedError):  # other documents: they are compared
        prepare_data(config)


def test_a_tokenizer_that_changed_is_examined_anew(
    folder: Path, tmp_path: Path, tiny_config: Make, corpus: Path
) -> None:
    name = tmp_path / "t"
    name.mkdir()
    for file in (corpus / "tokenizer").iterdir():
        (name / file.name).write_bytes(file.read_bytes())
    before = tokenizer_files.examine("t", tokenizer_files.fetch(str(name)))
    content = json.loads((name / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 5000, "content": "<|more|>"})
    (name / "tokenizer.json").write_text(json.dumps(content))
    after = tokenizer_files.examine("t", tokenizer_files.fetch(str(name)))
    assert after.digest != before.digest
    assert "<|more|>" in after.model.special_tokens
    assert folder.is_dir()
