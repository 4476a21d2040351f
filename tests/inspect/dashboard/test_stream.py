"""Server-sent events: a reader hears what it has missed, whichever server it asks, and only what changes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.dashboard import stream
from orchestrator.inspect.dashboard.runs import OpenRun, Runs
from orchestrator.inspect.dashboard.stream import StreamFrame, Watches
from orchestrator.storage.files import Storage
from tests.inspect.dashboard.serving import Served, served


class Heard:
    """A listener, and what it was sent, event by event."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._news = anyio.Event()

    async def listen(self, watches: Watches[StreamFrame], run: OpenRun, last_id: str) -> None:
        """Until the stream ends."""
        async with aclosing(stream.events(watches, run, last_id)) as parts:
            async for part in parts:
                await self.take(part)

    async def take(self, part: bytes) -> None:
        """What was sent just now."""
        self.events += read(part)
        self._news.set()
        self._news = anyio.Event()

    @property
    def happenings(self) -> list[str]:
        """Their ids, in the order in which they came."""
        return [event["id"] for event in self.events if event["event"] == "happening"]

    async def until(self, id_: str) -> None:
        """Until the summary came that says all up to this place was sent."""
        with anyio.fail_after(60):
            while id_ not in [event["id"] for event in self.events if event["event"] == "summary"]:
                await self._news.wait()


def read(sent: bytes) -> list[dict[str, Any]]:
    """The events among what was sent."""
    found = []
    for part in sent.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines())
        if "event" in lines:
            found.append({"id": lines.get("id"), "event": lines["event"], "data": json.loads(lines["data"])})
    return found


def opened(storage: Path) -> OpenRun:
    """The run, of which every look reads anew."""
    clock = iter(range(1000))
    run = Runs(Storage(str(storage))).open("made")
    run.clock = lambda: float(next(clock))
    return run


def heard(storage: Path, last_id: str, looks: list[Callable[[], None]]) -> list[dict[str, Any]]:
    """The events of a new server's stream. Between two of its looks one of `looks` happens; then it ends."""
    closing, one = threading.Event(), Heard()

    async def between() -> None:
        await anyio.wait_all_tasks_blocked()
        if looks:
            looks.pop(0)()
        else:
            closing.set()

    anyio.run(one.listen, Watches(stream.look, closing, 2.0, between), opened(storage), last_id)
    return one.events


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
        segment.write_bytes(b'{"format":9,"kind":"of a later version"}\n')

    events = heard(tmp_path, "", [damage, lambda: None])
    assert kinds(events) == ["summary", "error"]
    assert events[-1]["data"]["error"]["code"] == "storage.later_format"


class Scene:
    """A run that goes on only when it is told to, and the looks at it that a server takes."""

    def __init__(self, folder: Path) -> None:
        run = served(folder)
        self.number, self.said, self.looks = max(run.made.store.claim_numbers()) + 1, 0, 0
        self._journal = another_attempt(run, self.number)
        self.closing, self.run = threading.Event(), opened(folder)
        self.run.views.refresh = self._counted(self.run.views.refresh)  # type: ignore[method-assign]
        self._send, self._paused = anyio.create_memory_object_stream[None](1000)
        self.watches = Watches(stream.look, self.closing, 2.0, self._paused.receive)

    def _counted(self, refresh: Callable[[], bool]) -> Callable[[], bool]:
        def counted() -> bool:
            self.looks += 1
            return refresh()

        return counted

    def happens(self) -> str:
        """Something, and its id."""
        self.said += 1
        self._journal.event(EventKind.FAILURE, step=3, reason=f"number {self.said}")
        self._journal.flush()
        return self.id(self.said)

    def id(self, line: int) -> str:
        """The place of a line of its journal."""
        return f"a{self.number:04d}:{line}"

    def look(self) -> None:
        """The reader takes its next look."""
        self._send.send_nowait(None)

    def end(self) -> None:
        """The server ends."""
        self.closing.set()
        self.look()


