"""What happens to a run, as server-sent events. Ids are those of the journal (`a0003:17`: attempt and line),
so a reader goes on after its last one whichever server it asks.

    happening   one entry of the timeline, since the last id
    point       the newest healthy resume point, when it is another
    end         state and reason, when the run has ended
    summary     all of it, at most every two seconds and only when it has changed
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.to_thread
import orjson

from orchestrator.errors import OrchestratorError
from orchestrator.monitor.dashboard.answers import RouteError, problem_of, without_secrets
from orchestrator.monitor.dashboard.runs import OpenRun

EVERY_S = 2.0
QUIET_S = 15.0  # after so long without an event a comment shows that the connection stands
ENDED = ("done", "stopped", "failed")


class Closing(Protocol):
    """Whether the server is about to end."""

    def is_set(self) -> bool:
        """True from then on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """A run at one moment: the id of the newest line, what happened since another, the summary."""

    last_id: str
    happened: tuple[Mapping[str, Any], ...]
    summary: dict[str, Any]

    @property
    def point(self) -> str | None:
        newest = self.summary.get("point")
        return newest["name"] if newest else None

    @property
    def timeless(self) -> dict[str, Any]:
        """Without what changes although nothing happens."""
        return {name: value for name, value in self.summary.items() if name != "now"}


async def events(
    run: OpenRun, last_id: str, closing: Closing, sleep: Callable[[float], Any] = anyio.sleep
) -> AsyncIterator[bytes]:
    """The stream for one reader whose last id was `last_id` ("": it has read nothing). Ends with the server,
    and with an `error` event when the run cannot be read any more: the reader asks again.
    """
    before: _Look | None = None
    quiet_s = 0.0
    yield b"retry: 1000\n\n"
    while not closing.is_set():
        try:
            look = await anyio.to_thread.run_sync(_look, run, before.last_id if before else last_id)
        except (OrchestratorError, RouteError) as error:
            problem = error.problem if isinstance(error, RouteError) else problem_of(error)
            yield _event("", "error", problem.to_json())
            return
        found = list(_changes(before, look))
        for kind, id_, data in found:
            yield _event(id_, kind, data)
        if before is not None and not found and (quiet_s := quiet_s + EVERY_S) >= QUIET_S:
            yield b": nothing new\n\n"
        if found or quiet_s >= QUIET_S:
            quiet_s = 0.0
        before = look
        await sleep(EVERY_S)


def _look(run: OpenRun, last_id: str) -> _Look:
    with run.readable() as views:
        happened = tuple(views.happenings_since(last_id)) if last_id else ()
        return _Look(
            last_id=views.last_id, happened=happened, summary=without_secrets(views.summary(full=True))
        )


def _changes(before: _Look | None, look: _Look) -> list[tuple[str, str, Any]]:
    """(event, id, data) of what is new. The summary comes last: its id says that all before it was sent."""
    found: list[tuple[str, str, Any]] = [
        ("happening", str(each.get("id", "")), without_secrets(each)) for each in look.happened
    ]
    if before is not None and look.point != before.point and look.summary.get("point"):
        found.append(("point", "", look.summary["point"]))
    state = look.summary["state"]
    if state in ENDED and before is not None and before.summary["state"] != state:
        found.append(("end", "", {"state": state, "reason": look.summary.get("reason", "")}))
    if before is None or found or look.timeless != before.timeless:
        found.append(("summary", look.last_id, look.summary))
    return found


def _event(id_: str, kind: str, data: Any) -> bytes:
    head = f"id: {id_}\n" if id_ else ""
    return (
        f"{head}event: {kind}\ndata: ".encode()
        + orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)
        + b"\n\n"
    )
