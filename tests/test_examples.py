"""Runs of older versions: those of format 2 are read for ever, one of format 1 is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

import orchestrator
from orchestrator.checkpoint.export.export_files import find_exports, read_marker, weights_sentence
from orchestrator.checkpoint.files.manifest import read_manifest
from orchestrator.checkpoint.node_local.node_folder import read_node
from orchestrator.checkpoint.points.sealed_votes import COMPLETED, REMOVED, decides, read_votes
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import QuarantineFiles
from orchestrator.cli.commands import main
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.frozen import read_later
from orchestrator.errors import Format1Error, LaterFormatError, OrchestratorError
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import FindingFiles, RequestFiles
from orchestrator.json_form import seal, unseal
from orchestrator.storage.files import Storage
from tests.example_runs import EXAMPLES, NEWEST, ORPHAN, POINTS, REWOUND_TO, ROOT, UNCOMMITTED, kinds_in
from tests.folders import contents
from tests.raising import raises
from tests.torchrun.ranks import Ranks

pytestmark = pytest.mark.xdist_group("forked")

OLD = ["format2", "numbered"]
LIMIT_S = 240.0


@pytest.fixture(params=OLD)
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in the current folder: `example` is the run, `job.yaml` what it was started with."""
    folder = tmp_path / "copy"
    shutil.copytree(EXAMPLES / request.param, folder)
    monkeypatch.chdir(folder)
    return folder


def test_an_old_run_is_read_whole_and_changed_by_no_reading(example: Path) -> None:
    before = contents(example)
    run = orchestrator.open("example")
    rows = run.list_points(verify=True)
    assert [(row["name"], row["healthy"], row["on_lineage"]) for row in rows] == [
        (name, True, name != ORPHAN) for name in POINTS
    ]
    assert [row["consumed_tokens"] for row in rows] == [576, 768, 768, 960]
    assert [(row["name"], row["healthy"]) for row in run.verify()] == [(name, True) for name in POINTS]
    report = run.audit()
    assert report["exactly_once"], report
    assert (report["tokens"], report["steps"], report["attempts"]) == (960, 12, 3)
    plan = orchestrator.plan("job.yaml", ["train.max_steps=20", "resume.keep_latest=4"])
    assert (plan.action, plan.point, plan.consumed_tokens) == ("resume", NEWEST, 960)
    assert contents(example) == before


# what this version wrote trains on in all other tests
@pytest.mark.parametrize("example", [name for name in OLD if name != "numbered"], indirect=True)
def test_an_old_run_trains_on_and_loses_nothing_that_it_had(example: Path, tmp_path: Path) -> None:
    before = contents(example)
    changes = ["train.global_batch_size=6", "train.max_steps=14", "resume.keep_latest=9"]
    rank = Ranks(example, tmp_path, 1, ["job.yaml", *changes])
    try:
        assert rank.end(LIMIT_S) == [0], rank.said()
    finally:
        rank.kill()
    after = contents(example)
    assert {path: after.get(path) for path in before} == before
    run = orchestrator.open("example")
    names = [*POINTS, "00000012-a0004-g0001", "00000014-a0004-g0001"]
    assert [(row["name"], row["healthy"], row["on_lineage"]) for row in run.list_points(verify=True)] == [
        (name, True, name != ORPHAN) for name in names
    ]
    assert run.audit()["exactly_once"]
    assert run.records()[-1].consumed_tokens == 14 * 6 * 16


def test_kinds_and_fields_of_old_events_have_kept_their_names(example: Path) -> None:
    events = read_journal(Storage(str(example / "example"))).events
    assert len({event.kind for event in events}) == 9
    for event in events:
        assert event.fields.keys() <= EventKind(event.kind).fields


def test_one_changed_byte_of_an_old_point_is_named(example: Path) -> None:
    parts = example / "example" / "points" / NEWEST / "parts.json"
    assert b'"items"' in parts.read_bytes()
    parts.write_bytes(parts.read_bytes().replace(b'"items"', b'"ITEMS"', 1))
    rows = orchestrator.open("example").verify()
    assert [(row["name"], [damage["file"] for damage in row["damaged"]]) for row in rows][-1] == (
        NEWEST,
        ["parts.json"],
    )


