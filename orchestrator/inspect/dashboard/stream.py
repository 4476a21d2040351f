"""A run's events as server-sent events.

Ids are those of the journal (`a0003:17`: attempt and line), so a reader continues after its last one on any
server.

    happening   one entry of the timeline, since the last id
    point       the newest healthy resume point, when it is another
    end         state and reason, when the run has ended
    summary     all of it, at most every two seconds and only when it has changed

The run is read once for all listeners (`Watches`), and the news since the last look are made once. A reader
looks every few seconds while there are listeners, and ends with the last of them. A listener takes the newest
look when it is ready, so a slow or dead one delays no other and costs no memory except the look that it saw
last. Everything runs in one event loop, except for the look itself, which is taken in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread
import orjson
from starlette.responses import StreamingResponse
from starlette.types import Send

from orchestrator.errors import OrchestratorError
from orchestrator.inspect.dashboard.answers import RouteError, problem_of, without_secrets
from orchestrator.inspect.dashboard.runs import OpenRun

EVERY_S = 2.0
_CLOSING_S = 0.25  # how soon a reader notices that the server ends

Look = TypeVar("Look")


class Closing(Protocol):
    """Whether the server is about to end."""

    def is_set(self) -> bool:
        """Returns true from then on."""


class Reader(Generic[Look]):
    """Looks at one run. `count` is the number of looks so far."""

    def __init__(
        self,
        run: OpenRun,
        look: Callable[[OpenRun, Look | None], Look],
        closing: Closing,
        pause: Callable[[], Awaitable[None]],
    ) -> None:
        self.run, self.listeners, self.count, self.is_over = run, 0, 0, False
        self._look, self._closing, self._pause = look, closing, pause
        self._newest: Look | None = None
        self._failure: BaseException | None = None
        self._news = anyio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read(), name=f"looks at {run.name}")

    async def after(self, count: int) -> Look | None:
        """Waits for a look after number `count`, and returns the newest one; None if the server ends. Raises
        the error of a look: the reader is over then.
        """
        while self._newest is None or self.count <= count:
            if self._failure is not None:
                raise self._failure
            if self.is_over:
                return None
            await self._news.wait()
        return self._newest

    def end(self) -> None:
        """Ends the reader: no listener is left."""
        self.is_over = True
        self._task.cancel()

    async def _read(self) -> None:
        try:
            while not self._closing.is_set():
                self._newest = await anyio.to_thread.run_sync(self._look, self.run, self._newest)
                self.count += 1
                self._tell()
                await self._pause()
        except Exception as error:  # noqa: BLE001  each listener raises it
            self._failure = error
        finally:
            self.is_over = True
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class Watches(Generic[Look]):
    """The readers of all runs with listeners. `look` takes a run and the look before it."""

    def __init__(
        self,
        look: Callable[[OpenRun, Look | None], Look],
        closing: Closing,
        every_s: float = EVERY_S,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`pause` waits between two looks: `every_s` seconds, less if the server ends."""
        self.every_s = every_s
        self._look, self._closing, self._pause = look, closing, pause or self._wait
        self._readers: dict[str, Reader[Look]] = {}

    @contextmanager
    def listening(self, run: OpenRun) -> Iterator[Reader[Look]]:
        """The run's reader, which exists for as long as this lasts."""
        reader = self._readers.get(run.name)
        if reader is None or reader.is_over or reader.run is not run:
            reader = self._readers[run.name] = Reader(run, self._look, self._closing, self._pause)
        reader.listeners += 1
        try:
            yield reader
        finally:
            reader.listeners -= 1
            if reader.listeners == 0:
                reader.end()
                if self._readers.get(run.name) is reader:
                    del self._readers[run.name]

    async def _wait(self) -> None:
        left = self.every_s
        while left > 0 and not self._closing.is_set():
            await anyio.sleep(min(left, _CLOSING_S))
            left -= _CLOSING_S


