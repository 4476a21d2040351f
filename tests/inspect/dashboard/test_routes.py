"""What the API answers: documents that fit together, errors that say what to do, and nothing from outside the
storage folder.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import orchestrator
from benchmarks.made_run import note
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.config.redaction import redacted_text
from orchestrator.errors import ConfigError, StorageError
from orchestrator.history.claims.claim_files import RESUME, REWIND
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.dashboard.answers import without_secrets
from orchestrator.inspect.dashboard.runs import Runs
from orchestrator.storage.files import Storage
from tests.inspect.dashboard.serving import (
    SCRIPT,
    SECRET,
    Served,
    client,
    make_hostile,
    served,
    text_of,
)
from tests.raising import raises


def test_every_route_answers_with_what_the_others_say(run: Served) -> None:
    for path in run.routes():
        answer = run.client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["content-type"] == "application/json"
    (row,) = run.client.get("/api/runs").json()["runs"]
    summary = run.get("")
    assert row["name"] == summary["name"] == "made"
    assert summary["state"] in {"open", "gone"}, "it is watched for ten seconds"
    points = run.get("/points?sort=step")
    assert [each["name"] for each in points["rows"] if not each["orphan_why"]] == run.made.points
    assert summary["point"]["name"] == run.point == run.get(f"/points/{run.point}")["point"]["name"]
    goodput = run.get("/goodput")
    assert sum(goodput["parts"].values()) == pytest.approx(goodput["wall_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/nothing", 404, "page.unknown_address"),
        ("/api/runs/none", 404, "run.unknown"),
        ("/api/runs/none/points", 404, "run.unknown"),
        ("/api/runs/made/points/00000007-a0001-g0001", 404, "point.unknown"),
        ("/api/runs/made/points/..%00", 404, "point.unknown"),
        ("/api/runs/made/events/a0001:99999", 404, "journal.unknown_event"),
        ("/api/runs/made/events/x", 404, "journal.unknown_event"),
        ("/api/runs/made/actions/0123", 404, "page.unknown_action"),
        ("/api/runs/made/series?px=1", 422, "page.invalid_request"),
        ("/api/runs/made/series?from=nan", 422, "page.invalid_request"),
        ("/api/runs/made/points?limit=501", 422, "page.invalid_request"),
        ("/api/runs/made/points?offset=-1", 422, "page.invalid_request"),
        ("/api/runs/made/points?sort=name", 422, "page.invalid_request"),
        ("/api/runs/made/plan?point=00000007-a0001-g0001", 422, "point.unknown"),
    ],
)
def test_what_cannot_be_answered_says_why(run: Served, path: str, status: int, code: str) -> None:
    answer = run.client.get(path)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["text"]


def test_an_error_of_a_command_has_the_same_code_and_text_on_the_page(run: Served) -> None:
    with pytest.raises(ConfigError) as refused:
        orchestrator.open(run.storage / "made").plan(["pack.seq_len=12.5"])
    answer = run.client.get("/api/runs/made/plan?seq_len=12.5")
    assert answer.status_code == 422
    assert answer.json()["error"] == {"code": refused.value.code, "text": str(refused.value)}


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "%2e%2e",
        "..%2f..%2fetc",
        "%2fetc",
        "made%2f..%2f..%2foutside",
        "..%5coutside",
        "outside-link",
        "made%00",
        "%2e%2e%2foutside",
        "a" * 300,
        SCRIPT,
    ],
)
def test_no_name_leads_out_of_the_storage_folder(tmp_path: Path, name: str) -> None:
    inside, outside = tmp_path / "storage", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "run.json").write_text("{}")
    (inside / "outside-link").symlink_to(outside)
    (inside / "run.json.d").mkdir()
    answer = client(inside).get(f"/api/runs/{name}/points")
    assert answer.status_code in {401, 404, 422}, answer.text
    assert client(inside).get("/api/runs").json()["runs"] == []


def test_one_runs_own_folder_shows_that_run_alone(run: Served, tmp_path: Path) -> None:
    (shown,) = client(run.storage / "made").get("/api/runs").json()["runs"]
    assert shown["name"] == "made"
    shutil.copytree(run.storage / "made", tmp_path / "made")
    shutil.copytree(run.storage / "made", tmp_path / "other")
    alone = client(tmp_path / "made")
    assert [each["name"] for each in alone.get("/api/runs").json()["runs"]] == ["made"]
    assert alone.get("/api/runs/other").status_code == 404


def test_an_empty_storage_has_no_runs_and_one_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    asking = client(tmp_path)
    assert asking.get("/api/runs").json()["runs"] == []
    gone = client(tmp_path / "gone").get("/api/runs")
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "storage.not_found")
    with raises(StorageError, "storage.not_found", tmp_path / "gone"):
        Runs(Storage(str(tmp_path / "gone"))).names()


def test_a_run_that_was_deleted_and_begun_anew_is_another_run(tmp_path: Path) -> None:
    run = served(tmp_path)
    assert run.get("")["progress"]["step"] > 0
    shutil.rmtree(tmp_path / "made")
    assert run.client.get("/api/runs/made").status_code == 404
    again = served(tmp_path, seed=9)
    assert run.get("/points?sort=step")["rows"][-1]["name"] in again.made.points


def test_a_journal_of_a_later_version_is_answered_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    run = served(tmp_path)
    segment = tmp_path / "made" / "journal" / "a0001" / "000001.jsonl"
    lines = segment.read_bytes().split(b"\n")
    lines[3] = b'{"format":4}'
    os.chmod(segment, 0o644)
    segment.write_bytes(b"\n".join(lines))
    answer = run.client.get("/api/runs/made/points")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "storage.later_format")
    assert error["file"].endswith("a0001/000001.jsonl")
    assert error["points"] == sorted(error["points"])
    assert error["do"].startswith("Use the version")
    assert "line 4 has format 4, this version reads 1, 2, 3" in error["reason"]
    assert "restore" not in error["text"]
    (listed,) = run.client.get("/api/runs").json()["runs"]
    assert listed["state"] == "unreadable"


def test_a_damaged_line_of_the_journal_is_named_and_all_else_is_shown(tmp_path: Path) -> None:
    run = served(tmp_path)
    before = run.get("/points")["rows"]
    segment = tmp_path / "made" / "journal" / "a0001" / "000001.jsonl"
    lines = segment.read_bytes().split(b"\n")
    lines[3] = b"not what was written"
    os.chmod(segment, 0o644)
    segment.write_bytes(b"\n".join(lines))
    again = replace(run, client=client(tmp_path))
    assert [row["name"] for row in again.get("/points")["rows"]] == [row["name"] for row in before]
    assert again.get("")["missing"] == ["journal/a0001/000001.jsonl line 4"]


def test_no_route_shows_a_secret_whatever_says_it(tmp_path: Path) -> None:
    run = served(tmp_path)
    said = f"https://user:{SECRET}@host/x?token={SECRET} password={SECRET} hf_{SECRET}{SECRET}"
    make_hostile(run.made, said)
    for path in [*run.routes(), "/api/runs"]:
        answer = run.client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert SECRET not in answer.text, path
        assert "12345678" not in answer.text, path
    for row in run.get("/events?limit=500")["rows"]:
        event = run.get(f"/events/{row['id']}")
        assert SECRET not in text_of(event), row
    planned = run.client.post("/api/runs/made/actions/verify/plan", json={"point": run.point})
    assert SECRET not in planned.text


def test_hostile_text_stays_text_in_json(tmp_path: Path) -> None:
    run = served(tmp_path)
    make_hostile(run.made, SCRIPT)
    found = [path for path in run.routes() if SCRIPT in text_of(run.client.get(path).json())]
    assert len(found) >= 4, found
    for path in run.routes():
        answer = run.client.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "text",
    [
        "https://user:word@host/x",
        "api_key=abcdefgh",
        "PASSWORD: abcdefgh",
        "my_credentials=abcdefgh",
        "Authorization: Bearer abcdefgh",
        "hf_abcdefghijklmnopqrst",
        "github_pat_abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrst",
        "sk-abcdefghijklmnopqrst",
        "xoxb-abcdefghijkl",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJabcdefghijkl.abcdefghijkl.abc",
    ],
)
def test_what_is_looked_at_more_closely_is_all_that_would_be_hidden(text: str) -> None:
    assert redacted_text(text) != text
    assert without_secrets({"text": [text]}) == {"text": [redacted_text(text)]}
    assert without_secrets({"hub_token": "x", "token": 5, "cursor": {"token": 5, "prefix_digest": ""}}) == {
        "hub_token": "***",
        "token": "***",
        "cursor": {"token": 5, "prefix_digest": ""},
    }


def test_the_planners_command_is_the_one_that_was_noted_with_what_differs_now(tmp_path: Path) -> None:
    run = served(tmp_path)
    made, store = run.made, run.made.store
    assert run.get("/plan")["command"] == "orchestrator train CONFIG run.name=made"
    newest = max(store.claim_numbers())
    flat, point = made.config.flat(), parse_point_name(made.points[-1])
    commanded = "orchestrator train configs/small.yaml run.name=made train.global_batch_size=16"
    other = {**flat, "train.global_batch_size": 16, "resume.every_steps": 3}
    then = {**other, "resume.every_steps": 7}
    for why, command, config in ((RESUME, commanded, other), (REWIND, "", then)):
        newest += 1
        store.claim(newest, f"launch-{newest}", why, "host", made.run.id)
        store.write_parent(ClaimParent(attempt=newest, parent=point, inherited=tuple(made.points)))
        journal = JournalWriter(store.storage, newest, run_id=made.run.id, now=lambda: datetime.now(UTC))
        note(journal, EventKind.ATTEMPT, launch="l", why=why, config=config, command=command, host="host")
        journal.close()
    kept = "orchestrator train configs/small.yaml run.name=made"
    answers = [client(tmp_path).get(f"/api/runs/made/plan{q}").json() for q in ("", "?global_batch_size=48")]
    assert [answer["command"] for answer in answers] == [
        f"{kept} train.global_batch_size=16 resume.every_steps=7",
        f"{kept} train.global_batch_size=48 resume.every_steps=7",
    ]
