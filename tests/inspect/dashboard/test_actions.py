"""Plan, confirm, done: what an action says before, when its plan no longer holds, and what it does."""

from __future__ import annotations

import shlex
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.machine.requests import RequestAnswer
from orchestrator.errors import RefusedError
from orchestrator.history.claims.claim_files import START
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import RequestFiles
from orchestrator.inspect.dashboard.acting import MOST_AT_ONCE, ActionJobs
from orchestrator.inspect.dashboard.actions import (
    ACTIONS,
    EXPIRES_S,
    ActionParameters,
    PlannedAction,
    Sight,
    Tell,
    is_stale,
    plan,
)
from orchestrator.inspect.run import Run
from orchestrator.storage.files import Storage
from tests.inspect.dashboard.serving import Served, confirmed, served, settled
from tests.planning.identities import IDENTITY

SECRET = b"of this server"
POINT = "00000100-a0001-g0001"
SUMMARY = {
    "state": "running",
    "attempt": 2,
    "generation": 3,
    "world_size": 4,
    "point": {"name": POINT, "bytes": 4_200_000_000},
    "risk": {"tokens": 14_300_000, "steps": 109, "seconds": 710.0},
}
ROW = {"name": POINT, "step": 100, "state": "healthy", "consumed_tokens": 25_600, "pinned": True}
ASIDE = {"steps": 9, "tokens": 2304, "seconds": 60.0}
PIN = {"by": "mira", "created": "2026-11-22T18:00:00+00:00", "reason": "a good one", "t": 0.0}
OF_POINT = {"point": POINT, "pin": "by mira, 2026-11-22T18:00:00+00:00"}
DETAIL = {"point": {**ROW, "pin": PIN, "bytes": 4_200_000_000}, "files": [{}, {}], "aside": ASIDE}
SIGHT = Sight(uri="/runs/my run", summary=SUMMARY, detail=DETAIL)


def planned(name: str, asked: ActionParameters, sight: Sight, secret: bytes, now: float) -> PlannedAction:
    return plan(name, ACTIONS[name], asked, sight, secret, now)


def went_stale(
    name: str, asked: ActionParameters, sight: Sight, secret: bytes, now: float, token: str
) -> bool:
    return is_stale(name, ACTIONS[name], asked, sight, secret, now, token)


def token_of(name: str, asked: ActionParameters, sight: Sight = SIGHT, now: float = 1000.0) -> str:
    token = planned(name, asked, sight, SECRET, now).token
    assert token is not None
    return token


@pytest.mark.parametrize("name", ACTIONS)
def test_a_plan_says_what_it_would_do_and_the_command_that_does_the_same(name: str) -> None:
    sight = replace(SIGHT, summary={**SUMMARY, "state": "stopped"}) if name == "rewind" else SIGHT
    found = planned(name, ActionParameters(point=POINT), sight, SECRET, 1000.0)
    assert found.effects
    assert found.title
    assert found.command.startswith(f"orchestrator {name} '/runs/my run'")
    of_run = {"attempt": 2, "generation": 3, "newest_point": POINT, "state": sight.summary["state"]}
    of_point = OF_POINT if name in ("pin", "unpin", "verify") else of_run
    assert found.basis == ({} if name in ("save", "stop") else of_point)
    assert found.token
    assert not found.refusals


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({}, False),
        ({"risk": {"tokens": 0, "steps": 0, "seconds": 0.0}}, False),
        ({"attempt": 3}, True),
        ({"generation": 4}, True),
        ({"state": "waiting"}, True),
        ({"point": None}, True),
        ({"point": {"name": "00000200-a0002-g0003"}}, True),
    ],
)
@pytest.mark.parametrize("name", ["fork", "export"])
def test_a_plan_holds_until_the_run_has_moved_on(name: str, change: dict[str, Any], stale: bool) -> None:
    asked = ActionParameters(point=POINT)
    moved = replace(SIGHT, summary={**SUMMARY, **change})
    assert went_stale(name, asked, moved, SECRET, 1010.0, token_of(name, asked)) is stale


