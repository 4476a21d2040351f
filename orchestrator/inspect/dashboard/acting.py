"""The routes for actions: plan, confirm, and query the result. No other route changes anything."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, get_args

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from orchestrator.errors import OrchestratorError
from orchestrator.inspect.dashboard.actions import (
    ACTIONS,
    ActionParameters,
    Sight,
    Tell,
    WrongFound,
    is_stale,
    of_nothing,
    plan,
)
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
from orchestrator.inspect.dashboard.runs import OpenRun, Runs
from orchestrator.inspect.run import Run

# Executes confirmed actions, each in its own thread, and keeps the results while the server runs.
KEPT = 200  # actions that are remembered
MOST_AT_ONCE = 8  # of one kind: those that wait, a save perhaps for hours, delay no other
MOST_STOPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionJob:
    """One action of one run.

    `state` is running, done or failed. `text` is its message; while it runs, why it takes long ("": not
    known). `code` is that of the error that it failed with. `is_bad`: it was done, and found something wrong.
    """

    id: str
    run: str
    action: str
    state: str = "running"
    text: str = ""
    code: str | None = None
    is_bad: bool = False

    def to_json(self) -> dict[str, Any]:
        """The document."""
        found = {"id": self.id, "action": self.action, "state": self.state, "text": self.text}
        return {**found, "code": self.code, "is_bad": self.is_bad}


class ActionJobs:
    """All actions that this server has begun. Safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, ActionJob] = OrderedDict()
        self._by_token: dict[str, str] = {}

    def known(self, token: str) -> ActionJob | None:
        """The action that was begun with a plan's token. A second confirmation begins nothing."""
        with self._lock:
            return self._by_id.get(self._by_token.get(token, ""))

    def begin(self, run: str, action: str, token: str, do: Callable[[Tell], str]) -> ActionJob | None:
        """Runs `do` in a thread; None if `MOST_AT_ONCE` of this action are running (`MOST_STOPS` of stop).

        `do` is called with a function that reports why it takes long.
        """
        with self._lock:
            if token in self._by_token and (begun := self._by_id.get(self._by_token[token])):
                return begun
            same = [each for each in self._by_id.values() if (each.state, each.action) == ("running", action)]
            if len(same) >= (MOST_STOPS if action == "stop" else MOST_AT_ONCE):
                return None
            begun = ActionJob(id=secrets.token_hex(8), run=run, action=action)
            self._by_id[begun.id], self._by_token[token] = begun, begun.id
            ended = [each.id for each in self._by_id.values() if each.state != "running"]
            for gone in ended[: max(0, len(self._by_id) - KEPT)]:
                del self._by_id[gone]
                self._by_token = {t: i for t, i in self._by_token.items() if i != gone}
        # it may wait long for a run's answer, and the server's end does not wait for it
        threading.Thread(target=self._do, args=(begun, do), name=f"action {action}", daemon=True).start()
        return begun

    def find(self, run: str, number: str) -> ActionJob | None:
        """Returns an action of a run by its number."""
        with self._lock:
            found = self._by_id.get(number)
        return found if found is not None and found.run == run else None

    def _say(self, begun: ActionJob, **fields: Any) -> None:
        with self._lock:
            if begun.id in self._by_id:
                self._by_id[begun.id] = replace(begun, **fields)

    def _do(self, begun: ActionJob, do: Callable[[Tell], str]) -> None:
        code: str | None = "internal.page"
        state, text = "failed", "a bug of the dashboard ended it; its standard error has the traceback"
        try:
            text = do(lambda said: self._say(begun, text=said))
            state, code = "done", None
        except OrchestratorError as error:
            text, code = str(error), error.code
        finally:
            self._say(begun, state=state, text=text, code=code, is_bad=isinstance(text, WrongFound))


POINT = r"^\d{8,12}-a\d{4,8}-g\d{4,8}$"
RunName = Annotated[str, InPath(max_length=200)]
ActionName = Literal["save", "stop", "pin", "unpin", "verify", "rewind", "fork", "export"]
assert set(ACTIONS) == set(get_args(ActionName)), "the schema lists the actions"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ActionBody(_Body):
    """The parameters of an action; see `actions.ActionParameters`."""

    point: Annotated[str, Field(pattern=POINT)] | None = None
    now: bool = False
    why: Annotated[str, Field(max_length=500)] = ""
    new_run: Annotated[str, Field(max_length=100)] | None = None

    def asked(self) -> ActionParameters:
        """As a value."""
        return ActionParameters(point=self.point, now=self.now, why=self.why, new_run=self.new_run)


class ConfirmBody(ActionBody):
    """A confirmed plan: its token, and the basis that its reader saw."""

    token: Annotated[str, Field(max_length=200)]
    basis: dict[str, str | int | None] = {}


def add_actions(app: FastAPI, runs: Runs, clock: Callable[[], float]) -> None:
    """Adds the routes to plan, confirm, and query the result."""
    doings, secret = ActionJobs(), secrets.token_bytes(32)
    # separate threads, so that requests that wait for a storage or a run's lock do not delay them
    of_steering = CapacityLimiter(MOST_STOPS)

    def threads(action: str) -> CapacityLimiter | None:
        return of_steering if is_steering(action) else None

    def make_plan(run: str, action: str, body: ActionBody) -> Response:
        opened, asked = runs.open(run), body.asked()
        found = plan(action, ACTIONS[action], asked, _sight(opened, action, asked), secret, clock())
        return json_response({**without_secrets(found.to_json()), "token": found.token})

    @app.post("/api/runs/{run}/actions/{action}/plan")
    async def planned(run: RunName, action: ActionName, body: ActionBody) -> Response:
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


def _carry_out(run: OpenRun, action: str, asked: ActionParameters, tell: Tell) -> str:
    try:
        return ACTIONS[action].do(Run(run.uri), asked, tell)
    finally:
        run.look_again()


def is_steering(action: str) -> bool:
    """Whether an action concerns only the active launch, so that the page need not read data for it."""
    return ACTIONS[action].basis is of_nothing


def _sight(run: OpenRun, action: str, asked: ActionParameters) -> Sight:
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