QUIET_S = 15.0  # after this long without an event, a comment shows that the connection is alive
ENDED = ("done", "stopped", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFrame:
    """A run at one moment: the id of the newest line, the summary, and `news`: the events since the look
    before, in the form that is sent.
    """

    last_id: str
    summary: dict[str, Any]
    news: bytes

    @property
    def point(self) -> str | None:
        """The newest healthy point."""
        newest = self.summary.get("point")
        return newest["name"] if newest else None

    @property
    def timeless(self) -> dict[str, Any]:
        """The summary without fields that change although nothing happens."""
        return {name: value for name, value in self.summary.items() if name != "now"}


class EventStream(StreamingResponse):
    """A response that ends its events with the connection, without waiting for garbage collection."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Sends the events."""
        assert isinstance(self.body_iterator, AsyncGenerator), "`events` is one"
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


def look(run: OpenRun, before: StreamFrame | None) -> StreamFrame:
    """Looks at a run. Raises `RouteError` or an `OrchestratorError` if it cannot be read."""
    with run.readable() as views:
        happened = views.happenings_since(before.last_id) if before is not None else ()
        last_id, summary = views.last_id, without_secrets(views.summary(full=True))
    found = StreamFrame(last_id=last_id, summary=summary, news=b"")
    if before is None:
        return found
    return StreamFrame(last_id=last_id, summary=summary, news=_sent(before, found, happened))


async def events(watches: Watches[StreamFrame], run: OpenRun, last_id: str) -> AsyncGenerator[bytes]:
    """The stream for one reader whose last id was `last_id` ("": it has read nothing). Ends with the server,
    and with an `error` event when the run cannot be read any more: the reader asks again.
    """
    yield b"retry: 1000\n\n"
    with watches.listening(run) as reader:
        seen: StreamFrame | None = None
        count, quiet_s, is_ahead = 0, 0.0, False
        try:
            while (now := await reader.after(count)) is not None:
                missed, count = reader.count - count - 1, reader.count
                if seen is None and not is_ahead and _place(last_id) > _place(now.last_id):
                    is_ahead = True  # another server has sent more than this look has; the next look has it
                    continue
                if seen is not None and not missed:
                    news = now.news
                else:
                    news = await anyio.to_thread.run_sync(_missed, run, seen, now, last_id)
                if news:
                    yield news
                elif (quiet_s := quiet_s + watches.every_s) >= QUIET_S:
                    yield b": nothing new\n\n"
                if news or quiet_s >= QUIET_S:
                    quiet_s = 0.0
                seen, last_id = now, now.last_id
        except (OrchestratorError, RouteError) as error:
            problem = error.problem if isinstance(error, RouteError) else problem_of(error)
            yield _event("", "error", problem.to_json())


def _missed(run: OpenRun, seen: StreamFrame | None, now: StreamFrame, last_id: str) -> bytes:
    """The events for a reader that has received everything up to `last_id`, and has seen an older look, or
    none.

    The events since then are in memory: the run is not read.
    """
    happened: list[Mapping[str, Any]] = []
    if last_id:  # a reader that has read nothing misses nothing
        with run.known() as views:
            happened = [
                row for row in views.happenings_since(last_id) if _place(row["id"]) <= _place(now.last_id)
            ]
    return _sent(seen, now, happened)


def _place(id_: str) -> tuple[int, int]:
    attempt, _, line = id_.removeprefix("a").partition(":")
    return (int(attempt), int(line)) if attempt and line else (0, 0)


def _sent(before: StreamFrame | None, now: StreamFrame, happened: Any) -> bytes:
    """The events since `before`, in the form that is sent."""
    return b"".join(_event(id_, kind, data) for kind, id_, data in _changes(before, now, happened))


def _changes(before: StreamFrame | None, now: StreamFrame, happened: Any) -> list[tuple[str, str, Any]]:
    """(event, id, data) of each change. The summary is last: its id means that all before it was sent."""
    found: list[tuple[str, str, Any]] = [
        ("happening", str(each.get("id", "")), without_secrets(each)) for each in happened
    ]
    if before is not None and now.point != before.point and now.summary.get("point"):
        found.append(("point", "", now.summary["point"]))
    state = now.summary["state"]
    if state in ENDED and before is not None and before.summary["state"] != state:
        found.append(("end", "", {"state": state, "reason": now.summary.get("reason", "")}))
    if before is None or found or now.timeless != before.timeless:
        found.append(("summary", now.last_id, now.summary))
    return found


def _event(id_: str, kind: str, data: Any) -> bytes:
    head = f"id: {id_}\n" if id_ else ""
    return (
        f"{head}event: {kind}\ndata: ".encode()
        + orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
        + b"\n\n"
    )
