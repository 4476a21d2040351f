"""Sources in buckets: real protocols against servers of their own, and what a user is told when something is
wrong.

S3 runs against moto's server, and so does GCS: its XML API, which is what is used of it, lists and reads as
S3 does. Azure runs against Azurite (`npm install azurite`), and is skipped where that is not on the path.
"""

from __future__ import annotations

import errno
import glob
import gzip
import io
import os
import pickle
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.access.matches import name_fits
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import ETAG, difference, freeze, from_parquet, to_parquet
from orchestrator.data.sources.lists.source_diff import changes_since
from orchestrator.errors import BadDocumentError, ConfigError, DataIdentityError
from orchestrator.storage.buckets import bucket_of, forget_buckets
from orchestrator.storage.files import Storage
from tests.data.making import job, plain, samples, some_texts, spec_of, write_corpus
from tests.raising import raises
from tests.storage.azurite import azurite, connection_string, make_container
from tests.storage.servers import Fault, bucket_name, moto, proxy_before

Make = Callable[..., dict[str, Any]]
CLOUD = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "CLOUDSDK_")


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in os.environ:
        if name.startswith(CLOUD):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    forget_buckets()
    yield
    forget_buckets()


# ------------------------------------------------------------------------------ servers
@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite(tmp_path_factory.mktemp("azurite")) as url:
        yield url


CONTENT = "application/octet-stream"


