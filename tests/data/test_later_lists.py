"""Several lists of one source in a run's folder: each is written once, by whoever comes first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data.dataset import prepare_data
from orchestrator.data.frozen import (
    LaterList,
    copy_frozen,
    later_versions,
    manifest_path,
    read_frozen,
    read_later,
    write_later,
)
from orchestrator.data.sources.lists.manifest import freeze, to_parquet
from orchestrator.errors import DataIdentityError
from orchestrator.storage.files import Storage
from tests.data.making import job, some_texts, write_corpus
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


def later(folder: Path, version: str) -> LaterList:
    return LaterList(
        manifest=freeze("made", str(folder), "jsonl", "text"),
        version=version,
        fragment_bytes=900,
        window_bytes=2500,
        fragments_per_block=1,
        paths=(str(folder), "/with/\n a line"),
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl")
    return tmp_path / "data"


def test_later_lists_lie_beside_the_first_and_leave_it_alone(
    data: Path, tmp_path: Path, tiny_config: Make
) -> None:
    run = tmp_path / "run"
    first = prepare_data(job(tiny_config, data), Storage(str(run)))
    frozen = read_frozen(Storage(str(run)))
    (data / "more.jsonl").write_text('{"text": "more"}\n')
    found = later(data, "0e2")
    assert write_later(Storage(str(run)), found) == found
    assert read_later(Storage(str(run)), "made", "0e2") == found
    assert read_later(Storage(str(run)), "made", "1") is None
    assert later_versions(Storage(str(run))) == {"made": ("0e2",)}
    assert read_frozen(Storage(str(run))) == frozen
    assert prepare_data(job(tiny_config, data), Storage(str(run))).plans == first.plans


def test_of_all_who_write_a_version_one_decides(data: Path, tmp_path: Path) -> None:
    candidates = [replace(later(data, "1"), paths=(str(i),)) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: write_later(Storage(str(tmp_path / "run")), each), candidates))
    assert len({each.paths for each in found}) == 1
    assert read_later(Storage(str(tmp_path / "run")), "made", "1") == found[0]


def test_a_list_under_another_ones_name_is_refused(data: Path, tmp_path: Path) -> None:
    found = write_later(Storage(str(tmp_path)), later(data, "1"))
    (tmp_path / manifest_path("made", "1")).rename(tmp_path / manifest_path("made", "2"))
    with raises(DataIdentityError, "data.damaged_list", "list '1' of source made,", "list '2'"):
        read_later(Storage(str(tmp_path)), "made", "2")
    (tmp_path / manifest_path("made", "3")).write_bytes(to_parquet(found.manifest))
    with raises(DataIdentityError, "data.damaged_list", "list None of source made,", "list '3'"):
        read_later(Storage(str(tmp_path)), "made", "3")


def test_a_copy_takes_what_came_later_and_is_refused_for_what_differs(
    data: Path, tmp_path: Path, tiny_config: Make
) -> None:
    run, fork = tmp_path / "run", tmp_path / "fork"
    prepare_data(job(tiny_config, data), Storage(str(run)))
    (run / "manifest" / ".nfs0000000000a1b2c300000001").write_bytes(b"deleted, still open elsewhere")
    copy_frozen(Storage(str(run)), Storage(str(fork)))
    assert not list(fork.rglob(".nfs*"))
    found = write_later(Storage(str(run)), later(data, "1"))
    copy_frozen(Storage(str(run)), Storage(str(fork)))
    assert read_later(Storage(str(fork)), "made", "1") == found
    (fork / manifest_path("made", "1")).write_bytes(b"another")
    with raises(DataIdentityError, "data.other_frozen", run, fork):
        copy_frozen(Storage(str(run)), Storage(str(fork)))