@pytest.mark.parametrize("name", ["save", "stop"])
def test_a_plan_to_save_or_stop_holds_whatever_the_run_does_meanwhile(name: str) -> None:
    token = token_of(name, ActionParameters())
    moved = {"attempt": 3, "generation": 9, "state": "waiting", "risk": None, "world_size": 1}
    newer = {"point": {"name": "00000200-a0003-g0009"}}
    for summary in ({**SUMMARY, **moved, **newer}, {**SUMMARY, "state": "unreadable"}, {}):
        assert not went_stale(
            name, ActionParameters(), replace(SIGHT, summary=summary), SECRET, 1010.0, token
        )
    assert went_stale(name, ActionParameters(), SIGHT, SECRET, 1001.0 + EXPIRES_S, token)


@pytest.mark.parametrize(("alive", "can"), [(True, True), (False, False), (None, False)])
def test_a_run_whose_journal_cannot_be_read_can_be_stopped_while_it_lives(
    alive: bool | None, can: bool
) -> None:
    sight = replace(SIGHT, summary={"state": "unreadable", "alive": alive})
    for name in ("save", "stop"):
        for now in (False, True):
            assert (planned(name, ActionParameters(now=now), sight, SECRET, 0.0).token is not None) == can


@pytest.mark.parametrize("name", ["pin", "unpin", "verify"])
def test_a_plan_about_one_point_holds_until_its_pin_or_the_point_is_another(name: str) -> None:
    asked = ActionParameters(point=POINT)
    token = token_of(name, asked)
    newest = {"name": "00000200-a0002-g0003"}
    run_moved = {**SUMMARY, "attempt": 3, "generation": 4, "state": "stopped", "point": newest}
    assert not went_stale(name, asked, replace(SIGHT, summary=run_moved), SECRET, 1010.0, token)
    for of_point in (
        {"point": {**DETAIL["point"], "pin": None, "pinned": False}},
        {"point": {**DETAIL["point"], "pin": {**PIN, "by": "ann"}}},
        {"files": []},
    ):
        changed = replace(SIGHT, detail={**DETAIL, **of_point})
        assert went_stale(name, asked, changed, SECRET, 1010.0, token), of_point


def test_a_pins_command_has_the_reason_that_was_typed() -> None:
    command = planned("pin", ActionParameters(point=POINT, why="it's good"), SIGHT, SECRET, 0.0).command
    assert shlex.split(command) == ["orchestrator", "pin", "/runs/my run", POINT, "--why", "it's good"]


def test_verifying_says_that_a_mark_is_made_or_lifted() -> None:
    (_, made) = planned("verify", ActionParameters(point=POINT), SIGHT, SECRET, 0.0).effects[-1]
    assert "If a byte is wrong, the point is marked as damaged" in made
    marked = {**DETAIL, "point": {**DETAIL["point"], "quarantined": True, "mark": {"by": "ann"}}}
    of_marked = replace(SIGHT, detail=marked)
    (_, lifted) = planned("verify", ActionParameters(point=POINT), of_marked, SECRET, 0.0).effects[-1]
    assert "the mark is lifted if every byte is right" in lifted


def test_a_plan_does_not_hold_for_anything_else_nor_for_ever() -> None:
    asked = ActionParameters(point=POINT)
    token = token_of("pin", asked)
    assert not went_stale("pin", asked, SIGHT, SECRET, 1000.0 + EXPIRES_S, token)
    assert not went_stale("pin", replace(asked, why="a note"), SIGHT, SECRET, 1000.0, token)
    others = [
        ("unpin", asked, SIGHT, SECRET, 1000.0, token),
        ("pin", ActionParameters(point="00000200-a0001-g0001"), SIGHT, SECRET, 1000.0, token),
        ("pin", asked, replace(SIGHT, uri="/runs/other"), SECRET, 1000.0, token),
        ("pin", asked, SIGHT, b"of another server", 1000.0, token),
        ("pin", asked, SIGHT, SECRET, 1001.0 + EXPIRES_S, token),
        ("pin", asked, SIGHT, SECRET, 999.0, token),
        ("pin", asked, SIGHT, SECRET, 1000.0, token[:-1]),
        ("pin", asked, SIGHT, SECRET, 1000.0, ""),
        ("pin", asked, SIGHT, SECRET, 1000.0, "9" * 5000),
    ]
    for other in others:
        assert went_stale(*other), other
    assert went_stale(
        "stop", ActionParameters(now=True), SIGHT, SECRET, 1000.0, token_of("stop", ActionParameters())
    )


