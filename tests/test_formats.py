"""Every kind of file says in which form it is written: without a number, and with a number that is read here,
it is read as ever; the next number is refused with both.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from blake3 import blake3

import orchestrator
from orchestrator.checkpoint.export.export_files import read_marker, weights_sentence
from orchestrator.checkpoint.files.manifest import PARTS, read_manifest
from orchestrator.checkpoint.node_local.node_folder import make_node
from orchestrator.checkpoint.points.model_folders import kept_configuration
from orchestrator.checkpoint.points.points import COMMIT, DOCUMENTS, files_digest
from orchestrator.checkpoint.points.sealed_votes import COMPLETED, REMOVED, decides, keep_vote, read_votes
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import QuarantineFiles
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.frozen import read_later
from orchestrator.errors import ConfigError, LaterFormatError, OrchestratorError
from orchestrator.history.claims.claim_files import read_starts
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.numbered_files import FindingFiles, RequestFiles
from orchestrator.inspect.run import Run
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.json_form import decode, seal, unseal
from orchestrator.launch.branch.point_query import PointQuery, find
from orchestrator.launch.replay.step_replay import ReplayHistory
from orchestrator.records.points import FileEntry
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import write_vote
from tests.example_runs import NEWEST, NUMBERED, POINTS, REWOUND_TO, ROOT, UNCOMMITTED, kinds_in
from tests.raising import raises

LAUNCH, RUN_ID = "0123456789abcdef", "67b1834f6e2090e6"


# ------------------------------------------------------------------ sealed
@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """A sealed file of the kinds' run, and what is read of it: its content, or what is said instead."""

    row: str  # of the table in storage-format.md
    path: str
    read: Callable[[Storage], object]


def claim(storage: Storage) -> object:
    survey(RunStore(storage), with_steps=False)
    return RunStore(storage).read_claim(3)


def parent(storage: Storage) -> object:
    survey(RunStore(storage), with_steps=False)
    return RunStore(storage).read_parent(3)


def request(storage: Storage) -> object:
    found = RequestFiles(storage, LAUNCH, RUN_ID).read(1)
    assert found is not None
    return found.unreadable or found


def finding(storage: Storage) -> object:
    (found, _) = FindingFiles(storage, RUN_ID).all()
    return found.unreadable or found


SEALED = [
    Sealed(row="run.json", path="run.json", read=lambda s: RunStore(s).read_run()),
    Sealed(row="attempts/0003.json", path="attempts/0003.json", read=claim),
    Sealed(row="attempts/0003.parent.json", path="attempts/0003.parent.json", read=parent),
    Sealed(
        row="quarantine/<point>.json",
        path=f"quarantine/{REWOUND_TO}.json",
        read=lambda s: QuarantineFiles(s).read_mark(REWOUND_TO),
    ),
    Sealed(
        row="pins/<point>.json",
        path=f"pins/{NEWEST}.json",
        read=lambda s: RunStore(s).read_hold(NEWEST),
    ),
    Sealed(
        row="generations/a0003-g0001.json",
        path="generations/a0003-g0001.json",
        read=lambda s: read_starts(s, [(3, 1)], RUN_ID),
    ),
    Sealed(row="model/0001.json", path="model/0001.json", read=lambda s: kept_configuration(s, 1)),
    Sealed(row="requests/<launch>/000001.json", path=f"requests/{LAUNCH}/000001.json", read=request),
    Sealed(row="findings/000001.json", path="findings/000001.json", read=finding),
    Sealed(
        row="points/…/COMMIT",
        path=f"points/{NEWEST}/COMMIT",
        read=lambda s: RunStore(s).read_point(NEWEST).commit,
    ),
    Sealed(
        row="exports/…/EXPORT",
        path=f"exports/{NEWEST}/EXPORT",
        read=lambda s: read_marker(s, f"exports/{NEWEST}"),
    ),
    Sealed(
        row="points/…/votes/00000.json",
        path=f"points/{UNCOMMITTED}/votes/00000.json",
        read=lambda s: read_votes(s, UNCOMMITTED, RUN_ID),
    ),
    Sealed(
        row="points/…/DECIDED",
        path=f"points/{UNCOMMITTED}/DECIDED",
        read=lambda s: decides(s, UNCOMMITTED, COMPLETED),
    ),
    Sealed(row="<node_folder>/node.json", path="node.json", read=lambda s: make_node(s.root, "")),
]


