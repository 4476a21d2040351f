"""A run in a bucket, read by every command as one in a folder: the same documents, but for where it lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.sources.lists.fragments import load_plan
from orchestrator.errors import (
    ConfigError,
    DataIdentityError,
    NoConditionalCreateError,
    RefusedError,
    StorageError,
)
from orchestrator.inspect.audit.trained_data import trained_data
from orchestrator.launch.doctor.facts import look_at_storage
from orchestrator.launch.doctor.storage_check import BucketFacts, judge_bucket
from orchestrator.storage.buckets import forget_buckets
from orchestrator.storage.files import Storage
from orchestrator.storage.home import cache_folder
from orchestrator.storage.open import above, absolute, check_bucket, join, open_storage, split
from tests.inspect.bucket_runs import client_of, contents
from tests.raising import raises
from tests.storage.model_store import DELETE, Fate, ModelBucket, ModelStore, OverwritingModelStore
from tests.storage.servers import moto, new_bucket, proxy_before, reach

ROOT = Path(__file__).resolve().parents[2]
NEWEST, ORPHAN = "00000010-a0003-g0001", "00000008-a0002-g0001"
SECRET = "hunter2-and-more"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    reach(monkeypatch, server, tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_buckets()
    return new_bucket(server)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: `example` is a run, `job.yaml` what it was started with."""
    shutil.copytree(ROOT / "tests" / "examples" / "format2", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def put(folder: Path, uri: str) -> str:
    storage = open_storage(uri)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.write(str(path.relative_to(folder)), path.read_bytes())
    return uri


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return int(str(ended.value.code)), capsys.readouterr().out


@pytest.mark.quick("points RUN --json", "verify RUN --json", "replay RUN --step 9 --json")
@pytest.mark.parametrize(
    "command",
    [
        "points RUN --json",
        "points RUN",
        "points RUN --tree",
        "verify RUN --json",
        "status RUN --json",
        "audit RUN --json --processes 1",
        "samples RUN --step 10 --json --text",
        "replay RUN --step 9 --json",
    ],
)
def test_a_command_says_of_a_run_in_a_bucket_what_it_says_of_one_in_a_folder(
    command: str, bucket: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = put(folder / "example", f"{bucket}/team/runs/example")
    expected = said(capsys, *command.replace("RUN", str(folder / "example")).split())
    found = said(capsys, *command.replace("RUN", uri).split())
    differs = command.startswith("replay")  # in the last bits, where the example was made on another CPU
    assert found[0] == expected[0]
    assert expected[0] in ({0, 1} if differs else {0})
    told = found[1].replace(uri, str(folder / "example"))
    if "--json" not in command:
        assert (found[0], told) == expected
        return
    here, there = (json.loads(text) for text in (expected[1], told))
    for document in (here, there):
        if isinstance(document, dict):
            for measured in ("seconds", "last_step_age_s", "newest_point_age_s"):
                document.pop(measured, None)
    assert there == here


def test_a_run_in_google_cloud_storage_is_one_like_any_other(
    server: str, bucket: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del bucket  # its environment is wanted
    with proxy_before(server, "gs") as proxy:
        reach(monkeypatch, proxy.url, tmp_path)
        uri = put(folder / "example", f"{new_bucket(proxy.url, 'gs')}/runs/example")
        check_bucket(open_storage(uri))
        run, here = orchestrator.open(uri), orchestrator.open(folder / "example")
        assert run.list_points() == here.list_points()
        assert [row["healthy"] for row in run.verify()] == [True] * 4
        assert run.audit(processes=1)["exactly_once"]
        found = look_at_storage(uri)
        assert isinstance(found, BucketFacts)
        assert (found.exclusive, found.listed, found.reads, found.deletes) == (True, True, True, True)


def test_weights_are_exported_from_a_bucket_and_into_one(bucket: str, folder: Path, tmp_path: Path) -> None:
    run = orchestrator.open(put(folder / "example", f"{bucket}/example"))
    report = run.export(tmp_path / "out")
    assert (report["out"], report["point"]) == (str(tmp_path / "out"), NEWEST)
    there = run.export(f"{bucket}/weights/newest")
    assert (there["out"], there["files"]) == (f"{bucket}/weights/newest", report["files"])
    mine, theirs = (
        contents(open_storage(f"{bucket}/weights/newest")),
        contents(Storage(str(tmp_path / "out"))),
    )
    for files in (mine, theirs):
        files.pop("EXPORT")  # it says when
    assert mine == theirs
    with raises(RefusedError, "export.not_empty", f"{bucket}/weights/newest"):
        run.export(f"{bucket}/weights/newest")
    with raises(RefusedError, "export.inside_run", f"{bucket}/example/weights"):
        run.export(f"{bucket}/example/weights")


@pytest.mark.chaos
def test_forks_lead_from_folders_to_buckets_and_back(bucket: str, folder: Path, tmp_path: Path) -> None:
    here = orchestrator.open(folder / "example")
    up = here.fork(f"{bucket}/runs/up", NEWEST)
    assert (up.fork, up.done) == (f"{bucket}/runs/up", True)
    there = orchestrator.open(up.fork)
    within = orchestrator.open(there.fork(f"{bucket}/others/within", "latest").fork)
    down = orchestrator.open(within.fork(tmp_path / "down", "latest").fork)
    (digest,) = {row["weights_digest"] for row in here.list_points() if row["name"] == NEWEST}
    for run, origin in ((there, here.uri), (within, there.uri), (down, within.uri)):
        (row,) = run.list_points()
        assert (row["weights_digest"], row["consumed_tokens"]) == (digest, 960)
        assert [each["healthy"] for each in run.verify()] == [True]
        assert any(str(origin) in line for line in run.tree()), run.tree()
    assert there.list_points()[0]["pin"]["reason"] == f"parent of fork {bucket}/others/within"
    with raises(RefusedError, "run.inside_run"):
        here.fork(f"{bucket}/runs/up/inner", NEWEST)


def test_a_plan_of_a_run_in_a_bucket_continues_it(bucket: str, folder: Path) -> None:
    put(folder / "example", f"{bucket}/runs/example")
    overrides = ["train.max_steps=20", "resume.keep_latest=4"]
    here = orchestrator.plan("job.yaml", overrides)
    before = contents(open_storage(f"{bucket}/runs/example"))
    there = orchestrator.plan("job.yaml", [*overrides, f"run.storage={bucket}/runs"])
    assert (there.action, there.point, there.consumed_tokens) == ("resume", NEWEST, here.consumed_tokens)
    assert contents(open_storage(f"{bucket}/runs/example")) == before, "what was tried there is gone"


def test_pins_are_kept_and_given_back_in_a_bucket(bucket: str, folder: Path) -> None:
    run = orchestrator.open(put(folder / "example", f"{bucket}/example"))
    run.pin(ORPHAN, "mine")
    assert [row["name"] for row in run.list_points() if row["pin"]] == [ORPHAN]
    assert [each.deleted for each in run.prune()] == [False]
    run.unpin(ORPHAN)
    assert [row["name"] for row in run.list_points() if row["pin"]] == []
    assert [each.point for each in run.prune()] == [ORPHAN]
    assert ORPHAN not in [row["name"] for row in run.list_points()]


def test_the_runs_of_a_bucket_are_listed_and_shown(bucket: str, folder: Path) -> None:
    put(folder / "example", f"{bucket}/runs/example")
    put(folder / "example", f"{bucket}/runs/other")
    put(folder / "corpus", f"{bucket}/runs/corpus")
    assert [run.uri for run in orchestrator.runs(f"{bucket}/runs")] == [
        f"{bucket}/runs/example",
        f"{bucket}/runs/other",
    ]
    client = client_of(f"{bucket}/runs")
    document = client.get("/api/runs").json()
    assert document["storage"] == f"{bucket}/runs"
    assert [run["uri"] for run in document["runs"]] == [f"{bucket}/runs/example", f"{bucket}/runs/other"]
    assert client.get("/api/runs/corpus").status_code == 404
    here, there = client_of(str(folder)), client_of(f"{bucket}/runs/example")
    for route in ("points", "events", "attempts", f"points/{NEWEST}"):
        expected = here.get(f"/api/runs/example/{route}")
        found = there.get(f"/api/runs/example/{route}")
        assert expected.status_code == 200, route
        text = found.text.replace(f"{bucket}/runs", str(folder))
        assert json.loads(text) == expected.json(), route
    assert there.get("/api/runs/other").status_code == 404, "only the one was asked for"


def test_a_frozen_list_in_a_bucket_is_read_once_by_a_machine(
    bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = put(folder / "example", f"{bucket}/example")
    run = orchestrator.open(uri)
    assert run.audit(processes=1)["exactly_once"]
    (plan,) = trained_data(run._store, uri, survey(run._store)).plans
    reference = plan.reference
    assert reference is not None
    assert (reference.storage, reference.path) == (uri, "manifest/made.parquet")
    load_plan.cache_clear()
    first = load_plan(reference)
    load_plan.cache_clear()
    open_storage(uri).delete("manifest/made.parquet")
    assert load_plan(reference) == first, "the machine has a copy"
    cache = cache_folder()
    assert cache is not None
    (copy,) = (cache / "lists").iterdir()
    copy.write_bytes(copy.read_bytes()[:-1])
    load_plan.cache_clear()
    with raises(DataIdentityError, "data.unreadable_list", "manifest/made.parquet"):
        load_plan(reference)


# ----------------------------------------------------------------------------------- before a launch begins
def test_a_bucket_that_can_be_written_is_left_as_it_was(bucket: str) -> None:
    assert check_bucket(open_storage(f"{bucket}/runs/new")) == ""
    assert open_storage(bucket).list("") == []


@pytest.mark.chaos
@pytest.mark.parametrize("server_is", ["overwriting", "without conditions"])
def test_a_bucket_without_conditional_create_is_refused_and_left_as_it_was(
    server_is: str, server: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy_before(server) as proxy:
        reach(monkeypatch, proxy.url, tmp_path)
        if server_is == "overwriting":
            proxy.forgets = ("if-none-match",)
        else:
            proxy.unknown = ("if-none-match",)
        with raises(NoConditionalCreateError, "storage.no_conditional_create", bucket):
            check_bucket(open_storage(f"{bucket}/runs/new"))
        found = look_at_storage(f"{bucket}/runs")
        assert isinstance(found, BucketFacts)
        assert (found.exclusive, found.listed, found.deletes) == (False, True, True)
        states = {check.name: check.state for check in judge_bucket(found)}
        assert (states["exclusive create"], states["list after write"]) == ("bad", "ok")
        assert open_storage(bucket).list("") == []


def test_a_bucket_of_any_cloud_that_overwrites_is_refused() -> None:
    bucket = ModelBucket()
    with pytest.raises(NoConditionalCreateError):
        check_bucket(Storage.on(OverwritingModelStore(bucket)))
    assert bucket.contents() == {}


def deletes_nothing(what: str, path: str) -> Fate:
    return Fate.REFUSED if what == DELETE else Fate.ANSWERED


def test_of_a_store_that_deletes_nothing_it_is_said_that_points_stay() -> None:
    bucket = ModelBucket()
    lacks = check_bucket(Storage.on(ModelStore(bucket, turn=deletes_nothing)))
    assert "nothing can be deleted in run.storage (cannot delete" in lacks
    assert "storage fills up. Give this user the right to delete" in lacks
    assert bucket.contents() != {}


@pytest.mark.parametrize(
    ("status", "code"),
    [("403", "storage.denied"), ("400", "storage.failed")],
)
def test_a_bucket_that_cannot_be_written_says_why_and_what_to_do(
    status: Any, code: str, server: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy_before(server) as proxy:
        reach(monkeypatch, proxy.url, tmp_path)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        forget_buckets()
        proxy.rule = lambda method, path: status if method == "PUT" else None
        with raises(StorageError, code, "run.storage", f"{bucket}/runs/new", status) as refused:
            check_bucket(open_storage(f"{bucket}/runs/new", sleep=lambda seconds: None))
        assert SECRET not in str(refused.value)


def test_doctor_tries_a_bucket_and_leaves_nothing(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = look_at_storage(f"{bucket}/runs")
    assert isinstance(found, BucketFacts)
    assert (found.exclusive, found.listed, found.reads, found.deletes) == (True, True, True, True)
    assert open_storage(bucket).list("") == []
    _, text = said(capsys, "doctor", f"{bucket}/runs", "--json")
    states = {check["name"]: check["state"] for check in json.loads(text)["checks"]}
    assert states["storage"] == states["exclusive create"] == states["list after write"] == "ok"
    assert SECRET not in text


# ------------------------------------------------------------------------------------------ what is written
@pytest.mark.parametrize(
    "uri", [f"s3://me:{SECRET}@bucket/runs", f"s3://{SECRET}@bucket/runs", f"gs://bucket/runs?key={SECRET}"]
)
def test_a_uri_with_a_secret_is_refused_without_saying_it(uri: str) -> None:
    with raises(ConfigError, "config.uri_with_secret") as refused:
        open_storage(uri)
    assert SECRET not in str(refused.value)


def test_places_are_said_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("runs/") == str(tmp_path / "runs")
    assert absolute("s3://b/runs/") == "s3://b/runs"
    assert split("s3://b/runs/a") == ("s3://b/runs", "a")
    assert split("s3://b/runs") == ("s3://b", "runs")
    assert split("s3://b") == ("s3://b", "")
    assert split("/runs/a/") == ("/runs", "a")
    assert join("s3://b/", "runs", "a") == "s3://b/runs/a"
    assert above("s3://b/c/d") == ("s3://b/c", "s3://b")
    assert above("s3://b") == ()
    assert above("/c/d") == ("/c", "/")
    assert Storage(str(tmp_path)).beside("s3://b/c").root == "s3://b/c"
    assert open_storage("s3://b/c").beside(str(tmp_path)).folder == tmp_path
