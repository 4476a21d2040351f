"""The routes that read: each calls one view with the request's parameters and returns its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import FastAPI, Header, Query
from fastapi import Path as InPath
from starlette.responses import Response

from orchestrator.inspect.dashboard import stream
from orchestrator.inspect.dashboard.action_table import ACTIONS
from orchestrator.inspect.dashboard.answers import json_response, named, shown
from orchestrator.inspect.dashboard.plans import Planner, WhatIf
from orchestrator.inspect.dashboard.runs import OpenRun, Runs
from orchestrator.inspect.dashboard.watch import Closing, Watches

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
        with runs.open(run).readable() as views:
            return shown(views.events(levels, kinds, attempt, q, start, stop, offset, limit))

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
