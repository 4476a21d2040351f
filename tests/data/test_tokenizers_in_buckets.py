"""A tokenizer that lies in a bucket is the one of the same files in a folder, and a run that was begun with
it notices when it is another.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data.dataset import prepare_data
from orchestrator.data.tokens import tokenizer_files
from orchestrator.data.tokens.tokenizer_files import examine, fetch
from orchestrator.errors import ConfigError, OrchestratorError, StorageError
from orchestrator.planning.resume.identity import compare
from orchestrator.storage.files import Storage
from orchestrator.storage.home import temporary_cache_folder
from orchestrator.storage.open import open_storage
from tests.data.making import job, some_texts, write_corpus
from tests.data.tiktoken_ranks import CL100K, ranks
from tests.raising import raises
from tests.storage.servers import new_bucket, reach

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def bucket(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    reach(monkeypatch, s3_server, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return new_bucket(s3_server)


def uploaded(folder: Path, uri: str) -> str:
    storage = open_storage(uri)
    for path in folder.iterdir():
        storage.write(path.name, path.read_bytes())
    return uri


def test_a_tokenizer_of_a_bucket_is_that_of_the_folder(bucket: str, corpus: Path) -> None:
    folder = corpus / "tokenizer"
    uri = uploaded(folder, f"{bucket}/tokenizers/mine")
    open_storage(uri).write("model.safetensors", b"is not read")
    open_storage(uri).write("checkpoints/tokenizer.json", b"is another's")
    assert fetch(uri) == fetch(f"{uri}/") == fetch(str(folder))
    assert examine(uri, fetch(uri)).digest == examine(str(folder), fetch(str(folder))).digest


def test_ranks_of_a_bucket_are_those_of_the_file(bucket: str, tmp_path: Path) -> None:
    made = tmp_path / "tok"
    made.mkdir()
    encoded = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks().items())
    (made / "own.tiktoken").write_text("".join(encoded))
    (made / "tiktoken.json").write_text(json.dumps({"pattern": CL100K, "special_tokens": {"<|e|>": 400}}))
    uri = uploaded(made, f"{bucket}/tok")
    known = fetch(str(made / "own.tiktoken"))
    assert fetch(uri) == known, "the only ranks in it"
    assert fetch(f"{uri}/own.tiktoken") == known
    with raises(ConfigError, "tokenizer.not_found", f"data.tokenizer={uri}/other.tiktoken"):
        fetch(f"{uri}/other.tiktoken")


def test_a_run_that_began_with_it_needs_it_no_more_and_notices_another(
    bucket: str, corpus: Path, tmp_path: Path, tiny_config: Make
) -> None:
    uri = uploaded(corpus / "tokenizer", f"{bucket}/tokenizer")
    data, run = tmp_path / "data", Storage(str(tmp_path / "run"))
    write_corpus(data, some_texts(30), "jsonl")
    config = job(tiny_config, data, tokenizer=uri)
    spec = prepare_data(config, run)
    here = prepare_data(job(tiny_config, data, tokenizer=str(corpus / "tokenizer")), run)
    assert compare(spec.identity(), here.identity()) == (), "wherever it was read"
    storage = open_storage(uri)
    content = json.loads(storage.read("tokenizer.json"))
    content["model"]["merges"].pop()
    storage.delete("tokenizer.json")
    storage.write("tokenizer.json", json.dumps(content).encode())
    again = prepare_data(config, run)
    assert again.tokenizer == spec.tokenizer, "the run's own copy is used"
    (refusal,) = compare(spec.identity(), again.identity())
    assert refusal.code == "resume.changed_tokenizer"
    storage.delete_all(storage.list(""))
    assert prepare_data(config, run).identity() == spec.identity()


@pytest.mark.parametrize(
    ("name", "error", "code", "value"),
    [
        ("{}/nowhere", ConfigError, "tokenizer.no_files", "={}/nowhere: "),
        ("{}", ConfigError, "tokenizer.no_files", "tokenizer.json"),
        ("s3://no-such-bucket/t", StorageError, "storage.not_found", "bucket"),
        ("hdfs://x/y", ConfigError, "config.storage_uri", "hdfs://"),
        ("s3:/x/y", ConfigError, "config.storage_uri", "s3:/x/y"),
    ],
)
def test_what_gives_no_tokenizer_is_named(
    name: str, error: type[OrchestratorError], code: str, value: str, bucket: str
) -> None:
    with raises(error, code, "data.tokenizer", value.format(bucket)):
        fetch(name.format(bucket))


def test_a_machine_whose_cache_cannot_be_written_reads_the_tokenizer_nevertheless(
    bucket: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = uploaded(corpus / "tokenizer", f"{bucket}/tokenizer")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tokenizer_files.fetch(uri) == tokenizer_files.fetch(str(corpus / "tokenizer"))


def test_a_machine_without_any_room_for_the_copy_says_so(
    bucket: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = uploaded(corpus / "tokenizer", f"{bucket}/tokenizer")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    temporary_cache_folder.cache_clear()
    with raises(StorageError, "storage.unusable_path", "data.tokenizer: ", "TMPDIR"):
        tokenizer_files.fetch(uri)
