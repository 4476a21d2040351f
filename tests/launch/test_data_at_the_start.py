"""Data that change while a run starts: it freezes and trains what it looked at, and can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.frozen import read_frozen
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from tests.data.making import plain, samples, some_texts, write_corpus
from tests.launch.runner import nobody
from tests.raising import raises


@pytest.fixture
def data(tmp_path: Path, corpus: Path) -> Path:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl")
    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    return tmp_path / "data"


@pytest.fixture
def job(data: Path, tiny_config: Any) -> JobConfig:
    source = {"name": "made", "path": str(data), "format": "jsonl"}
    changes = {"data.sources": [source], "data.tokenizer": str(data.parent / "tokenizer")}
    return parse_config(tiny_config({**changes, "train.max_steps": 1000}))


def store_of(job: JobConfig) -> RunStore:
    return RunStore(starting.run_storage(job))


def started(job: JobConfig, meanwhile: Callable[[], object]) -> tuple[DataSpec, DataSpec]:
    """(what a start looked at, what it trains), where something happens while the cluster comes up."""
    store = store_of(job)
    looked_at = starting.prepare(job, store.storage, freeze=False)
    assert preview.look_before_start(store, job, looked_at, nobody).action == "start"
    meanwhile()
    with attempt_claim.claimed(store, job, looked_at, 0) as (attempt, _):
        return looked_at, starting.freeze(job, store.storage, looked_at, attempt)


def frozen_digest(job: JobConfig) -> str:
    frozen = read_frozen(starting.run_storage(job))
    assert frozen is not None
    assert frozen.record.manifests == {name: m.digest for name, m in frozen.manifests.items()}
    return frozen.record.manifests["made"]


def next_start(job: JobConfig) -> DataSpec:
    spec = starting.prepare(job, starting.run_storage(job), freeze=False)
    assert preview.look_before_start(store_of(job), job, spec, nobody).refusals == ()
    return spec


def test_a_file_that_comes_while_a_run_starts_is_not_the_runs_and_hinders_no_later_start(
    data: Path, job: JobConfig
) -> None:
    looked_at, trained = started(job, lambda: (data / "later.jsonl").write_text('{"text": "later"}\n'))
    run = store_of(job).read_run()
    assert run is not None
    assert run.identity.manifests == {"made": frozen_digest(job)}
    assert [row.path for row in trained.plans[0].manifest.files] == [f"part-{i}.jsonl" for i in range(3)]
    assert plain(samples(trained, 64)) == plain(samples(looked_at, 64))
    again = next_start(job)
    assert again.plans == trained.plans
    assert again.notes == (
        "1 file of source made came after its list was made and is not read, e.g. later.jsonl",
    )


def test_a_file_that_changes_while_a_run_starts_is_refused_when_it_is_opened(
    data: Path, job: JobConfig
) -> None:
    file = data / "part-1.jsonl"
    before = file.read_bytes()
    _, trained = started(job, lambda: file.write_bytes(before + b'\n{"text": "more"}\n'))
    sizes = len(before), len(file.read_bytes())
    with raises(DataIdentityError, "data.changed_files", "part-1.jsonl", *sizes):
        samples(trained, 64)
    file.write_bytes(before)
    assert plain(samples(next_start(job), 64)) == plain(samples(trained, 64))


def test_a_tokenizer_that_changes_while_a_run_starts_is_not_the_runs(data: Path, job: JobConfig) -> None:
    file = data.parent / "tokenizer" / "tokenizer.json"
    before = file.read_bytes()
    content = json.loads(before)
    content["model"]["merges"].pop()
    looked_at, trained = started(job, lambda: file.write_text(json.dumps(content)))
    assert trained.tokenizer == looked_at.tokenizer
    assert (Path(starting.run_storage(job).root) / "tokenizer" / "tokenizer.json").read_bytes() == before
    file.write_bytes(before)
    assert next_start(job).tokenizer == looked_at.tokenizer


def test_what_is_frozen_is_not_sent_along_with_the_spec(job: JobConfig) -> None:
    looked_at, trained = started(job, lambda: None)
    assert looked_at.unfrozen is not None
    assert trained.unfrozen is None
    assert trained == next_start(job)
