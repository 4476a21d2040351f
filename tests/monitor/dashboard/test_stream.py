"""Server-sent events: a reader hears what it has missed, whichever server it asks, and only what changes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio

from orchestrator.history.event_kinds import EventKind
from orchestrator.history.journal import JournalWriter
from orchestrator.monitor.dashboard import stream
from orchestrator.monitor.dashboard.runs import Runs
from tests.monitor.dashboard.serving import Served, served


def heard(storage: Path, last_id: str, looks: list[Callable[[], None]]) -> list[dict[str, Any]]:
    """The events of a new server's stream. Between two of its looks one of `looks` happens; then it ends."""
    closing, found = threading.Event(), list[dict[str, Any]]()
    clock = iter(range(1000))
    run = Runs(storage).open("made")
    run.clock = lambda: float(next(clock))  # every look reads anew

    async def between(seconds: float) -> None:
        del seconds
        if looks:
            looks.pop(0)()
        else:
            closing.set()

    async def read() -> None:
        async for part in stream.events(run, last_id, closing, between):
            lines = dict(line.split(": ", 1) for line in part.decode().strip().splitlines())
            if "event" in lines:
                data = json.loads(lines["data"])
                found.append({"id": lines.get("id"), "event": lines["event"], "data": data})

    anyio.run(read)
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def another_attempt(run: Served, number: int) -> JournalWriter:
    store = run.made.store
    store.claim(number, f"launch-{number}", "resume", "host", run.made.run.id)
    return JournalWriter(store.storage, number, run_id=run.made.run.id, now=lambda: datetime.now(UTC))


def test_a_new_reader_hears_the_whole_summary_with_the_newest_place(run: Served) -> None:
    (first,) = heard(run.storage, "", [])
    assert first["event"] == "summary"
    newest = run.get("/events?limit=1")["rows"][0]["id"]
    assert first["id"].split(":")[0] == newest.split(":")[0]
    assert first["data"]["name"] == "made"


def test_a_reader_that_comes_back_to_another_server_hears_what_it_has_missed(tmp_path: Path) -> None:
    run = served(tmp_path)
    place = heard(tmp_path, "", [])[0]["id"]
    number = max(run.made.store.claim_numbers()) + 1
    journal = another_attempt(run, number)
    journal.event(EventKind.FAILURE, step=3, reason="first")
    journal.event(EventKind.FAILURE, step=3, reason="second")
    journal.close()
    events = heard(tmp_path, place, [])
    assert kinds(events) == ["happening", "happening", "summary"]
    assert [event["id"] for event in events] == [f"a{number:04d}:1", f"a{number:04d}:2", f"a{number:04d}:2"]
    assert "second" in events[1]["data"]["text"].lower()
    assert kinds(heard(tmp_path, f"a{number:04d}:1", [])) == ["happening", "summary"]
    assert kinds(heard(tmp_path, f"a{number:04d}:2", [])) == ["summary"]


def test_an_end_is_told_once_and_nothing_is_sent_while_nothing_happens(tmp_path: Path) -> None:
    run = served(tmp_path)
    number = max(run.made.store.claim_numbers())

    def end() -> None:
        run.made.store.write_end(number, "stopped", "asked to", run.made.run.id)

    events = heard(tmp_path, "", [end, lambda: None, lambda: None])
    assert kinds(events).count("end") == 1
    end_at = kinds(events).index("end")
    assert events[end_at]["data"] == {"state": "stopped", "reason": "asked to"}
    assert events[end_at + 1]["data"]["state"] == "stopped"
    assert kinds(events[end_at + 2 :]) in ([], ["summary"], ["summary", "summary"])


def test_a_run_that_cannot_be_read_any_more_ends_its_stream_with_the_reason(tmp_path: Path) -> None:
    run = served(tmp_path)

    def damage() -> None:
        journal = another_attempt(run, max(run.made.store.claim_numbers()) + 1)
        journal.event(EventKind.FAILURE, step=3, reason="first")
        journal.event(EventKind.FAILURE, step=3, reason="second")
        journal.close()
        (segment,) = (tmp_path / "made" / "journal").glob(f"a{journal._attempt:04d}/*.jsonl")
        segment.chmod(0o644)
        segment.write_bytes(segment.read_bytes().replace(b'{"seq":1', b'{"sex":1'))

    events = heard(tmp_path, "", [damage, lambda: None])
    assert kinds(events) == ["summary", "error"]
    assert events[-1]["data"]["error"]["code"] == "unreadable"


def test_a_place_that_is_no_id_is_refused(run: Served) -> None:
    answer = run.client.get("/api/runs/made/stream", headers={"Last-Event-ID": "nonsense"})
    assert answer.status_code == 422
