"""The dashboard as an ASGI application over one storage folder (the page's files, its API, and the guard),
and its server.

Requests are not logged: nothing that a browser sends is written anywhere.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from types import FrameType
from typing import Annotated, Literal

import uvicorn
from fastapi import FastAPI, Header, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from orchestrator.data.common.user_code import reading_only
from orchestrator.errors import OrchestratorError, RefusedError
from orchestrator.inspect.dashboard import stream
from orchestrator.inspect.dashboard.acting import add_actions
from orchestrator.inspect.dashboard.actions import ACTIONS
from orchestrator.inspect.dashboard.answers import (
    UNANSWERABLE,
    Problem,
    RouteError,
    error_response,
    json_response,
    named,
    not_found,
    problem_of,
    shown,
)
from orchestrator.inspect.dashboard.auth import AccessRules, Guard, new_token
from orchestrator.inspect.dashboard.plans import Planner, WhatIf
from orchestrator.inspect.dashboard.runs import OpenRun, Runs
from orchestrator.inspect.dashboard.stream import EVERY_S, Closing, Watches
from orchestrator.inspect.views.events import EventFilter
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage

MOST = 10**12
RunName = Annotated[str, InPath(max_length=200)]
PointName = Annotated[str, InPath(max_length=60)]
Offset = Annotated[int, Query(ge=0, le=MOST)]
Limit = Annotated[int, Query(ge=1, le=500)]
Words = Annotated[str, Query(max_length=200)]
Typed = Annotated[str, Query(max_length=40)]


def add_views(app: FastAPI, runs: Runs, clock: Callable[[], float]) -> None:
    """Adds the routes of a run's summary, timeline, charts and resume points."""

    @app.get("/api/runs")
    def all_runs() -> Response:
        document = {"now": clock(), "storage": str(runs.root), "runs": runs.rows(), "actions": list(ACTIONS)}
        return shown(document)

    @app.get("/api/runs/{run}")
    def summary(run: RunName) -> Response:
        with runs.open(run).readable() as views:
            return shown(views.summary(full=True))

    @app.get("/api/runs/{run}/timeline")
    def timeline(run: RunName, px: Annotated[int | None, Query(ge=40, le=8000)] = None) -> Response:
        with runs.open(run).readable() as views:
            return shown(views.timeline(px))

    @app.get("/api/runs/{run}/series")
    def series(
        run: RunName,
        axis: Literal["tokens", "time"] = "tokens",
        metrics: Words = "loss",
        start: Annotated[float | None, Query(alias="from", allow_inf_nan=False, ge=0, le=1e18)] = None,
        stop: Annotated[float | None, Query(alias="to", allow_inf_nan=False, ge=0, le=1e18)] = None,
        px: Annotated[int, Query(ge=40, le=4000)] = 800,
    ) -> Response:
        names = [name for name in metrics.split(",") if name]
        with runs.open(run).readable() as views:
            return json_response(views.series(axis, names, start, stop, px))

    @app.get("/api/runs/{run}/points")
    def points(
        run: RunName,
        state: Literal["all", "healthy", "pinned", "damaged", "orphan"] = "all",
        sort: Annotated[str, Query(pattern="^-?(step|t|tokens|bytes|save_s|save_blocked_s)$")] = "-step",
        q: Words = "",
        offset: Offset = 0,
        limit: Limit = 100,
    ) -> Response:
        with runs.open(run).readable() as views:
            return shown(views.points(state, sort, q, offset, limit))

    @app.get("/api/runs/{run}/points/{point}")
    def point(run: RunName, point: PointName) -> Response:
        with runs.open(run).readable() as views, named():
            return shown(views.point(point))


