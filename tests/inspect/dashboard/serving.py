"""What the dashboard's tests share: a small run that nobody trained, its server in process, and one that is
hostile in all that it says.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from benchmarks.made_run import MadeRun, note, write_run
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.dashboard.acting import ActionJob
from orchestrator.inspect.dashboard.app import make_app
from orchestrator.storage.files import Storage

TOKEN = "a-token-of-the-tests-0123456789abcdef"  # noqa: S105
HOST = "http://127.0.0.1:8000"
ROUTES = (
    "",
    "/timeline",
    "/timeline?px=800",
    "/series?metrics=loss,tokens_per_s,grad_norm,data_wait_share,save_blocked_s,step_s,lr",
    "/series?axis=time&px=100",
    "/points",
    "/points/{point}",
    "/attempts?routine=1",
    "/sources",
    "/goodput",
    "/cards",
    "/cards/groups",
    "/events?level=fault,change,point,data,routine&limit=500",
    "/events/{event}",
    "/plan",
    "/plan?num_workers=3&global_batch_size=48&point={point}",
)
SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"
SECRET = "CANARYCANARYCANARY42"  # noqa: S105


@dataclass(frozen=True, kw_only=True)
class Served:
    """A storage folder with the run `made` in it, and its server."""

    storage: Path
    made: MadeRun
    client: TestClient

    @property
    def point(self) -> str:
        """The newest on the history."""
        return self.made.points[-1]

    def get(self, route: str, **headers: str) -> Any:
        """What a route of the run answers, as JSON."""
        answer = self.client.get(f"/api/runs/made{route}", headers=headers)
        return answer.json()

    def post(self, route: str, **body: Any) -> Any:
        """The answer to an action's route."""
        return self.client.post(f"/api/runs/made/actions/{route}", json=body)

    def routes(self) -> list[str]:
        """Every route that reads the run."""
        event = self.get("/events?limit=1")["rows"][0]["id"]
        return [f"/api/runs/made{r.format(point=self.point, event=event)}" for r in ROUTES]


def client(storage: Path, **more: Any) -> TestClient:
    """A client with the token."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return TestClient(make_app(Storage(str(storage)), TOKEN, **more), base_url=HOST, headers=headers)


def served(folder: Path, **more: Any) -> Served:
    """A run of 120 steps that vanished, and its server."""
    made = write_run(folder / "made", steps=120, points=12, attempts=6, **more)
    return Served(storage=folder, made=made, client=client(folder))


def make_hostile(made: MadeRun, text: str) -> None:
    """One more attempt, which says `text` wherever somebody may say something."""
    store, number = made.store, max(made.store.claim_numbers()) + 1
    store.claim(number, "hostile", "resume", text, made.run.id)
    journal = JournalWriter(store.storage, number, run_id=made.run.id, now=lambda: datetime.now(UTC))
    model = {"model_type": "llama", "hub_token": SECRET, "name": text, "password": 12345678}
    config = {**made.config.flat(), "model.config": model}
    command = f"orchestrator train {text}"
    note(
        journal, EventKind.ATTEMPT, launch="hostile", why="resume", config=config, command=command, host=text
    )
    note(journal, EventKind.BAD_DOCUMENT, text=f"web.jsonl line 3: {text}", source="web", file=text, why=text)
    note(journal, EventKind.MEMBER_FAILED, member="0" * 16, error="OSError", text=text)
    note(journal, EventKind.FAILURE, step=3, reason=text)
    note(journal, EventKind.SAVE_GIVEN_UP, point=made.points[-1], reason=text)
    note(journal, EventKind.END, outcome="failed", reason=text)
    journal.close()
    store.pin(made.points[-1], text, text, made.run.id)
    store.write_end(number, "failed", text, made.run.id)


def text_of(value: Any) -> str:
    """All that a document says."""
    return json.dumps(value, ensure_ascii=False)


def runs_no_more(found: Any) -> bool:
    """Whether an action has ended."""
    return bool(found.state != "running")


def settled(look: Callable[[], Any], is_it: Callable[[Any], bool] = runs_no_more) -> Any:
    """What is found once it is so: once it runs no more."""
    pause = threading.Event()
    for _ in range(6000):
        found = look()
        if is_it(found):
            return found
        pause.wait(0.01)
    raise AssertionError("it does not come")


def confirmed(asking: TestClient, run: str, name: str, **asked: Any) -> ActionJob:
    """A plan, its confirmation, and what became of it."""
    path = f"/api/runs/{run}/actions"
    planned = asking.post(f"{path}/{name}/plan", json=asked)
    assert planned.status_code == 200, planned.text
    document = planned.json()
    assert document["token"], document
    confirmation = {**asked, "token": document["token"], "basis": document["basis"]}
    begun = asking.post(f"{path}/{name}", json=confirmation)
    assert begun.status_code == 202, begun.text
    return settled(lambda: ActionJob(run=run, **asking.get(f"{path}/{begun.json()['id']}").json()))
