"""The sample corpus: real, whole or absent, the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from orchestrator.data import sample_corpus as corpus_module
from orchestrator.data.sample_corpus import CorpusReport, build_sample_corpus
from orchestrator.errors import DataError, RefusedError, StorageError
from tests.folders import contents
from tests.raising import raises


def documents(folder: Path) -> dict[str, str]:
    lines = [line for part in sorted(folder.glob("*.jsonl")) for line in part.read_bytes().splitlines()]
    return {record["path"]: record["text"] for record in map(json.loads, lines)}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with ten good files in two folders, one that is not UTF-8, one with a NUL, one empty."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    for number in range(10):
        where = folder / "deep" if number % 2 else folder
        (where / f"{number}.txt").write_text(
            f"document {number}: grüße\r\n" * 20, encoding="utf-8", newline=""
        )
    (folder / "latin.txt").write_bytes("grüße".encode("latin-1"))
    (folder / "image.bin").write_bytes(b"\x00\x01\x02")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".git" / "config").write_text("not a document", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CorpusReport]:
    folder = tmp_path_factory.mktemp("built") / "corpus"
    return folder, build_sample_corpus(folder)


@pytest.mark.chaos
def test_the_standard_library_makes_a_real_corpus(stdlib: tuple[Path, CorpusReport]) -> None:
    folder, report = stdlib
    found = documents(folder)
    assert len(found) == report.documents
    assert report.documents > 500
    assert report.text_bytes == sum(len(text.encode()) for text in found.values()) > 8_000_000
    assert len(list(folder.glob("*.jsonl"))) == 8
    assert "dataclasses.py" in found
    assert not any("site-packages" in path for path in found)


def test_its_tokenizer_has_8192_tokens_and_gives_any_text_back(stdlib: tuple[Path, CorpusReport]) -> None:
    folder, report = stdlib
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    assert report.vocab_size == tokenizer.get_vocab_size() == 8192
    text = "def f(x):\n\treturn 'ß→\u3042'  # \r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    sources = documents(folder)["dataclasses.py"]
    assert len(tokenizer.encode(sources).ids) < len(sources) / 3


def test_transformers_loads_the_tokenizer_with_its_end_of_text(corpus: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(corpus / "tokenizer"))
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.bos_token is None
    assert tokenizer.decode(tokenizer("import os\n")["input_ids"]) == "import os\n"


def test_any_folder_of_texts_will_do_and_what_is_no_text_is_counted(texts: Path, tmp_path: Path) -> None:
    report = build_sample_corpus(tmp_path / "out", texts)
    assert (report.documents, report.skipped_files, report.empty_files) == (10, 2, 1)
    expected = {str(p.relative_to(texts)): p.read_bytes().decode() for p in texts.rglob("[0-9].txt")}
    assert documents(tmp_path / "out") == expected
    assert "10 documents" in str(report)
    assert "2 not UTF-8 text, 1 empty" in str(report)


def test_the_same_files_make_the_same_corpus_byte_for_byte(texts: Path, tmp_path: Path) -> None:
    build_sample_corpus(tmp_path / "a", texts)
    build_sample_corpus(tmp_path / "b", texts)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_fewer_documents_than_parts_leave_no_empty_part(texts: Path, tmp_path: Path) -> None:
    report = build_sample_corpus(tmp_path / "out", texts / "deep")
    assert report.documents == 5
    assert sorted(report.sizes) == sorted(p.name for p in (tmp_path / "out").glob("*.jsonl"))
    assert len(report.sizes) == 5


def test_a_complete_corpus_is_left_as_it_is(texts: Path, tmp_path: Path) -> None:
    first = build_sample_corpus(tmp_path / "out", texts)
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    (texts / "more.txt").write_text("a document that came later", encoding="utf-8")
    assert build_sample_corpus(tmp_path / "out", texts) == first
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == stamps


def test_an_empty_folder_is_filled_and_the_corpus_may_lie_inside_its_source(texts: Path) -> None:
    (texts / "corpus").mkdir()
    assert build_sample_corpus(texts / "corpus", texts).documents == 10


@pytest.mark.parametrize("damage", ["cut", "lost", "foreign", "no tokenizer", "bad marker"])
def test_a_folder_that_is_not_a_complete_corpus_is_refused_and_left_alone(
    damage: str, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build_sample_corpus(out, texts)
    if damage == "cut":
        (out / "part-3.jsonl").write_bytes((out / "part-3.jsonl").read_bytes()[:-1])
    elif damage == "lost":
        (out / "part-3.jsonl").unlink()
    elif damage == "foreign":
        (out / "corpus.json").unlink()
    elif damage == "no tokenizer":
        (out / "tokenizer" / "tokenizer.json").unlink()
    else:
        (out / "corpus.json").write_text('{"version": 1}', encoding="utf-8")
    before = contents(out)
    with raises(RefusedError, "output.folder_taken", out):
        build_sample_corpus(out, texts)
    assert contents(out) == before


def test_a_corpus_of_another_source_is_refused_with_both(texts: Path, tmp_path: Path) -> None:
    build_sample_corpus(tmp_path / "out", texts)
    values = (tmp_path / "out", texts, "Python's standard library")
    with raises(RefusedError, "output.folder_taken", *values):
        build_sample_corpus(tmp_path / "out")


def test_a_build_that_fails_leaves_nothing_behind(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_module, "train_tokenizer", full_disk)
    with raises(StorageError, "storage.failed", tmp_path / "out", "No space left"):
        build_sample_corpus(tmp_path / "out", texts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["texts"]


def test_a_folder_without_text_or_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    with raises(DataError, "data.no_text", "UTF-8", tmp_path / "void"):
        build_sample_corpus(tmp_path / "out", tmp_path / "void")
    with raises(DataError, "data.not_a_folder", tmp_path / "missing"):
        build_sample_corpus(tmp_path / "out", tmp_path / "missing")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["void"]