@pytest.mark.parametrize("state", ["starting", "done", "stopped", "failed", "gone", "open"])
def test_nobody_is_asked_who_is_not_alive(state: str) -> None:
    there = replace(SIGHT, summary={**SUMMARY, "state": state})
    for name in ("save", "stop"):
        found = planned(name, ActionParameters(), there, SECRET, 1000.0)
        assert found.refusals
        assert found.token is None
    assert planned("pin", ActionParameters(point=POINT), there, SECRET, 1000.0).token


def test_stopping_at_once_says_what_is_lost() -> None:
    (_, kept), _ = planned("stop", ActionParameters(), SIGHT, SECRET, 0.0).effects
    (_, lost), _ = planned("stop", ActionParameters(now=True), SIGHT, SECRET, 0.0).effects
    assert "Nothing is lost" in kept
    assert "109 steps (14.3 M tokens, 12 min of work) are trained again" in lost
    one = {**SUMMARY, "world_size": 1, "risk": {"tokens": 256, "steps": 1, "seconds": 2.0}}
    (_, lost), (_, free) = planned(
        "stop", ActionParameters(now=True), replace(SIGHT, summary=one), SECRET, 0.0
    ).effects
    assert "1 step (256 tokens, 2.0 s of work) is trained again" in lost
    assert free.startswith("1 worker becomes free.")


def test_of_many_actions_at_once_some_must_wait_and_a_second_confirmation_begins_nothing() -> None:
    doings, over, begun = ActionJobs(), threading.Event(), []

    def do(tell: Tell) -> str:
        del tell
        begun.append(1)
        over.wait(60)
        return "done"

    first = doings.begin("made", "save", "token 0", do)
    assert doings.begin("made", "save", "token 0", do) == first
    others = [doings.begin("made", "save", f"token {n}", do) for n in range(1, MOST_AT_ONCE)]
    assert all(others)
    assert doings.begin("made", "save", "one more", do) is None
    stops = [doings.begin("other", "stop", f"stop {n}", lambda tell: "stopped") for n in range(MOST_AT_ONCE)]
    assert all(stops), "saves that wait are in its way as little as other stops"
    assert doings.begin("other", "pin", "a pin", lambda tell: "pinned") is not None
    over.set()
    assert first is not None
    assert doings.find("other", first.id) is None
    assert settled(lambda: doings.find("made", first.id)).text == "done"
    assert len(begun) == MOST_AT_ONCE


def test_who_waits_for_an_action_sees_why_it_takes_long_until_it_is_done() -> None:
    doings, told, over = ActionJobs(), threading.Event(), threading.Event()

    def do(tell: Tell) -> str:
        tell("the save of p1 was given up")
        told.set()
        over.wait(60)
        return "saved as p2"

    begun = doings.begin("made", "save", "token", do)
    assert begun is not None
    assert told.wait(60)
    seen = doings.find("made", begun.id)
    assert seen is not None
    assert (seen.state, seen.text) == ("running", "the save of p1 was given up")
    over.set()
    found = settled(lambda: doings.find("made", begun.id))
    assert (found.state, found.text) == ("done", "saved as p2")