def said(read: Callable[[], object]) -> object:
    """What is read, or the error's text."""
    try:
        return read()
    except OrchestratorError as error:
        return str(error)


def spelled(document: dict[str, Any]) -> bytes:
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(document, option=options)


@pytest.mark.parametrize("kind", SEALED, ids=lambda kind: kind.row)
def test_a_sealed_file_is_read_without_a_number_and_refused_with_the_next_one(
    kind: Sealed, tmp_path: Path
) -> None:
    storage = kinds_in(tmp_path / "kinds")
    shutil.copy(ROOT / "tests" / "examples" / "kinds" / "node" / "node.json", storage.root)
    path = Path(storage.root, kind.path)
    document = json.loads(path.read_bytes())
    as_it_lies = kind.read(storage)
    assert not isinstance(as_it_lies, str)
    for number in (None, 2):
        sealed = {**document, "format": number} if number else {**document}
        if number is None:
            sealed.pop("format", None)
        path.write_bytes(spelled(sealed))
        assert said(partial(kind.read, storage)) == as_it_lies, number
    path.write_bytes(spelled({**document, "format": 3}))
    text = str(said(partial(kind.read, storage)))
    assert "is a sealed document of format 3, this version reads 1 and 2; use the version that wrote" in text


@pytest.mark.parametrize("path", ["run.json", "attempts/0003.json", "attempts/0003.parent.json", "COMMIT"])
def test_nothing_is_decided_from_a_run_of_which_a_later_version_sealed_a_part(
    path: str, tmp_path: Path
) -> None:
    storage = kinds_in(tmp_path / "kinds")
    store, run = RunStore(storage), Run(storage.root)
    name = store.point_names()[-1]
    file = Path(storage.root, f"points/{name}/{path}" if path == COMMIT else path)
    file.write_bytes(spelled({**json.loads(file.read_bytes()), "format": 3}))
    before = sorted(Path(storage.root).rglob("*"))
    reads: list[Callable[[], object]] = [lambda: survey(store), run.list_points, run.verify]
    if path.startswith("attempts/"):
        reads.append(partial(run.status, watch_s=0))  # it shows no more of the others than is known
    for decide in reads:
        with raises(LaterFormatError, "storage.later_format", " 3", " 2"):
            decide()
    assert sorted(Path(storage.root).rglob("*")) == before


def test_an_end_of_a_later_version_is_no_end_so_that_the_attempt_is_watched(tmp_path: Path) -> None:
    storage = kinds_in(tmp_path / "kinds")
    path = Path(storage.root, "attempts/0003.end.json")
    assert RunStore(storage).read_end(3) is not None
    path.write_bytes(spelled({**json.loads(path.read_bytes()), "format": 3}))
    assert RunStore(storage).read_end(3) is None


@pytest.mark.parametrize("of_the_seal", [True, False])
def test_weights_that_a_later_version_exported_need_that_version_and_no_other_export(
    tmp_path: Path, of_the_seal: bool
) -> None:
    storage = kinds_in(tmp_path / "kinds")
    path = Path(storage.root, "exports", NEWEST, "EXPORT")
    path.with_name("model.safetensors").touch()
    assert "exported from" in weights_sentence(str(path.parent))
    document, content = json.loads(path.read_bytes()), unseal(path.read_bytes())
    path.write_bytes(spelled({**document, "format": 3}) if of_the_seal else seal({**content, "format": 2}))
    written = " 3" if of_the_seal else " 2"
    with raises(ConfigError, "storage.later_format", path.parent, "EXPORT", written, " 1"):
        weights_sentence(str(path.parent))


# ------------------------------------------------------------------ a point's documents
@pytest.fixture
def numbered(tmp_path: Path) -> Storage:
    """A run whose journal, cursors, configurations and rng.json have numbers."""
    shutil.copytree(NUMBERED / "example", tmp_path / "example")
    return Storage(str(tmp_path / "example"))