def add_records(app: FastAPI, runs: Runs) -> None:
    """Adds the routes of a run's records: attempts, sources, cards, goodput, events."""

    @app.get("/api/runs/{run}/attempts")
    def attempts(
        run: RunName, routine: Literal["0", "1"] = "0", offset: Offset = 0, limit: Limit = 200
    ) -> Response:
        forks = runs.forks()  # before this run is locked: no thread holds two of them
        with runs.open(run).readable() as views:
            found = views.attempts(routine == "1", offset, limit, forks)
        for row in found["rows"]:
            if (origin := row["forked_from"]) is not None:
                row["forked_from"] = {**origin, "is_here": runs.is_here(origin["uri"])}
        return shown(found)

    @app.get("/api/runs/{run}/sources")
    def sources(run: RunName) -> Response:
        with runs.open(run).readable() as views:
            return shown(views.sources())

    @app.get("/api/runs/{run}/cards")
    def cards(run: RunName) -> Response:
        with runs.open(run).readable() as views:
            return shown({"cards": views.cards()})

    @app.get("/api/runs/{run}/cards/{card}")
    def card(run: RunName, card: Annotated[str, InPath(max_length=60)]) -> Response:
        with runs.open(run).readable() as views, named():
            return shown(views.card(card))

    @app.get("/api/runs/{run}/goodput")
    def goodput(run: RunName) -> Response:
        with runs.open(run).readable() as views:
            return shown(views.goodput())

    @app.get("/api/runs/{run}/events")
    def events(
        run: RunName,
        level: Words = "",
        kind: Words = "",
        attempt: Annotated[int | None, Query(ge=0, le=MOST)] = None,
        q: Words = "",
        start: Annotated[float | None, Query(alias="from", allow_inf_nan=False, ge=0, le=1e18)] = None,
        stop: Annotated[float | None, Query(alias="to", allow_inf_nan=False, ge=0, le=1e18)] = None,
        offset: Offset = 0,
        limit: Limit = 100,
    ) -> Response:
        levels, kinds = ([each for each in text.split(",") if each] for text in (level, kind))
        which = EventFilter(levels=levels, kinds=kinds, attempt=attempt, text=q, start=start, stop=stop)
        with runs.open(run).readable() as views:
            return shown(views.events(which, offset, limit))

    @app.get("/api/runs/{run}/events/{event}")
    def event(run: RunName, event: Annotated[str, InPath(max_length=60)]) -> Response:
        with runs.open(run).readable() as views, named():
            return shown(views.event(event))


def add_plan(app: FastAPI, runs: Runs) -> None:
    """Adds the route of the planner."""
    planners: dict[str, tuple[OpenRun, Planner]] = {}

    @app.get("/api/runs/{run}/plan")
    def what_if(
        run: RunName,
        point: Annotated[str, Query(max_length=60)] = "",
        num_workers: Typed = "",
        global_batch_size: Typed = "",
        micro_batch_size: Typed = "",
        seq_len: Typed = "",
    ) -> Response:
        opened = runs.open(run)
        if run not in planners or planners[run][0] is not opened:  # another run of that name
            planners[run] = opened, Planner(opened)
        _, planner = planners[run]
        typed = {
            "num_workers": num_workers,
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "seq_len": seq_len,
        }
        values = {name: text.strip() for name, text in typed.items() if text.strip()}
        return shown(planner.document(WhatIf(point=point or None, values=values)))


def add_stream(app: FastAPI, runs: Runs, closing: Closing, every_s: float) -> None:
    """Adds the route of server-sent events. A run is read every `every_s` seconds."""
    watches = Watches(stream.look, closing, every_s)

    @app.get("/api/runs/{run}/stream", response_class=stream.EventStream)
    def live(
        run: RunName, last_event_id: Annotated[str, Header(max_length=60, pattern=r"^(a\d+:\d+)?$")] = ""
    ) -> Response:
        opened = runs.open(run)
        return stream.EventStream(
            stream.events(watches, opened, last_event_id), headers={"X-Accel-Buffering": "no"}
        )


# ------------------------------------------------------------------------------------------- the page's files
# They are read once. A browser gets them without a token. No request's path reaches a disk.
_SHOWN = (".html", ".js", ".css", ".txt")
_YEAR = "public, max-age=31536000, immutable"  # a vendored file's name has its version


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFile:
    """One file, plain and compressed; `tag` changes with its content."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str
    cache: str


def page_files() -> Mapping[str, PageFile]:
    """All files of the page by the path under which they are served."""
    root = resources.files("orchestrator.inspect.dashboard") / "page"
    found = {f"/{name}": _read(name, file) for name, file in _walk(root, "")}
    return {**found, "/": found["/index.html"]}


def page_response(file: PageFile, headers: Headers) -> Response:
    """Answers with a file, or with the message that the browser's copy is current."""
    fixed = {"ETag": file.tag, "Cache-Control": file.cache, "Vary": "Accept-Encoding"}
    if file.tag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=fixed)
    if "gzip" in headers.get("accept-encoding", ""):
        fixed["Content-Encoding"] = "gzip"
        return Response(file.packed, media_type=file.kind, headers=fixed)
    return Response(file.plain, media_type=file.kind, headers=fixed)