@pytest.mark.parametrize("name", ["save", "stop"])
def test_a_run_that_is_asked_from_the_page_passes_on_what_it_tells_while_one_waits(
    name: str, tmp_path: Path
) -> None:
    store, doings = RunStore(Storage(str(tmp_path / "made"))), ActionJobs()
    run_id = store.create_run("made", IDENTITY).id
    store.claim(1, "aa", START, "host", run_id)
    journal = JournalWriter(store.storage, 1, run_id=run_id)
    requests = RequestFiles(store.storage, "aa", run_id)
    asks = partial(ACTIONS[name].do, Run(str(tmp_path / "made")), ActionParameters())
    begun = doings.begin("made", name, "token", asks)
    assert begun is not None
    settled(lambda: requests.read(1), lambda asked: asked is not None)
    journal.event(EventKind.SAVE_GIVEN_UP, point="p1", reason="no space", retry_s=5.0)
    journal.flush()
    told = settled(lambda: doings.find("made", begun.id), lambda doing: doing.text)
    assert (told.state, "the save of p1 was given up: no space" in told.text) == ("running", True)
    answer = RequestAnswer(request=1, what=name, outcome="done", text="saved as p2", point="p2")
    journal.event(EventKind.REQUEST_ANSWERED, **answer.fields)
    journal.flush()
    assert settled(lambda: doings.find("made", begun.id)).text == "saved as p2"


def test_what_refuses_or_breaks_is_said_and_ends_the_action() -> None:
    doings = ActionJobs()

    def refuse(tell: Tell) -> str:
        del tell
        raise RefusedError("no launch answers", code="run.not_running")

    begun = doings.begin("made", "save", "token", refuse)
    assert begun is not None
    found = settled(lambda: doings.find("made", begun.id))
    assert (found.state, found.code, found.text) == ("failed", "run.not_running", "no launch answers")


def test_a_rewind_waits_for_nobody_at_work_and_names_what_is_set_aside() -> None:
    assert planned("rewind", ActionParameters(point=POINT), SIGHT, SECRET, 0.0).refusals == (
        "a launch works on this run: stop it first, then rewind",
    )
    ended = replace(SIGHT, summary={**SUMMARY, "state": "done"})
    _, (_, aside), _ = planned("rewind", ActionParameters(point=POINT), ended, SECRET, 0.0).effects
    assert "9 steps (2.3 k tokens, 60 s of work) are set aside" in aside


@pytest.mark.parametrize("name", ["../outside", "/etc/x", ".hidden", "a/b", "", "..", "x\n"])
def test_a_fork_lies_beside_its_run_and_nowhere_else(name: str) -> None:
    found = planned("fork", ActionParameters(point=POINT, new_run=name), SIGHT, SECRET, 0.0)
    assert found.token is None
    assert "is no name of a run" in found.refusals[0]
    beside = planned("fork", ActionParameters(point=POINT, new_run="other"), SIGHT, SECRET, 0.0)
    assert "A new run /runs/other begins" in beside.effects[0][1]
    assert planned("fork", ActionParameters(point=POINT), SIGHT, SECRET, 0.0).command.endswith(
        f"'/runs/my run-fork' --at {POINT}"
    )