@pytest.fixture(params=["s3", "gs", "az"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket, and the environment in which a user reaches it."""
    kind, name = str(request.param), bucket_name()
    if kind == "az":
        url = request.getfixturevalue("azure")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))
        make_container(url, name)
        return f"az://{name}"
    url = request.getfixturevalue("s3")
    reach_s3(monkeypatch, url)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    ask("PUT", f"{url}/{name}", {})
    return f"{kind}://{name}"


def reach_s3(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def ask(method: str, url: str, headers: dict[str, str], data: bytes = b"") -> None:
    request = urllib.request.Request(url, data, {"Content-Type": CONTENT, **headers}, method=method)
    urllib.request.urlopen(request, timeout=30).close()


def put(bucket: str, key: str, data: bytes) -> None:
    """Writes an object. GCS reads what everybody may read: the server knows no signatures of it."""
    if bucket.startswith("gs://"):
        url = f"{os.environ['STORAGE_EMULATOR_HOST']}/{bucket.partition('://')[2]}/{quote(key)}"
        ask("PUT", url, {"x-amz-acl": "public-read"}, data)
        return
    obstore.put(bucket_of(bucket), key, data)


# ------------------------------------------------------------------------------ what a URI means
NAMES = ["a.jsonl", "b.txt", "x/a.jsonl", "x/y/a.jsonl", "x/y/z/b c%é.jsonl.gz", "x/.h/a.jsonl", ".g.jsonl"]
PATTERNS = ["*", "*.jsonl", "**/*.jsonl", "**/**/*.jsonl", "x/**/*.jsonl", "**", "x/**", "*/*.jsonl", "*/y/*"]
PATTERNS += ["**/y/**/*.jsonl", "[ab].*", "**/.h/*.jsonl", ".*", "?.jsonl", "**l", "x/y/a.jsonl", "x"]


def test_a_pattern_means_in_a_bucket_what_it_means_in_a_folder(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in PATTERNS:
        found = {path for path in glob.glob(pattern, root_dir=tmp_path, recursive=True)}
        files = {path for path in found if (tmp_path / path).is_file()}
        parts = tuple(pattern.split("/"))
        assert {name for name in NAMES if name_fits(tuple(name.split("/")), parts)} == files, pattern


def test_objects_are_listed_as_files_are(bucket: str) -> None:
    for name in NAMES:
        put(bucket, f"d/{name}", name.encode())
    put(bucket, "d2/other.jsonl", b"")
    listing = list_files("s", f"{bucket}/d", "jsonl")
    assert listing.base == f"{bucket}/d"
    assert listing.names == ("a.jsonl", "x/a.jsonl", "x/y/a.jsonl", "x/y/z/b c%é.jsonl.gz")
    assert listing.sizes.tolist() == [len(name.encode()) for name in listing.names]
    assert list_files("s", f"{bucket}/d/", "jsonl").names == listing.names
    assert list_files("s", f"{bucket}/d/x/**/a.jsonl", "jsonl").names == ("a.jsonl", "y/a.jsonl")
    several = list_files("s", [f"{bucket}/d/x/y", f"{bucket}/d/a.jsonl", f"{bucket}/d/*.jsonl"], "jsonl")
    assert (several.base, several.names) == (
        f"{bucket}/d",
        ("a.jsonl", "x/y/a.jsonl", "x/y/z/b c%é.jsonl.gz"),
    )
    one = list_files("s", f"{bucket}/d/x/y/z/b c%é.jsonl.gz", "jsonl")
    assert (one.base, one.names) == (f"{bucket}/d/x/y/z", ("b c%é.jsonl.gz",))
    for seen, name in zip(listing.etags, listing.names, strict=True):
        assert seen
        with open_input(listing.base, name) as file:
            assert file.etag == seen, "the list and the object say the same"


def test_an_object_is_read_by_ranges_and_as_a_stream(bucket: str) -> None:
    data = gzip.compress(os.urandom(300_000)) + bytes(range(256)) * 9
    put(bucket, "d/x.gz", data)
    with open_input(f"{bucket}/d", "x.gz") as file:
        assert (file.size, file.name) == (len(data), f"{bucket}/d/x.gz")
        end = len(data)
        for offset, num in [(0, 10), (5, 0), (end - 3, 100), (end, 5), (end + 9, 1), (7, 99_999)]:
            assert file.read_at(offset, num) == data[offset : offset + num]
        stream = file.stream()
        assert stream.read() == data
        assert stream.seek(-7, os.SEEK_END) == len(data) - 7
        assert stream.read() == data[-7:]
        put(bucket, "d/x.gz", data[::-1])
        with is_replaced(f"{bucket}/d/x.gz"):
            file.read_at(0, 10)


@contextmanager
def is_replaced(uri: str) -> Iterator[None]:
    """Asserts the error of a read of an object that was replaced since it was opened."""
    with pytest.raises(OSError, match=re.escape(uri)) as raised:
        yield
    assert (raised.value.errno, raised.value.filename) == (errno.ESTALE, uri)


@pytest.mark.parametrize("fault", ["cut", "reset", "500"])
def test_a_read_that_fails_is_repeated_and_one_of_a_replaced_object_is_not(
    s3: str, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    with proxy_before(s3) as proxy:
        reach_s3(monkeypatch, proxy.url)
        ask("PUT", f"{s3}/repeated", {})
        data = os.urandom(300_000)
        put("s3://repeated", "x", data)
        with open_input("s3://repeated", "x") as file:
            proxy.one_in(fault, "GET")
            assert file.read_at(7, 200_000) == data[7:200_007]
            proxy.one_in(fault, "GET")
            assert file.stream().read() == data
            assert len(proxy.asked) > 1
            put("s3://repeated", "x", data[::-1])
            proxy.asked.clear()
            with is_replaced("s3://repeated/x"):
                file.stream().read()
            assert len(proxy.asked) == 1


def test_a_list_of_objects_is_frozen_by_etags_and_shows_every_change(bucket: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", some_texts(40), "jsonl", 5)
    for file in (tmp_path / "data").iterdir():
        put(bucket, f"d/{file.name}", file.read_bytes())
    manifest = freeze("s", f"{bucket}/d", "jsonl", "text")
    assert all(row.probe.startswith(ETAG) for row in manifest.files)
    assert from_parquet(to_parquet(manifest), "here") == manifest
    assert manifest.path(2) == f"{bucket}/d/part-2.jsonl"
    same = changes_since(manifest, list_files("s", f"{bucket}/d", "jsonl"))
    assert (same.now, same.changed, same.gone) == (manifest, (), ())
    put(bucket, "d/part-1.jsonl", (tmp_path / "data" / "part-1.jsonl").read_bytes())  # the same, later
    other = (tmp_path / "data" / "part-2.jsonl").read_bytes().replace(b"text", b"txet", 1)
    put(bucket, "d/part-2.jsonl", other)
    put(bucket, "d/part-3.jsonl", b"shorter")
    obstore.delete(bucket_of(bucket.replace("gs://", "s3://")), "d/part-4.jsonl")
    for listing in (list_files("s", f"{bucket}/d", "jsonl"), None):
        found = changes_since(manifest, listing)
        texts = [text for text in found.changed if "part-1" not in text]  # Azure has a new etag for it
        assert ["part-2.jsonl: its etag was" in texts[0], "part-3.jsonl: it had" in texts[1]] == [True, True]
        assert found.gone == (f"{bucket}/d/part-4.jsonl: it had {manifest.files[4].bytes} bytes and is gone",)


def test_row_groups_of_objects_are_read_from_their_footers(bucket: str) -> None:
    for i in range(3):
        out = io.BytesIO()
        pq.write_table(pa.table({"text": ["a", "b", "c"] * (i + 1)}), out, row_group_size=4)
        put(bucket, f"d/{i}.parquet", out.getvalue())
    manifest = freeze("s", f"{bucket}/d/*.parquet", "parquet", "text")
    assert [row.group_rows for row in manifest.files] == [(3,), (4, 2), (4, 4, 1)]
    put(bucket, "d/9.parquet", b"no parquet at all")
    with raises(ConfigError, "data.wrong_format", "9.parquet", b"no p"):
        freeze("s", f"{bucket}/d", "parquet", "text")


def test_files_that_were_copied_to_a_bucket_are_the_same(s3: str, tmp_path: Path, monkeypatch: Any) -> None:
    reach_s3(monkeypatch, s3)
    ask("PUT", f"{s3}/copied", {})
    write_corpus(tmp_path / "data", some_texts(40), "jsonl")
    manifest = freeze("s", str(tmp_path / "data"), "jsonl", "text")
    for file in (tmp_path / "data").iterdir():
        put("s3://copied", file.name, file.read_bytes())
    moved = replace(manifest, base="s3://copied")
    found = changes_since(moved, list_files("s", "s3://copied", "jsonl"))
    assert (found.now, found.changed, found.gone) == (moved, (), ())
    put("s3://copied", "part-1.jsonl", manifest.files[1].bytes * b"x")
    with open_input("s3://copied", "part-1.jsonl") as file:
        assert "its ends had digest" in str(difference(manifest.files[1], file))


# ------------------------------------------------------------------------------ what a user is told
def check_refusal(path: Any, code: str, *values: str) -> None:
    with raises(ConfigError, code, *values):
        list_files("web", path, "jsonl")


def test_what_is_not_there_is_told(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reach_s3(monkeypatch, s3)
    ask("PUT", f"{s3}/there", {})
    check_refusal("s3://nobodys/d", "data.unlistable_path", "web: s3://nobodys/d", "no such bucket")
    values = "'s3://there/d/*.jsonl'", "*.jsonl in s3://there/d)"
    check_refusal("s3://there/d/*.jsonl", "data.no_matching_file", *values)
    check_refusal("s3://there/d", "data.no_matching_file", "**/* (.jsonl .jsonl.gz .jsonl.zst ")
    with pytest.raises(FileNotFoundError) as absent:
        open_input("s3://there/d", "x")
    assert absent.value.filename == "s3://there/d/x"


def test_paths_of_several_storages_are_refused(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reach_s3(monkeypatch, s3)
    for name in ("one", "two"):
        ask("PUT", f"{s3}/{name}", {})
        put(f"s3://{name}", "a.jsonl", b"{}")
    check_refusal(["s3://one", "s3://two"], "data.several_storages", "buckets", "s3://one", "s3://two")
    check_refusal(["s3://one", "/here"], "data.several_storages", "/here")
    check_refusal("ftp://host/d", "config.storage_uri", "ftp://host/d")
    check_refusal("s3://", "config.storage_uri", "s3://")


@contextmanager
def server(status: int, body: str) -> Iterator[tuple[str, list[str]]]:
    """A server that gives this answer to all, and the requests that it had."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode() if self.command == "GET" else b"")

        do_HEAD = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}", asked
        httpd.shutdown()
        thread.join()


def test_denied_access_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(403, "<Error><Code>AccessDenied</Code></Error>") as (url, _):
        reach_s3(monkeypatch, url)
        values = "s3://secret is denied", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"
        check_refusal("s3://secret/d/*", "data.unlistable_path", *values)


def test_no_credentials_says_where_they_may_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(404, "") as (url, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)  # where a cloud's machines get theirs
        values = "no credentials for s3://bucket", "AWS_ACCESS_KEY_ID"
        check_refusal("s3://bucket/d/*", "data.unlistable_path", *values)
        assert asked
        assert not any("bucket" in path for path in asked)


def test_keys_come_from_the_profile_where_the_environment_has_none(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reach_s3(monkeypatch, s3)
    ask("PUT", f"{s3}/profiled", {})
    put("s3://profiled", "a.jsonl", b"{}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    keys = "aws_access_key_id = a\naws_secret_access_key = b\n"
    (tmp_path / ".aws" / "credentials").write_text(f"[lab]\n{keys}")
    (tmp_path / ".aws" / "config").write_text(f"[profile lab]\nregion = eu-west-1\nendpoint_url = {s3}\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    forget_buckets()
    assert list_files("s", "s3://profiled", "jsonl").names == ("a.jsonl",)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)  # as Python marks what cannot be imported
    with raises(ConfigError, "machine.missing_package", "s3://bucket", "pip install -e '.[remote]'"):
        list_files("web", "s3://bucket/d", "jsonl")


# ------------------------------------------------------------------------------ a run's stream
@pytest.mark.quick("s3-lines", "s3-jsonl.gz", "gs-jsonl", "gs-parquet", "az-jsonl")
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "lines"])
def test_the_stream_from_a_bucket_is_that_of_the_same_files_in_a_folder(
    bucket: str, tmp_path: Path, tiny_config: Make, kind: str
) -> None:
    write_corpus(tmp_path / "here", some_texts(24, lines=kind != "lines"), kind)
    for path in sorted((tmp_path / "here").iterdir()):
        put(bucket, f"corpus/{path.name}", path.read_bytes())
    local = job(tiny_config, tmp_path / "here", kind, num_epochs=2)
    mapping = local.to_json()
    mapping["data"]["sources"][0]["path"] = f"{bucket}/corpus/*"
    remote = spec_of(parse_config(mapping))
    expected = samples(spec_of(local), 32)
    found = samples(remote, 32)
    assert plain(found) == plain(expected)
    assert [s.cursor for s in found] == [s.cursor for s in expected]
    middle = len(found) // 2
    assert plain(samples(remote, 32, found[middle].cursor)) == plain(expected[middle + 1 :])
    assert pickle.loads(pickle.dumps(remote)).plans == remote.plans


def test_a_run_goes_on_from_a_bucket_and_refuses_an_object_that_is_another_one(
    bucket: str, tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "here", some_texts(30), "jsonl")
    files = {path.name: path.read_bytes() for path in sorted((tmp_path / "here").iterdir())}
    for name, data in files.items():
        put(bucket, f"corpus/{name}", data)
    mapping = job(tiny_config, tmp_path / "here").to_json()
    mapping["data"]["sources"][0]["path"] = f"{bucket}/corpus"
    config, folder = parse_config(mapping), tmp_path / "run"
    folder.mkdir()
    begun = samples(prepare_data(config, Storage(str(folder))), 32)
    assert plain(samples(prepare_data(config, Storage(str(folder))), 32, begun[3].cursor)) == plain(begun[4:])
    name = min(files)
    put(bucket, f"corpus/{name}", files[name].replace(b"e", b"E"))
    with raises(DataIdentityError, "data.changed_files", name) as changed:
        prepare_data(config, Storage(str(folder)))
    assert re.search(f"{name}: .*etag .* and ", str(changed.value))


def test_a_bad_document_in_a_bucket_is_named_by_file_and_line(
    bucket: str, tmp_path: Path, tiny_config: Make
) -> None:
    put(bucket, "corpus/a.jsonl", b'{"text": "good and long enough"}\n' * 80 + b"bad\n")
    mapping = job(tiny_config, tmp_path).to_json()
    mapping["data"]["sources"][0]["path"] = f"{bucket}/corpus/a.jsonl"
    with raises(BadDocumentError, "data.bad_document", f"{bucket}/corpus/a.jsonl: byte 2640, line 81: "):
        samples(spec_of(parse_config(mapping)), 32)


@pytest.mark.parametrize("path", ["ftp://host/x", "s3://", "hdfs://name/x"])
def test_a_storage_that_is_not_known_is_refused_with_those_that_are(
    tmp_path: Path, tiny_config: Make, path: str
) -> None:
    mapping = job(tiny_config, tmp_path).to_json()
    mapping["data"]["sources"][0]["path"] = path
    with raises(ConfigError, "config.storage_uri", path, "s3://", "gs://", "hf://"):
        prepare_data(parse_config(mapping))