# ---- format 1
@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run of format 1 in the current folder."""
    shutil.copytree(EXAMPLES / "format1", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "command",
    [
        "train job.yaml",
        "train job.yaml --dry-run",
        "plan job.yaml",
        "status example",
        "points example",
        "verify example",
        "audit example",
        f"pin example {NEWEST}",
        "save example",
        "stop example",
        f"rewind example --to {REWOUND_TO} --yes",
        "fork example forked --at latest",
        "export example weights",
        "samples example --step 10",
        "replay example --step 9",
    ],
)
def test_every_command_refuses_a_run_of_format_1_by_name_and_changes_nothing(
    first: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(first)
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (ended.value.code, document["error"]["code"]) == (2, "storage.format_1")
    assert "example/run.json" in document["error"]["text"]
    assert contents(first) == before


def test_a_new_run_does_not_begin_with_weights_of_format_1(first: Path) -> None:
    with raises(Format1Error, "storage.format_1", NEWEST) as refused:
        weights_sentence(str(first / "example" / "points" / NEWEST))
    assert refused.value.exit_code == 2


def test_a_point_of_format_1_in_a_run_of_format_2_is_refused_by_name_and_passed_over_by_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fork of a run of format 1 has it, which an earlier version made."""
    shutil.copytree(EXAMPLES / "format2", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    shutil.rmtree(f"example/points/{NEWEST}")
    shutil.copytree(EXAMPLES / "format1" / "example" / "points" / NEWEST, f"example/points/{NEWEST}")
    store, run = RunStore(Storage("example")), orchestrator.open("example")
    before = contents(tmp_path / "copy")
    reads: list[Callable[[], object]] = [
        lambda: store.verify_point(NEWEST),
        lambda: store.verify_point(NEWEST, fast=True),
        lambda: choose_point(store, survey(store, with_steps=False), "latest"),
        lambda: orchestrator.plan("job.yaml", ["train.max_steps=20"]),
        lambda: run.fork(tmp_path / "forked", NEWEST),
        lambda: run.export(tmp_path / "weights", NEWEST),
        lambda: read_manifest(store.storage, NEWEST),
        run.list_points,
        run.verify,
    ]
    for number, read in enumerate(reads):
        with raises(Format1Error, "storage.format_1", NEWEST) as refused:
            read()
        assert refused.value.exit_code == 2, number
    assert contents(tmp_path / "copy") == before


# ---- a file of each kind


@pytest.fixture
def kinds(tmp_path: Path) -> Storage:
    """Such a run."""
    return kinds_in(tmp_path / "kinds")


def test_a_file_of_each_kind_is_read_as_it_was_first_written(kinds: Storage) -> None:
    store = RunStore(kinds)
    run = store.read_run()
    assert run is not None
    pins = store.pins()
    assert {point: hold.reason for point, hold in pins.items()} == {
        NEWEST: "kept for a paper",
        REWOUND_TO: "taken again",
    }
    request = RequestFiles(kinds, "0123456789abcdef", run.id).read(1)
    assert request is not None
    assert (request.what, request.by, request.unreadable) == ("save", "me@host", "")
    found = FindingFiles(kinds, run.id).all()
    assert [(each.what, each.attempt, each.unreadable) for each in found] == [
        ("audit", 3, ""),
        ("verify", 3, ""),
    ]
    assert found[0].result["exactly_once"]
    mark = QuarantineFiles(kinds).read_mark(REWOUND_TO)
    assert mark is not None
    assert [(each.file, each.reason) for each in mark.damages] == [("cursor.json", "is missing")]
    later = read_later(kinds, "made", "2")
    assert later is not None
    assert len(later.manifest.files) == 2
    assert find_exports(kinds) == ([NEWEST], [])
    exported = read_marker(kinds, f"exports/{NEWEST}")
    assert exported is not None
    assert (exported.point, exported.run_id) == (NEWEST, run.id)
    events = read_journal(kinds).events
    assert [event.fields["outcome"] for event in events if event.kind == "end"][-1] == "done"
    (vote,) = read_votes(kinds, UNCOMMITTED, run.id)
    assert (vote.rank, vote.world_size, vote.records[0].loss, vote.sums["model"]) == (0, 1, 6.5, 0xABC)
    assert decides(kinds, UNCOMMITTED, COMPLETED)
    assert not decides(kinds, UNCOMMITTED, REMOVED)
    node = read_node(str(EXAMPLES / "kinds" / "node"))
    assert node is not None
    assert (node.host, node.format) == ("gpu-7", 1)


def test_every_kind_of_file_that_is_written_has_an_example(kinds: Storage) -> None:
    root = Path(kinds.root)
    have = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} | {"node.json"}
    text = (ROOT / "docs" / "storage-format.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", text.partition("## Fields")[2].partition("A **key**")[0], re.M)
    assert len(rows) > 15
    for row in rows:
        name = row.replace("<node_folder>/", "").replace("0003", "*").replace("000001", "*")
        pattern = re.sub(r"<\w+>|…", "*", name)
        assert any(fnmatch(path, pattern) for path in have), f"{row} has no example"


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("run.json", lambda content: content.update(format=3)),
        (f"exports/{NEWEST}/EXPORT", lambda content: content.update(format=2)),
        (f"points/{NEWEST}/COMMIT", lambda content: content.update(format=3)),
    ],
)
def test_what_a_later_version_wrote_is_refused_with_both_numbers(
    kinds: Storage, path: str, change: Change
) -> None:
    content = unseal(kinds.read(path))
    change(content)
    kinds.delete(path)
    kinds.write(path, seal(content))

    def read() -> object:
        if path.endswith("EXPORT"):
            return read_marker(kinds, f"exports/{NEWEST}")
        return orchestrator.open(kinds.root).list_points()

    with raises(LaterFormatError, "storage.later_format") as refused:
        read()
    assert re.search(r"\b[23]\b.*\b[12]\b", str(refused.value)), "both numbers"


def refusal() -> str:
    """Why a start would not go on."""
    try:
        found = orchestrator.plan("job.yaml", ["train.max_steps=20"])
    except OrchestratorError as error:
        return str(error)
    return "\n".join(found.refusals)


def test_a_start_leaves_a_run_of_a_later_version_alone(example: Path) -> None:
    for name, change in {
        "run.json": lambda data: seal({**unseal(data), "format": 3}),
        "manifest/data.json": lambda data: orjson.dumps({**orjson.loads(data), "version": 2}),
        "attempts/0003.parent.json": lambda data: seal({**unseal(data), "later": 1}),
    }.items():
        path = example / "example" / name
        whole = path.read_bytes()
        path.write_bytes(change(whole))
        said = rf"{name}.*(has format 3,|has version 2,|; restore)"
        assert re.search(said, refusal()), (name, refusal())
        path.write_bytes(whole)
    manifest = example / "example" / "manifest" / "made.parquet"
    table = pq.read_table(manifest)
    metadata = {**table.schema.metadata, b"version": b"2"}
    pq.write_table(table.replace_schema_metadata(metadata), manifest)
    assert re.search("made.parquet.*it has version 2.* reads 1", refusal())