def test_a_fork_under_a_name_that_is_taken_is_refused_before_it_is_confirmed(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    sight = replace(SIGHT, uri=str(tmp_path / "run"))
    found = planned("fork", ActionParameters(point=POINT, new_run="taken"), sight, SECRET, 0.0)
    assert found.token is None
    assert f"{tmp_path / 'taken'} is there already" in found.refusals[0]
    assert planned("fork", ActionParameters(point=POINT, new_run="free"), sight, SECRET, 0.0).refusals == ()


@pytest.mark.parametrize("name", ["verify", "export"])
def test_training_goes_on_is_said_only_of_a_run_that_trains(name: str) -> None:
    ended = replace(SIGHT, summary={**SUMMARY, "state": "stopped"})
    for sight, goes_on in ((SIGHT, True), (ended, False)):
        effects = planned(name, ActionParameters(point=POINT), sight, SECRET, 0.0).effects
        assert any("Training continues" in text for _, text in effects) == goes_on


@pytest.mark.parametrize("name", ["rewind", "fork", "export"])
def test_nothing_is_made_from_a_damaged_point(name: str) -> None:
    row = {**DETAIL["point"], "state": "damaged", "reason": "model/x is gone"}
    there = Sight(uri="/runs/r", summary={**SUMMARY, "state": "done"}, detail={**DETAIL, "point": row})
    assert "is damaged: model/x is gone" in planned(
        name, ActionParameters(point=POINT), there, SECRET, 0.0
    ).refusals[0]


# ----------------------------------------------------------------------------------------- through the routes
def test_a_point_is_pinned_verified_and_unpinned_from_the_page(tmp_path: Path) -> None:
    run = served(tmp_path)
    done = confirmed(run.client, "made", "pin", point=run.point, why="a good one")
    assert (done.state, run.made.store.pins()[run.point].reason) == ("done", "a good one")
    assert run.point in done.text
    assert (
        confirmed(run.client, "made", "verify", point=run.point).text
        == f"{run.point}: every digest is right."
    )
    assert confirmed(run.client, "made", "unpin", point=run.point).state == "done"
    assert run.made.store.pins() == {}
    assert confirmed(run.client, "made", "verify", point=run.made.points[0]).state == "done"


def test_a_damaged_file_is_named_by_verify(tmp_path: Path) -> None:
    run = served(tmp_path)
    file = next((tmp_path / "made" / "points" / run.point / "state").iterdir())
    file.chmod(0o644)
    file.write_bytes(b"x" * file.stat().st_size)
    done = confirmed(run.client, "made", "verify", point=run.point)
    assert done.state == "done"
    assert done.is_bad
    assert f"{run.point} is damaged: state/{file.name}" in done.text


def test_a_plan_is_stale_when_the_run_has_moved_on_and_then_nothing_is_done(tmp_path: Path) -> None:
    run = served(tmp_path)
    planned = run.post("fork/plan", point=run.point).json()
    number = max(run.made.store.claim_numbers())
    run.made.store.write_end(number, "stopped", "asked to", run.made.run.id)
    answer = run.post("fork", point=run.point, token=planned["token"], basis=planned["basis"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "run.changed_since_plan")
    assert error["was"] == planned["basis"]
    assert error["now"]["state"] == "stopped"
    assert run.made.store.pins() == {}
    assert not (tmp_path / "made-fork").exists()


def test_a_pin_planned_before_the_run_moved_on_is_made_and_one_that_somebody_made_since_is_told(
    tmp_path: Path,
) -> None:
    run = served(tmp_path)
    held, overtaken = (run.post("pin/plan", point=point).json() for point in run.made.points[-2:])
    run.made.resume(20)  # another attempt, and a newer point
    run.made.store.pin(overtaken["point"], "ann", "", run.made.run.id)
    begun = run.post("pin", point=held["point"], token=held["token"], basis=held["basis"])
    assert begun.status_code == 202, begun.text
    answer = run.post("pin", point=overtaken["point"], token=overtaken["token"], basis=overtaken["basis"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["was"]["pin"]) == (409, "run.changed_since_plan", None)
    assert error["now"]["pin"].startswith("by ann, ")


@pytest.mark.parametrize(
    ("route", "body", "status", "code"),
    [
        ("resize/plan", {}, 422, "page.invalid_request"),
        ("pin/plan", {}, 422, "page.no_point"),
        ("pin/plan", {"point": "../../etc"}, 422, "page.invalid_request"),
        ("pin/plan", {"point": "00000007-a0001-g0001"}, 404, "point.unknown"),
        ("pin/plan", {"force": True}, 422, "page.invalid_request"),
        ("pin", {"point": POINT}, 422, "page.invalid_request"),
        ("stop/plan", {"now": "yes"}, 422, "page.invalid_request"),
        ("save", {"token": "x", "basis": {}}, 409, "run.changed_since_plan"),
    ],
)
def test_what_is_asked_for_wrongly_is_refused(
    run: Served, route: str, body: dict[str, Any], status: int, code: str
) -> None:
    answer = run.post(route, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


def test_a_dead_run_refuses_to_save_and_has_no_token(run: Served) -> None:
    found = run.post("save/plan").json()
    assert found["token"] is None
    assert found["refusals"]