@pytest.mark.parametrize("listeners", [1, 30])
def test_many_listeners_cost_the_looks_of_one_and_each_hears_everything_once(
    tmp_path: Path, listeners: int
) -> None:
    async def play() -> None:
        scene, all_of_them = Scene(tmp_path), [Heard() for _ in range(listeners)]
        place = scene.happens()
        async with anyio.create_task_group() as group:
            for one in all_of_them:
                group.start_soon(one.listen, scene.watches, scene.run, place)
            for _ in range(4):
                for one in all_of_them:
                    await one.until(place)
                place = scene.happens()
                scene.look()
            for one in all_of_them:
                await one.until(place)
            scene.end()
        assert scene.looks == 5
        for one in all_of_them:
            assert one.happenings == [scene.id(line) for line in range(2, 6)]
            assert [event["id"] for event in one.events if event["id"]] == [
                scene.id(line) for line in (1, 2, 2, 3, 3, 4, 4, 5, 5)
            ]

    anyio.run(play)


def test_a_listener_that_is_slow_or_late_holds_up_nobody_and_misses_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        scene, quick, slow, late = Scene(tmp_path), Heard(), Heard(), Heard()
        first, goes_on = scene.happens(), anyio.Event()

        async def held(message: Any) -> None:
            await slow.take(message.get("body", b""))
            if slow.events:
                await goes_on.wait()

        async def connected() -> Any:
            await anyio.sleep_forever()

        answer = stream.EventStream(stream.events(scene.watches, scene.run, first))
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        async with anyio.create_task_group() as group:
            group.start_soon(answer, scope, connected, held)
            group.start_soon(quick.listen, scene.watches, scene.run, first)
            await slow.until(first)
            place = first
            for _ in range(3):
                await quick.until(place)
                place = scene.happens()
                scene.look()
            await quick.until(place)
            looks = scene.looks
            group.start_soon(late.listen, scene.watches, scene.run, scene.id(2))
            await late.until(place)
            goes_on.set()
            await slow.until(place)
            assert scene.looks == looks == 4
            scene.end()
        assert quick.happenings == slow.happenings == [scene.id(line) for line in (2, 3, 4)]
        assert late.happenings == [scene.id(line) for line in (3, 4)]

    anyio.run(play)


def test_nobody_looks_at_a_run_any_more_once_the_last_listener_has_gone(tmp_path: Path) -> None:
    async def play() -> None:
        scene, gone, held = Scene(tmp_path), anyio.Event(), anyio.Event()
        place = scene.happens()

        async def hears_of_the_end() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def takes_nothing(message: Any) -> None:
            if message.get("body", b"").startswith(b"id"):
                held.set()
                await anyio.sleep_forever()

        answer = stream.EventStream(stream.events(scene.watches, scene.run, place))
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        async with anyio.create_task_group() as group:
            group.start_soon(answer, scope, hears_of_the_end, takes_nothing)
            await held.wait()
            gone.set()
        scene.look()
        await anyio.wait_all_tasks_blocked()
        assert scene.looks == 1
        assert len(asyncio.all_tasks()) == 1, "only this one"
        again, place = Heard(), scene.happens()
        async with anyio.create_task_group() as group:
            group.start_soon(again.listen, scene.watches, scene.run, scene.id(1))
            await again.until(place)
            scene.end()
        assert again.happenings == [place]

    anyio.run(play)


def test_a_place_that_another_server_has_told_is_waited_for_and_not_told_again(tmp_path: Path) -> None:
    async def play() -> None:
        scene, first, ahead = Scene(tmp_path), Heard(), Heard()
        place = scene.happens()
        async with anyio.create_task_group() as group:
            group.start_soon(first.listen, scene.watches, scene.run, place)
            await first.until(place)
            told = [scene.happens(), scene.happens()][0]  # the other server's look was between the two
            group.start_soon(ahead.listen, scene.watches, scene.run, told)
            await anyio.wait_all_tasks_blocked()
            assert ahead.events == []
            scene.look()
            await ahead.until(scene.id(3))
            scene.end()
        assert ahead.happenings == [scene.id(3)]

    anyio.run(play)


def test_a_place_that_is_no_id_is_refused(run: Served) -> None:
    answer = run.client.get("/api/runs/made/stream", headers={"Last-Event-ID": "nonsense"})
    assert answer.status_code == 422
