"""What a document's reader has: programs, the sample corpus, and a folder with both."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import orjson
import pytest

from orchestrator.data.sample_corpus import MARKER, VERSION, CorpusReport
from orchestrator.json_form import encode
from tests.conftest import TOKENIZER_VOCAB
from tests.documents.blocks import ROOT
from tests.small_configs import write_small_configs


@pytest.fixture(scope="module")
def programs(warm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with `orchestrator`, and `python` as the documents' reader has it."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "orchestrator"
    command.write_text(f'#!/bin/sh\nexec {warm} -m orchestrator.cli.commands "$@"\n')
    command.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return folder


@pytest.fixture(scope="module")
def sample(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' corpus as `orchestrator sample-corpus` would have left it."""
    folder = tmp_path_factory.mktemp("sample") / "corpus"
    shutil.copytree(corpus, folder)
    parts = sorted(folder.glob("*.jsonl"))
    report = CorpusReport(
        version=VERSION,
        source="Python's standard library",
        documents=sum(len(part.read_bytes().splitlines()) for part in parts),
        text_bytes=sum(part.stat().st_size for part in parts),
        skipped_files=0,
        empty_files=0,
        vocab_size=TOKENIZER_VOCAB,
        sizes={part.name: part.stat().st_size for part in parts},
    )
    (folder / MARKER).write_bytes(orjson.dumps(encode(report)))
    return folder


@pytest.fixture
def folder(sample: Path, tmp_path: Path) -> Path:
    """What a document's reader stands in."""
    shutil.copytree(sample, tmp_path / "corpus")
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    write_small_configs(tmp_path / "configs")
    return tmp_path
