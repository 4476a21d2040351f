"""Datasets of the hub by name, against a server that speaks its protocol; the client is the real one."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants, utils

import orchestrator
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.dataset import prepare_data, prepare_trained
from orchestrator.data.sources.access import remote_stores
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.access.remote_stores import split_hub
from orchestrator.data.sources.formats import parquet as parquet_format
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import ETAG, from_parquet, to_parquet
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.storage.files import Storage
from tests.data.hub_server import Hub, hub_server
from tests.data.making import plain, samples, some_texts, spec_of
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
client: Any = utils


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub, and the environment in which a user without an account reaches it."""
    for name in os.environ:
        if name.startswith(("HF_", "HUGGING")):
            monkeypatch.delenv(name)
    with hub_server() as found:
        # what HF_ENDPOINT and HF_HOME are read into when the client is loaded
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        remote_stores._facts.cache_clear()
        yield found
        remote_stores._facts.cache_clear()
        client.close_session()


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), out, row_group_size=7)
    return out.getvalue()


TEXTS = some_texts(60)
FILES = {
    ".gitattributes": b"*.parquet filter=lfs",
    "README.md": b"# a dataset",
    "data/train-0 é.jsonl": jsonl(TEXTS[:30]),
    "data/train-1.jsonl.gz": gzip.compress(jsonl(TEXTS[30:40])),
    "data/train-2.jsonl": jsonl(TEXTS[40:]),
    "data/test-0.jsonl": jsonl(["not for training"]),
    "en/a.parquet": parquet(TEXTS[:35]),
    "en/b.parquet": parquet(TEXTS[35:]),
}


def job(make: Make, path: str | list[str], form: str = "jsonl", **changes: Any) -> JobConfig:
    source = {"name": "made", "path": path, "format": form}
    small = {"data.fragment_bytes": 6000, "data.window_bytes": 9000}
    return parse_config(make({"data.sources": [source], **small, **changes}))


# ------------------------------------------------------------------------------ what a URI means
@pytest.mark.parametrize(
    ("uri", "root", "key"),
    [
        ("hf://datasets/o/n", "hf://datasets/o/n@main", ""),
        ("hf://datasets/o/n/", "hf://datasets/o/n@main", ""),
        ("hf://datasets/o/n.x@v1.0/data/*.parquet", "hf://datasets/o/n.x@v1.0", "data/*.parquet"),
        ("hf://datasets/o/n@~parquet/c/train", "hf://datasets/o/n@refs/convert/parquet", "c/train"),
        ("hf://datasets/o/n@refs%2Fpr%2F7/a", "hf://datasets/o/n@refs/pr/7", "a"),
        ("hf://datasets/o/n@refs/pr/7/a", "hf://datasets/o/n@refs/pr/7", "a"),
        ("hf://datasets/o/n@refs/convert/parquet", "hf://datasets/o/n@refs/convert/parquet", ""),
    ],
)
def test_a_uri_names_dataset_revision_and_path(uri: str, root: str, key: str) -> None:
    at = split_hub(uri)
    assert (at.root, at.key) == (root, key)
    assert split_hub(at.uri) == at


@pytest.mark.parametrize(
    "uri", ["hf://o/n", "hf://datasets/n", "hf://datasets/", "hf://spaces/o/n/x", "hf://"]
)
def test_a_uri_that_names_no_dataset_is_refused(uri: str) -> None:
    with raises(ConfigError, "config.storage_uri", uri, "hf://datasets/ORG/NAME[@REVISION][/PATH]"):
        list_files("web", uri, "jsonl")


