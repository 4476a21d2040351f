"""The routes for actions: plan, confirm, and query the result. No other route changes anything."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, get_args

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from orchestrator.inspect.dashboard.action_table import ACTIONS
from orchestrator.inspect.dashboard.actions import Asked, Sight, Tell, is_stale, of_nothing, plan
from orchestrator.inspect.dashboard.answers import (
    UNANSWERABLE,
    Problem,
    RouteError,
    json_response,
    named,
    not_found,
    shown,
    without_secrets,
)
from orchestrator.inspect.dashboard.doing import MOST_STOPS, Doings
from orchestrator.inspect.dashboard.runs import OpenRun, Runs
from orchestrator.inspect.run import Run

POINT = r"^\d{8,12}-a\d{4,8}-g\d{4,8}$"
RunName = Annotated[str, InPath(max_length=200)]
ActionName = Literal["save", "stop", "pin", "unpin", "verify", "rewind", "fork", "export"]
assert set(ACTIONS) == set(get_args(ActionName)), "the schema lists the actions"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AskedBody(_Body):
    """The parameters of an action; see `actions.Asked`."""

    point: Annotated[str, Field(pattern=POINT)] | None = None
    now: bool = False
    why: Annotated[str, Field(max_length=500)] = ""
    new_run: Annotated[str, Field(max_length=100)] | None = None

    def asked(self) -> Asked:
        """As a value."""
        return Asked(point=self.point, now=self.now, why=self.why, new_run=self.new_run)


class ConfirmBody(AskedBody):
    """A confirmed plan: its token, and the basis that its reader saw."""

    token: Annotated[str, Field(max_length=200)]
    basis: dict[str, str | int | None] = {}


def add_actions(app: FastAPI, runs: Runs, clock: Callable[[], float]) -> None:
    """Adds the routes to plan, confirm, and query the result."""
    doings, secret = Doings(), secrets.token_bytes(32)
    # separate threads, so that requests that wait for a storage or a run's lock do not delay them
    of_steering = CapacityLimiter(MOST_STOPS)

    def threads(action: str) -> CapacityLimiter | None:
        return of_steering if is_steering(action) else None

    def make_plan(run: str, action: str, body: AskedBody) -> Response:
        opened, asked = runs.open(run), body.asked()
        found = plan(action, ACTIONS[action], asked, _sight(opened, action, asked), secret, clock())
        return json_response({**without_secrets(found.to_json()), "token": found.token})

    @app.post("/api/runs/{run}/actions/{action}/plan")
    async def planned(run: RunName, action: ActionName, body: AskedBody) -> Response:
        return await run_sync(make_plan, run, action, body, limiter=threads(action))

    def begin(run: str, action: str, body: ConfirmBody) -> Response:
        opened, asked = runs.open(run), body.asked()
        begun = doings.known(body.token)
        if begun is None:
            steers = is_steering(action)  # its plan depends on no data that would have to be read
            sight = Sight(uri=opened.uri, summary={}) if steers else _sight(opened, action, asked)
            if is_stale(action, ACTIONS[action], asked, sight, secret, clock(), body.token):
                raise RouteError(_stale(body.basis, ACTIONS[action].basis(sight)))
            begun = doings.begin(run, action, body.token, partial(_carry_out, opened, action, asked))
        if begun is None:
            raise RouteError(
                Problem(
                    status=409,
                    code="page.many_actions",
                    text=f"too many actions {action!r} are running; wait for one to end",
                )
            )
        return json_response(begun.to_json(), 202)

    @app.post("/api/runs/{run}/actions/{action}", status_code=202)
    async def confirmed(run: RunName, action: ActionName, body: ConfirmBody) -> Response:
        return await run_sync(begin, run, action, body, limiter=threads(action))

    @app.get("/api/runs/{run}/actions/{number}")
    def state(run: RunName, number: Annotated[str, InPath(max_length=40)]) -> Response:
        found = doings.find(runs.open(run).name, number)
        if found is None:
            raise not_found("page.unknown_action", f"there is no action {number}")
        return shown(found.to_json())


def _carry_out(run: OpenRun, action: str, asked: Asked, tell: Tell) -> str:
    try:
        return ACTIONS[action].do(Run(run.uri), asked, tell)
    finally:
        run.look_again()


def is_steering(action: str) -> bool:
    """Whether an action concerns only the active launch, so that the page need not read data for it."""
    return ACTIONS[action].basis is of_nothing


def _sight(run: OpenRun, action: str, asked: Asked) -> Sight:
    if is_steering(action):
        return Sight(uri=run.uri, summary=run.listed.row())
    detail = None
    with run.readable(anew=True) as views:
        if ACTIONS[action].needs_point:
            if asked.point is None:
                raise RouteError(
                    Problem(
                        status=UNANSWERABLE, code="page.no_point", text=f"{action} needs a resume point"
                    )
                )
            with named():
                detail = views.point(asked.point)
        return Sight(uri=run.uri, summary=views.summary(full=False), detail=detail)


def _stale(was: dict[str, Any], now: dict[str, Any]) -> Problem:
    return Problem(
        status=409,
        code="run.changed_since_plan",
        text="the run has changed since this plan, or the plan is too old; nothing was done",
        do="plan it again",
        more={"was": was, "now": now},
    )