def rewrite(storage: Storage, point: str, file: str, content: dict[str, Any]) -> None:
    """The point as if that had been committed."""
    folder = Path(storage.root, "points", point)
    data = orjson.dumps(content)
    (folder / file).write_bytes(data)
    now = {"path": file, "bytes": len(data), "digest": blake3(data).hexdigest()}
    commit = unseal((folder / COMMIT).read_bytes())
    entries = [now if entry["path"] == file else entry for entry in commit["files"]]
    files = tuple(decode(FileEntry, entry) for entry in entries)
    (folder / COMMIT).write_bytes(seal({**commit, "files": entries, "files_digest": files_digest(files)}))


def content_of(storage: Storage, point: str, file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(storage.root, "points", point, file).read_bytes())
    return found


@pytest.mark.parametrize("file", DOCUMENTS)
def test_a_document_of_a_point_has_its_number_and_is_read_without_it_too(
    numbered: Storage, file: str
) -> None:
    store = RunStore(numbered)
    before = store.read_point(NEWEST)
    assert "format" not in before.config
    content = content_of(numbered, NEWEST, file)
    assert content.pop("format") == 2
    if file == PARTS:
        return  # it always had one
    rewrite(numbered, NEWEST, file, content)
    after = store.read_point(NEWEST)
    assert (after.cursor, after.config) == (before.cursor, before.config)
    assert store.verify_point(NEWEST) == []


@pytest.mark.parametrize("file", DOCUMENTS)
def test_a_point_with_a_document_of_a_later_version_is_refused_and_no_older_one_taken(
    numbered: Storage, file: str
) -> None:
    rewrite(numbered, NEWEST, file, {**content_of(numbered, NEWEST, file), "format": 3, "later": 1})
    store, run = RunStore(numbered), orchestrator.open(numbered.root)
    seen = survey(store, with_steps=False)
    reads: list[Callable[[], object]] = [
        lambda: store.verify_point(NEWEST),
        lambda: store.verify_point(NEWEST, fast=True),
        lambda: choose_point(store, seen, "latest"),
        lambda: choose_point(store, seen, "latest", fast=True),
        lambda: choose_point(store, seen, NEWEST),
        lambda: find(store, survey(store), PointQuery(point="latest")),
        lambda: ReplayHistory(store, PointQuery(step=10)),
        run.list_points,
        run.verify,
    ]
    for read in reads:
        with raises(LaterFormatError, "storage.later_format", NEWEST, file, " 3", " 2"):
            read()
    if file == PARTS:
        with raises(LaterFormatError, "storage.later_format", PARTS, " 3", " 2"):
            read_manifest(numbered, NEWEST)  # what a worker reads
    assert not store.is_quarantined(NEWEST), "nothing is damaged"
    assert choose_point(store, seen, POINTS[2])[0] is not None, "who names an older one may go on from it"


def test_a_worker_that_loads_a_later_versions_point_says_so(numbered: Storage) -> None:
    path = Path(numbered.root, "points", NEWEST, COMMIT)
    path.write_bytes(seal({**unseal(path.read_bytes()), "format": 3}))
    with raises(LaterFormatError, "storage.later_format", NEWEST, " 3", " 2"):
        read_manifest(numbered, NEWEST)


@pytest.mark.parametrize("number", ["2", None, [1]])
@pytest.mark.parametrize("file", DOCUMENTS)
def test_what_is_no_number_of_a_format_is_damage(numbered: Storage, file: str, number: object) -> None:
    rewrite(numbered, NEWEST, file, {**content_of(numbered, NEWEST, file), "format": number})
    (damage,) = RunStore(numbered).verify_point(NEWEST)
    assert (damage.file, "has format" in damage.reason) == (file, True)


def test_what_a_version_before_numbers_wrote_has_none() -> None:
    for example, has in (("format2", False), ("numbered", True)):
        root = ROOT / "tests" / "examples" / example / "example"
        for file in (name for name in DOCUMENTS if name != PARTS):
            for path in root.glob(f"points/*/{file}"):
                assert ("format" in json.loads(path.read_bytes())) is has, path
        lines = [line for path in root.glob("journal/*/*") for line in path.read_bytes().splitlines()]
        assert lines
        assert {"format" in json.loads(line) for line in lines} == {has}