def test_paths_mean_files_of_one_commit(hub: Hub) -> None:
    old = hub.push("org/set", FILES)
    listing = list_files("web", "hf://datasets/org/set/data/train-*", "jsonl")
    assert listing.base == f"hf://datasets/org/set@{old}/data"
    assert listing.names == ("train-0 é.jsonl", "train-1.jsonl.gz", "train-2.jsonl")
    assert listing.sizes.tolist() == [len(FILES[f"data/{name}"]) for name in listing.names]
    whole = list_files("web", "hf://datasets/org/set", "jsonl")
    assert whole.names == tuple(name for name in sorted(FILES) if ".jsonl" in name)
    note = (
        f"source web: dataset org/set of the hub is read at commit {old}; what is pushed to it later is not"
    )
    assert listing.notes("web") == (note,)
    said = whole.notes("web")
    assert said[0] == note
    assert "its 4 files are of several splits (test, train), and all are read" in said[1]
    one = list_files("web", "hf://datasets/org/set/data/train-2.jsonl", "jsonl")
    assert (one.base, one.names) == (f"hf://datasets/org/set@{old}/data", ("train-2.jsonl",))
    new = hub.push("org/set", {"data/train-9.jsonl": b"{}"})
    assert list_files("web", f"hf://datasets/org/set@{old}/data", "jsonl").names[0] == "test-0.jsonl"
    several = list_files("web", [f"hf://datasets/org/set@main/{p}" for p in ("data", "**/*9*")], "jsonl")
    assert (several.base, several.names) == (f"hf://datasets/org/set@{new}", ("data/train-9.jsonl",))
    revisions = [path for path in hub.asked("/revision/main") if path.startswith("GET")]
    assert len(revisions) == 4, "once for each list"
    with raises(ConfigError, "data.several_storages", "datasets", old, new):
        list_files("web", [f"hf://datasets/org/set@{c}/data" for c in (old, new)], "jsonl")


def test_the_branch_that_the_hub_converts_is_read_as_any_revision(hub: Hub) -> None:
    hub.push("org/set", FILES)
    converted = hub.push("org/set", {"default/train/0000.parquet": parquet(TEXTS)}, "refs/convert/parquet")
    listing = list_files("web", "hf://datasets/org/set@~parquet/default/train/*.parquet", "parquet")
    assert listing.base == f"hf://datasets/org/set@{converted}/default/train"


def test_files_are_known_by_what_they_hold_and_read_by_ranges(hub: Hub) -> None:
    hub.push("org/set", FILES)
    listing = list_files("web", "hf://datasets/org/set/**", "jsonl")
    for name, etag in zip(listing.names, listing.etags, strict=True):
        data = FILES[name]
        with open_input(listing.base, name) as file:
            assert (file.size, file.etag) == (len(data), etag), "the list and the file say the same"
            end = len(data)
            for offset, num in [(0, 10), (5, 0), (end - 3, 100), (end, 5), (7, 99_999)]:
                assert file.read_at(offset, num) == data[offset : offset + num]
            assert file.stream().read() == data
    heads = hub.asked("README.md")
    assert len([path for path in heads if path.startswith("HEAD")]) == 1, "asked once per process"
    assert not any("Authorization" in headers for _, _, headers in hub.requests)


# ------------------------------------------------------------------------------ a run
@pytest.mark.parametrize(
    ("path", "form", "texts"),
    [
        ("hf://datasets/org/set/data/train-*", "jsonl", TEXTS),
        ("hf://datasets/org/set@main/en", "parquet", TEXTS),
    ],
)
def test_a_run_reads_the_commit_of_its_first_start_whatever_is_pushed(
    hub: Hub, tiny_config: Make, tmp_path: Path, path: str, form: str, texts: list[str]
) -> None:
    old = hub.push("org/set", FILES)
    config = job(tiny_config, path, form, **{"data.shuffle": "none"})
    first = spec_of(config, folder=tmp_path / "run")
    manifest = first.plans[0].manifest
    assert all(row.probe.startswith(ETAG) for row in manifest.files)
    assert from_parquet(to_parquet(manifest), "here") == manifest
    found = plain(samples(first, 16))
    (tmp_path / "texts.jsonl").write_bytes(jsonl(texts))
    here = job(tiny_config, str(tmp_path / "texts.jsonl"), **{"data.shuffle": "none"})
    assert found == plain(samples(spec_of(here), 16))

    other = ["another text"] * 99
    hub.push("org/set", {"data/train-0.jsonl": jsonl(other), "en/a.parquet": parquet(other)})
    hub.requests.clear()
    again = spec_of(config, folder=tmp_path / "run")
    assert f"org/set of the hub is read at commit {old}" in " ".join(again.notes)
    assert again.identity() == first.identity()
    assert not hub.asked("/revision/"), "what the name means now is not asked"
    assert plain(samples(again, 16)) == found
    assert prepare_trained(config, Storage(str(tmp_path / "run"))).plans == again.plans
    stream = [s.input_ids.tolist() for s in orchestrator.open_stream(config)]
    assert stream != [s.input_ids.tolist() for s in samples(again, config.pack.seq_len)], (
        "a new one reads now"
    )


