"""Of a point only what its COMMIT lists is read, and all that a point needs must stand there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from orchestrator.checkpoint.points.points import COMMIT, DOCUMENTS, PARTS, files_digest
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ResumePointError
from orchestrator.json_form import decode, seal, unseal
from orchestrator.records.points import FileEntry
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, write_point
from tests.raising import raises

NAME = key(10).point_name


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A run with one point."""
    store = RunStore(Storage(str(tmp_path)))
    assert write_point(store, key(10)).name == NAME
    return store


def relist(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """COMMIT with another list of files, and its digest: as a writer would that made a mistake."""
    commit = unseal((folder / COMMIT).read_bytes())
    entries = change(commit["files"])
    files = tuple(decode(FileEntry, entry) for entry in entries)
    (folder / COMMIT).write_bytes(seal({**commit, "files": entries, "files_digest": files_digest(files)}))


@pytest.mark.parametrize("file", DOCUMENTS)
def test_a_commit_that_does_not_list_a_document_is_damaged(
    store: RunStore, tmp_path: Path, file: str
) -> None:
    relist(tmp_path / "points" / NAME, lambda files: [e for e in files if e["path"] != file])
    (damage,) = store.verify_point(NAME)
    assert (damage.file, damage.reason) == (COMMIT, "lists files that cannot be those of a point")


@pytest.mark.parametrize("file", ["state/00007-of-00008.safetensors", "notes.json"])
def test_a_file_that_commit_does_not_list_is_not_read(store: RunStore, tmp_path: Path, file: str) -> None:
    (tmp_path / "points" / NAME / file).write_bytes(b"{}")
    with raises(ResumePointError, "point.damaged", f"{NAME}: {file} ", "COMMIT"):
        store.read_listed(NAME, file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"num_shards":2', '"num_shards":3'),
        ('"num_shards":2', '"num_shards":0'),
        ("[20,10]", "[20,-1]"),
        ('"uint8"', '"uint7"'),
        ('"optimizer","w"', '"model","w"'),
        (",true]", ",1]"),
    ],
)
def test_a_list_of_tensors_that_a_writer_made_wrong_is_damage(
    store: RunStore, tmp_path: Path, old: str, new: str
) -> None:
    folder = tmp_path / "points" / NAME
    text = json.dumps(json.loads((folder / PARTS).read_bytes()), separators=(",", ":"))
    assert old in text
    data = text.replace(old, new).encode()
    (folder / PARTS).write_bytes(data)
    now = {"path": PARTS, "bytes": len(data), "digest": blake3(data).hexdigest()}
    relist(folder, lambda files: [now if entry["path"] == PARTS else entry for entry in files])
    (damage,) = store.verify_point(NAME)
    assert damage.file == PARTS
    assert damage.reason.startswith("is not as this version writes it")