# ------------------------------------------------------------------ lines, lists
def test_a_journal_is_read_without_numbers_and_refused_with_the_next_one(numbered: Storage) -> None:
    before = read_journal(numbered)
    paths = sorted(Path(numbered.root).glob("journal/*/*.jsonl"))
    assert len(paths) == 3
    for path in paths:
        path.write_bytes(path.read_bytes().replace(b'{"format":2,', b"{"))
    assert read_journal(numbered) == before
    paths[1].write_bytes(paths[1].read_bytes().replace(b'{"seq"', b'{"format":4,"seq"'))
    run = orchestrator.open(numbered.root)
    for read in (run.records, run.list_points, run.audit, run.events, run.status):
        with raises(OrchestratorError, "storage.later_format", "a0002", "format 4,", "1, 2, 3"):
            read()


def test_the_number_of_a_line_is_not_shown_with_an_event(numbered: Storage) -> None:
    views = RunViews(RunStore(numbered))
    rows = views.events()["rows"]
    assert rows
    for row in rows:
        assert "format" not in views.event(row["id"])["fields"]


def later_list(storage: Storage) -> object:
    return read_later(storage, "made", "2")


def test_a_later_list_of_another_version_is_refused(tmp_path: Path) -> None:
    storage = kinds_in(tmp_path / "kinds")
    path = Path(storage.root, "manifest/made@2.parquet")
    assert later_list(storage) is not None
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"version": b"2"}), path)
    with raises(OrchestratorError, "storage.later_format", "made@2.parquet", "version 2", "reads 1"):
        later_list(storage)


# what is shown of the other rows, and where
ELSEWHERE = {
    "attempts/0003.end.json": test_an_end_of_a_later_version_is_no_end_so_that_the_attempt_is_watched,
    "manifest/<source>@<version>.parquet": test_a_later_list_of_another_version_is_refused,
    "points/…/cursor.json": test_a_point_with_a_document_of_a_later_version_is_refused_and_no_older_one_taken,
    "points/…/config.json": test_a_point_with_a_document_of_a_later_version_is_refused_and_no_older_one_taken,
    "points/…/rng.json": test_a_point_with_a_document_of_a_later_version_is_refused_and_no_older_one_taken,
    "points/…/parts.json": test_a_point_with_a_document_of_a_later_version_is_refused_and_no_older_one_taken,
}


def test_votes_of_a_later_version_and_what_it_decided_are_refused(tmp_path: Path) -> None:
    storage, at = Storage(str(tmp_path)), StateKey(attempt=1, generation=1, step=4)
    vote = write_vote(storage, at, 0)
    keep_vote(storage, vote, RUN_ID)
    assert read_votes(storage, at.point_name, RUN_ID) == (vote,)
    assert decides(storage, at.point_name, COMPLETED)
    assert not decides(storage, at.point_name, REMOVED)
    reads = {
        "votes/00000.json": partial(read_votes, storage, at.point_name, RUN_ID),
        "DECIDED": partial(decides, storage, at.point_name, COMPLETED),
    }
    for name, read in reads.items():
        path = tmp_path / "points" / at.point_name / name
        path.write_bytes(spelled({**json.loads(path.read_bytes()), "format": 3}))
        with raises(LaterFormatError, "storage.later_format", name, " 3", " 2"):
            read()


ELSEWHERE |= dict.fromkeys(
    ["points/…/votes/00000.json", "points/…/DECIDED"],
    test_votes_of_a_later_version_and_what_it_decided_are_refused,
)
AT_A_START = {"manifest/data.json", "manifest/<source>.parquet"}  # tests/test_examples.py


def test_no_kind_of_file_in_the_document_is_left_out_here() -> None:
    text = (ROOT / "docs" / "storage-format.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", text.partition("## Fields")[2].partition("A **key**")[0], re.M)
    assert {*rows} == {kind.row for kind in SEALED} | ELSEWHERE.keys() | AT_A_START