def test_another_revision_in_the_configuration_is_looked_up_and_compared(
    hub: Hub, tiny_config: Make, tmp_path: Path
) -> None:
    hub.push("org/set", FILES, "v1")
    prepare_data(job(tiny_config, "hf://datasets/org/set@v1/data"), Storage(str(tmp_path)))
    hub.push("org/set", {**FILES, "README.md": b"other"}, "v2")  # the same files
    moved = prepare_data(job(tiny_config, "hf://datasets/org/set@v2/data"), Storage(str(tmp_path)))
    assert hub.branches["org/set", "v2"] in " ".join(moved.notes)
    hub.push("org/set", {**FILES, "data/test-0.jsonl": jsonl(["what was changed"])}, "v3")
    commits = (hub.branches["org/set", version] for version in ("v1", "v3"))
    with raises(DataIdentityError, "data.changed_files", *commits, "test-0.jsonl", "etag"):
        prepare_data(job(tiny_config, "hf://datasets/org/set@v3/data"), Storage(str(tmp_path)))


# ------------------------------------------------------------------------------ what a user is told
def check_refusal(path: str, code: str, *values: str) -> None:
    with raises(ConfigError, code, *values):
        list_files("web", path, "jsonl")


def test_what_is_not_there_is_told(hub: Hub) -> None:
    commit = hub.push("org/set", FILES)
    values = hub.url, "org/absent", "private", "HF_TOKEN"
    check_refusal("hf://datasets/org/absent/data", "data.unlistable_path", *values)
    check_refusal("hf://datasets/org/set@v9/data", "data.unlistable_path", "org/set", "v9", "`@`")
    endings = "**/* (.jsonl .jsonl.gz .jsonl.zst .jsonl.zstd .jsonl.bz2 .jsonl.xz)"
    values = "'hf://datasets/org/set", endings, f"hf://datasets/org/set@{commit}/nowhere)"
    check_refusal("hf://datasets/org/set/nowhere", "data.no_matching_file", *values)
    with pytest.raises(FileNotFoundError) as absent:
        open_input(f"hf://datasets/org/set@{commit}", "nowhere")
    assert absent.value.filename == f"hf://datasets/org/set@{commit}/nowhere"