def _walk(folder: Traversable, before: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _walk(entry, f"{before}{entry.name}/")
        elif entry.name.endswith(_SHOWN):
            found.append((before + entry.name, entry))
    return found


def _read(name: str, file: Traversable) -> PageFile:
    plain = file.read_bytes()
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return PageFile(
        kind="text/javascript" if name.endswith(".js") else kind,
        plain=plain,
        packed=gzip.compress(plain, 9, mtime=0),
        tag=f'"{hashlib.sha256(plain).hexdigest()[:16]}"',
        cache=_YEAR if name.startswith("vendor/") else "no-cache",
    )


# -------------------------------------------------------------------------------------------- the application
_CODES: dict[int | str, str] = {
    401: "no token, or a wrong one",
    403: "another host or origin",
    404: "nothing of this name",
    409: "stale: the run has moved on",
    413: "the body is too large",
    422: "it cannot be answered as asked",
    503: "the storage cannot be read",
}


def make_app(
    storage: Storage,
    token: str,
    host: str = "127.0.0.1",
    clock: Callable[[], float] = time.time,
    closing: threading.Event | None = None,
    every_s: float = EVERY_S,
) -> ASGIApp:
    """The application.

    `token` opens its API. `host` is the address that it is bound to. `clock` is the page's current time.
    `closing` ends the streams, for which a run is read every `every_s` seconds.
    """
    files = page_files()
    api = _api(Runs(storage, clock), clock, closing or threading.Event(), every_s)

    @api.get("/{path:path}", include_in_schema=False)
    def page(request: Request) -> Response:
        file = files.get(request.url.path)
        if file is None:
            raise not_found("page.unknown_address", "there is no such address")
        return page_response(file, request.headers)

    return Guard(api, AccessRules(token=token, public=frozenset(files), host=host))


def _api(runs: Runs, clock: Callable[[], float], closing: threading.Event, every_s: float) -> FastAPI:
    app = FastAPI(
        title="orchestrator",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        responses={code: {"description": text} for code, text in _CODES.items()},
    )
    app.add_middleware(GZipMiddleware, minimum_size=800, compresslevel=4)
    app.add_exception_handler(RouteError, _route_error)
    app.add_exception_handler(OrchestratorError, _own_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    add_views(app, runs, clock)
    add_records(app, runs)
    add_plan(app, runs)
    add_stream(app, runs, closing, every_s)
    add_actions(app, runs, clock)
    return app


# These are coroutines, because a plain function would need one of the threads for requests.
async def _route_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RouteError), "it is registered for these"
    return error_response(error.problem)


async def _own_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, OrchestratorError), "it is registered for these"
    return error_response(problem_of(error))


async def _invalid(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RequestValidationError), "it is registered for these"
    texts = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()[:10]]
    text = "; ".join(texts)[:2000]
    return error_response(Problem(status=UNANSWERABLE, code="page.invalid_request", text=text))


async def _http_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "it is registered for these"
    code = {404: "page.unknown_address", 405: "page.method"}.get(error.status_code, "page.http")
    return error_response(Problem(status=error.status_code, code=code, text=str(error.detail)))


async def _unexpected(request: Request, error: Exception) -> Response:
    del request
    text = f"the dashboard has a bug: {type(error).__name__}; its standard error has the traceback"
    return error_response(Problem(status=500, code="internal.page", text=text))


# ------------------------------------------------------------------------------------------------- the server
_END_S = 2.0  # how long the end waits for unfinished answers


class _Server(uvicorn.Server):
    """A server that ends its streams before its own end."""

    def __init__(self, config: uvicorn.Config, closing: threading.Event) -> None:
        super().__init__(config)
        self._closing = closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server on a signal."""
        self._closing.set()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """Ends the server from another thread."""
        self._closing.set()
        self.should_exit = True


def serve(
    storage: str,
    host: str,
    port: int,
    announce: Callable[[str], None],
    until_eof: bool = False,
    every_s: float = EVERY_S,
) -> None:
    """Serves `storage` until Ctrl-C or SIGTERM.

    With `until_eof` it also ends when standard input ends, which happens with the process that started this
    one. `announce` gets the link, once the socket listens. A run that a page shows is read every `every_s`
    seconds. Raises `RefusedError` if there is no such folder, or the address cannot be taken, and as
    `open_storage`.
    """
    where = open_storage(storage)
    if where.folder is not None and not where.list("") and not where.folder.is_dir():
        raise RefusedError(
            f"{storage} is no folder; give the storage in which runs lie (run.storage), or one run's folder",
            code="storage.not_found",
        )
    resolved = where if where.folder is None else where.beside(str(where.folder.resolve()))
    listening = _listen(host, port)
    token, closing = new_token(), threading.Event()
    config = uvicorn.Config(
        make_app(resolved, token, host, closing=closing, every_s=every_s),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(_END_S),
    )
    server = _Server(config, closing)
    if until_eof:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    try:
        announce(link(host, listening.getsockname()[1], token))
        with reading_only():
            server.run(sockets=[listening])
    except KeyboardInterrupt:
        return  # that is how it is ended
    finally:
        listening.close()


def link(host: str, port: int, token: str) -> str:
    """The address of the page. The fragment does not leave the browser."""
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # noqa: S104  the user has asked for it
        name = socket.gethostname()
    return f"http://{name}:{port}/#token={token}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise RefusedError(
            f"the dashboard cannot listen on {host} port {port}: {error.strerror or error}; give another "
            "--port (0 chooses a free one) or --host",
            code="page.cannot_listen",
        ) from error


def _end_with_input(server: _Server) -> None:
    while sys.stdin and sys.stdin.buffer.read(1 << 10):
        pass
    server.end()
