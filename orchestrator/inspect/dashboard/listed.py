"""The rows of the page's list of runs, each made from the tail of its journal.

The cost of a row, in time and memory, does not grow with the run: at most `ROW_BYTES` of a journal are read
(for a run without an end also, once, the segments back to where its generation began). A row is read again
only when the run has changed. If a run cannot be read, its row has the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.redaction import redacted_text
from orchestrator.errors import OrchestratorError, text_of
from orchestrator.history.claims.liveness import Busy, Free
from orchestrator.inspect.status.missing import missing_text
from orchestrator.inspect.status.status_reader import read_newest
from orchestrator.inspect.status.tail import Tail
from orchestrator.inspect.status.verdict import (
    GONE,
    NEW,
    OPEN,
    OVER,
    STARTING,
    UNREADABLE,
    WAITING,
    Risk,
    there_text,
)
from orchestrator.inspect.status.view import RunView, at_risk, view_of
from orchestrator.inspect.views.facts.facts import stamp
from orchestrator.inspect.views.facts.life import Life, LifeWatch
from orchestrator.inspect.views.lineage_graph import Fork
from orchestrator.inspect.views.summary import sentence

ROW_BYTES = 1 << 20  # of a journal: some thousand steps
ANEW_S = 60.0  # a row of a run in which nothing changes is read again after so long
SEEN_FOLDERS = ("attempts", "points", "quarantine", "journal", "manifest")

Row = dict[str, Any]


@dataclass(kw_only=True)
class ListedRun:
    """One run's row. Safe to use from threads."""

    name: str
    store: RunStore
    life: LifeWatch
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _seen: Any = None
    _read_at: float = float("-inf")
    _row: Row = field(default_factory=dict)
    _run: RunFile | None = None
    _life: Life = field(default_factory=Life)
    _begun: Row | None = None  # the line of the newest generation

    def row(self) -> Row:
        """The run's row, or the reason why it cannot be read. Never raises."""
        with self._lock:
            try:
                row = self._current()
            except OrchestratorError as error:
                row = self._unreadable(str(error))
            except Exception as error:  # noqa: BLE001  a fault in one run must not hide the others
                row = self._unreadable(f"it cannot be shown: {text_of(error)}")
            return {**row, "now": self.clock()}

    def fork(self) -> Fork | None:
        """The run and point that it is a fork of; None if it is no fork, or that cannot be read."""
        try:
            run = self._run_file()
        except OrchestratorError:
            return None
        if run is None or run.forked_from is None:
            return None
        return Fork(run=self.name, of=run.forked_from.run_id, point=run.forked_from.point)

    def _run_file(self) -> RunFile | None:
        if self._run is None:
            self._run = self.store.read_run()
        return self._run

    def _current(self) -> Row:
        store = self.store
        run, number = self._run_file(), max(store.claim_numbers(), default=0)
        end = store.read_end(number) if number else None
        over = number == 0 or end is not None
        signs = b"" if over else store.signs_of_life(number)
        life = self._life = self.life.look(number, over, signs)
        seen = (life.alive, signs, [store.storage.list(folder) for folder in SEEN_FOLDERS])
        if seen != self._seen or self.monotonic() - self._read_at >= ANEW_S:
            self._row = self._read(run, life)
            self._seen, self._read_at = seen, self.monotonic()
        told = {"last_sign": life.last_sign} if end is None and life.last_sign is not None else {}
        return {**self._row, **told}

    def _read(self, run: RunFile | None, life: Life) -> Row:
        store = self.store
        number = max(store.claim_numbers(), default=0)
        watched = {True: Busy(number=number), False: Free(number=number), None: None}[life.alive]
        facts, tail = read_newest(store, watched, life.limit_s, ROW_BYTES, self._begun)
        self._begun = tail.generation
        view = view_of(store.storage.root, facts, tail, datetime.now(UTC))
        end = store.read_end(number) if number else None
        return {
            "name": run.name if run is not None else self.name,
            "uri": store.storage.root,
            "state": STARTING if view.state == NEW else view.state,
            "reason": redacted_text(_why(view, tail, life)),
            "since": stamp(end.ended) if end is not None else None,
            "created": stamp(run.created) if run is not None else None,
            "missing": list(view.missing),
            "missing_text": sentence(missing_text(view.missing)) if view.missing else "",
            "attempt": view.attempt,
            "generation": tail.generation["generation"] if tail.generation is not None else 0,
            "world_size": view.workers or 0,
            "world_wanted": [view.workers_wanted] * 2 if view.workers_wanted else None,
            "last_sign": stamp(tail.wrote) if tail.wrote is not None else None,
            "alive": view.alive,
            **_progress(view, facts.stop_tokens),
            "risk": _risk(at_risk(facts, tail), tail.steps),
            "point": _point(view),
            "points": {"total": view.num_points},
        }

    def _unreadable(self, why: str) -> Row:
        self._seen = None
        row = unreadable_row(self.name, self.store.storage.root, why, self.clock())
        created = stamp(self._run.created) if self._run is not None else None
        return {**row, "created": created, "alive": self._life.alive}


def unreadable_row(name: str, uri: str, why: str, now: float) -> Row:
    """The row of a run that cannot be read."""
    reason = redacted_text(why)
    error = {"file": None, "line": None, "reason": reason}
    row = {"name": name, "uri": uri, "now": now, "state": UNREADABLE, "reason": reason, "error": error}
    return {**row, "since": None, "created": None}


def _why(view: RunView, tail: Tail, life: Life) -> str:
    """Why the run is in its state."""
    if view.state == NEW:
        return "no attempt has begun"
    if view.state == WAITING and tail.waiting is not None:
        return there_text(tail.waiting["there"], tail.waiting["needed"])
    if view.state in OVER and view.state != GONE:
        return view.reason
    watched = f"no end is written; watched for {life.watched_s:.0f} of {life.limit_s:.0f} s so far"
    return {
        GONE: "no end is written, and nothing has been written since",
        OPEN: watched,
        STARTING: "workers are being started",
    }.get(view.state, "")


def _progress(view: RunView, stop_tokens: int | None) -> Row:
    total, share = view.total_steps, None
    if stop_tokens:
        share = min(1.0, view.consumed_tokens / stop_tokens)
    elif total:
        share = min(1.0, (view.step or 0) / total)
    return {
        "last_step": {
            "t": stamp(view.last_step_at) if view.last_step_at is not None else None,
            "step": view.step or 0,
            "loss": view.loss,
        },
        "progress": {
            "step": view.step or 0,
            "max_step": total,
            "tokens": view.consumed_tokens,
            "samples": view.consumed_samples,
            "share": share,
            "eta_s": view.eta_s,
        },
        "speed": {"tokens_per_s": view.tokens_per_s},
    }


def _risk(risk: Risk | None, steps: Sequence[Row]) -> Row | None:
    """What is at risk. `steps`: the newest that were read, newest first; older ones are assumed to be as
    fast.
    """
    if risk is None:
        return None
    newest = [float(step["step_s"]) for step in steps[: risk.steps]]
    seconds = sum(newest) / len(newest) * risk.steps if newest else 0.0
    return {"tokens": risk.tokens, "steps": risk.steps, "seconds": round(seconds, 1)}


def _point(view: RunView) -> Row | None:
    key = parse_point_name(view.newest_point) if view.newest_point is not None else None
    if key is None:
        return None
    at = stamp(view.newest_point_at) if view.newest_point_at is not None else None
    return {"name": view.newest_point, "step": key.step, "t": at}