def test_a_private_dataset_is_read_with_the_users_token_which_no_other_host_sees(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("org/set", FILES)
    hub.token = "hf_of_the_user"
    check_refusal("hf://datasets/org/set/data", "data.unlistable_path", "org/set", "private")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    listing = list_files("web", "hf://datasets/org/set/data/train-0*", "jsonl")
    with open_input(listing.base, listing.names[0]) as file:
        assert file.read_at(0, 5000) == FILES["data/train-0 é.jsonl"][:5000]
    large = [headers for _, path, headers in hub.requests if path.startswith("/large/")]
    assert large
    assert not any("Authorization" in headers for headers in large)


_LIST = """
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.lists.listing import list_files
listing = list_files("web", "hf://datasets/org/set/data/train-0*", "jsonl")
with open_input(listing.base, listing.names[0]) as file:
    print(len(file.read_at(0, file.size)))
"""


def test_endpoint_and_token_come_from_the_usual_places(hub: Hub, tmp_path: Path) -> None:
    hub.push("org/set", FILES)
    hub.token = "hf_of_the_user"
    (tmp_path / "token").write_text(hub.token)
    ended = subprocess.run(
        [sys.executable, "-c", _LIST],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == str(len(FILES["data/train-0 é.jsonl"]))


def test_an_answer_that_breaks_off_is_asked_for_again(hub: Hub) -> None:
    hub.push("org/set", FILES)
    listing = list_files("web", "hf://datasets/org/set/data/train-0*", "jsonl")
    hub.fail += ["cut off"]
    with open_input(listing.base, listing.names[0]) as file:
        assert file.read_at(10, 500) == FILES["data/train-0 é.jsonl"][10:510]
    assert len(hub.asked("/large/")) == 2


def test_offline_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/set", FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    client.close_session()
    check_refusal("hf://datasets/org/set/data", "data.unlistable_path", "HF_HUB_OFFLINE")


def test_of_a_parquet_file_its_columns_bytes_are_asked_for_once_and_its_footer(
    hub: Hub, tiny_config: Make, tmp_path: Path
) -> None:
    texts = [f"text {i} " + "".join(chr(97 + (i * j) % 26) for j in range(400)) for i in range(200)]
    out = io.BytesIO()
    table = pa.table({"before": [t[::-1] for t in texts], "text": texts, "behind": [t[1:] for t in texts]})
    pq.write_table(table, out, row_group_size=20, compression="none", use_dictionary=False)
    hub.push("o/n", {"a.parquet": out.getvalue()})
    uri, changes = "hf://datasets/o/n/a.parquet", {"data.encoder": "tokenizers", "data.shuffle": "none"}
    spec = spec_of(job(tiny_config, uri, "parquet", **changes))
    assert spec.plans[0].num_fragments == 10
    hub.requests.clear()
    parquet_format._footers.clear()
    found = plain(samples(spec, 64))
    asked = [
        headers["Range"] for _, path, headers in hub.requests if "/large/" in path and "Range" in headers
    ]
    begins = [tuple(map(int, each.removeprefix("bytes=").split("-"))) for each in asked]
    groups = pq.ParquetFile(out).metadata
    chunks = [groups.row_group(i).column(1) for i in range(10)]
    wanted = [(c.data_page_offset, c.data_page_offset + c.total_compressed_size - 1) for c in chunks]
    of_footer = [each for each in begins if each not in wanted]
    assert sorted(set(begins) - set(of_footer)) == sorted(wanted)
    assert len(begins) == len(wanted) + len(of_footer)
    assert len(of_footer) <= 2
    assert sum(stop + 1 - start for start, stop in of_footer) < 1 << 17
    (tmp_path / "a.parquet").write_bytes(out.getvalue())
    assert found == plain(samples(spec_of(job(tiny_config, str(tmp_path), "parquet", **changes)), 64))


def test_a_stretch_of_an_arrow_file_is_asked_for_in_one_request(
    hub: Hub, tiny_config: Make, tmp_path: Path
) -> None:
    out, table = io.BytesIO(), pa.table({"text": some_texts(200)})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    hub.push("o/n", {"a.arrow": out.getvalue()})
    uri, changes = "hf://datasets/o/n/a.arrow", {"data.encoder": "tokenizers", "data.shuffle": "none"}
    spec = spec_of(job(tiny_config, uri, "arrow", **changes))
    assert (spec.plans[0].num_fragments, spec.plans[0].manifest.num_bytes > 20_000) == (1, True)
    hub.requests.clear()
    found = plain(samples(spec, 64))
    asked = [
        headers["Range"] for _, path, headers in hub.requests if "/large/" in path and "Range" in headers
    ]
    assert len(asked) < 10, "there are 50 record batches"
    (tmp_path / "a.arrow").write_bytes(out.getvalue())
    assert found == plain(samples(spec_of(job(tiny_config, str(tmp_path), "arrow", **changes)), 64))
