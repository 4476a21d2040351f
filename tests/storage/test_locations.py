"""What names a bucket, and what a folder: a mistyped URI is neither, and nothing is made in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.errors import ConfigError
from orchestrator.launch.submit import submission
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.files import Storage, require_plain
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.open import absolute, join, open_storage
from tests.raising import raises


@pytest.mark.parametrize(
    "mistyped",
    ["s3://", "s3:// ", " s3://", "s3:/walk/r", "s3:walk", "S3:/walk", "gs:/x", "gs://", "az://", "abfs:/x/y"]
    + ["s3:///r", "s3://$BUCKET/r", "s3a://my bucket/r", "hdfs://x/y", "/runs/s3://bucket", "gs:// /r"],
)
def test_what_is_meant_as_a_buckets_uri_is_a_whole_one_or_refused(mistyped: str) -> None:
    for given in (mistyped, join(mistyped, "name"), f"{mistyped}/name"):
        assert is_uri(given)
        for ask in (open_storage, absolute, LocalStore, Storage("/runs").beside):
            with raises(ConfigError, "config.storage_uri"):
                ask(given)
    with raises(ConfigError, "config.storage_uri", "s3://", "gs://", "az://"):
        list_files("code", [f"{mistyped}/*.jsonl"], "jsonl")


def test_a_folder_that_is_called_as_a_scheme_is_named_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, "config.storage_uri", " ./s3:/walk/r"):
        open_storage("s3:/walk/r")
    for path in ("./s3:/walk/r", str(tmp_path / "s3:"), "s3", "s3.d/a", "data:/x", "~/gs:"):
        assert not is_uri(path)
        assert open_storage(path).root.startswith("/")
    with pytest.raises(ConfigError) as refused:
        open_storage("s3:/name:topsecret@bucket/r")
    assert "topsecret" not in str(refused.value)


def test_no_command_and_no_call_takes_a_mistyped_uri_for_a_folder(
    tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_config({"run.storage": "s3://"})
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with raises(ConfigError, "config.storage_uri", "run.storage", "s3:///"):
        orchestrator.plan(job)
    with raises(ConfigError, "config.storage_uri", "run.storage", "gs:/x/"):
        submission(job, ["run.storage=gs:/x"], folder=folder, token="1")
    for ask in (orchestrator.open, orchestrator.runs):
        with raises(ConfigError, "config.storage_uri", "s3:/walk "):
            ask("s3:/walk")
    with raises(ConfigError, "config.storage_uri", "az:/x "):
        orchestrator.open_stream(job, frozen_dir="az:/x")
    assert not list(folder.iterdir())


SECRET = "hunter2-and-more"


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        ("s3://me:{}@bucket/x.jsonl", "config.uri_with_secret"),
        ("s3://{}@bucket/*.jsonl", "config.uri_with_secret"),
        ("gs://bucket/x.jsonl?X-Goog-Signature={}", "config.uri_with_secret"),
        ("s3://bucket/a/x.jsonl?region=eu&X-Amz-Security-Token={}", "config.uri_with_secret"),
        ("az://container:{}@account/x.jsonl", "config.uri_with_secret"),
        ("https://me:{}@host/x.jsonl", "config.storage_uri"),
    ],
)
def test_a_source_with_a_secret_in_its_uri_is_refused_and_the_secret_not_repeated(
    uri: str, code: str
) -> None:
    with raises(ConfigError, code, "data.sources code: ") as refused:
        list_files("code", uri.format(SECRET), "jsonl")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("path", ["a?b/*.jsonl", "year=202?/part-?.jsonl", "a#b.jsonl", "x/@y.jsonl"])
def test_a_pattern_in_a_bucket_is_no_query(path: str) -> None:
    require_plain(f"s3://bucket/{path}", pattern=True)
    require_plain(f"abfss://container@account.dfs.core.windows.net/{path}", pattern=True)


@pytest.mark.parametrize(
    "field", ["resume.from", "resume.node_folder", "run.storage", "model.init_from", "data.sources"]
)
def test_a_configuration_that_is_refused_repeats_no_secret_of_it(tiny_config: Any, field: str) -> None:
    for value in (f"s3://me:{SECRET}@b/r?sig={SECRET}", [f"https://{SECRET}@h/r?X-Amz-Signature={SECRET}"]):
        with pytest.raises(ConfigError) as refused:
            orchestrator.plan(tiny_config({field: value}))
        assert SECRET not in str(refused.value)
