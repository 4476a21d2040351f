"""A wall clock that steps while a journal is written changes neither the order of events nor any duration,
and the step is an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.checkpoint.points.run_file import RUN_FILE
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.claims.claim_files import RESUME, START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_writer import JUMP_S, JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.status.tail import read_tail
from orchestrator.inspect.views.facts.columns import read_columns
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.json_form import seal
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, start
from tests.inspect.views.written import BEGIN, RUN
from tests.storage.crashfs import ModelDisk

DAY_S = 86_400
MOMENTS = st.tuples(
    st.sampled_from(["step", "step", "step", "group", "waiting", "failure"]), st.integers(1, 4000)
)
JUMPS = st.one_of(st.integers(-40 * DAY_S, -2), st.integers(2, 40 * DAY_S))


@dataclass
class Clocks:
    """Of a machine: seconds that pass, and how far its wall clock was moved meanwhile."""

    passed_s: float = 0.0
    moved_s: float = 0.0

    def now(self) -> datetime:
        return BEGIN + timedelta(seconds=self.passed_s + self.moved_s)

    def monotonic(self) -> float:
        return 1000.0 + self.passed_s


@dataclass
class Written:
    """A run whose journal is written moment by moment. `notes_jumps`: by a writer of this version."""

    clocks: Clocks = field(default_factory=Clocks)
    notes_jumps: bool = True
    store: RunStore = field(default_factory=lambda: RunStore(Storage("/run", ModelDisk(), no_sleep)))
    attempt: int = 0
    generation: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.store.storage.create(RUN_FILE, seal(RUN))

    def begin(self) -> None:
        """The next attempt, which continues where the one before ended."""
        parent = key(self.step, self.generation, self.attempt) if self.attempt else None
        self.attempt, self.generation = self.attempt + 1, 1
        self.store.claim(self.attempt, "launch", RESUME if parent else START, "host")
        inherited = (parent.point_name,) if parent else ()
        self.store.write_parent(ClaimParent(attempt=self.attempt, parent=parent, inherited=inherited))
        monotonic = self.clocks.monotonic if self.notes_jumps else None
        self.journal = JournalWriter(
            self.store.storage, self.attempt, "run", now=self.clocks.now, monotonic=monotonic
        )
        self.journal.generation(start(1, parent, self.attempt))

    def write(self, what: str, seconds: int) -> None:
        """Something that took so long."""
        self.clocks.passed_s += seconds
        if what == "step":
            self.step += 1
            done = record(key(self.step, self.generation, self.attempt))
            self.journal.step(replace(done, step_s=seconds, ended=self.clocks.now().timestamp()))
        elif what == "group":
            parent = key(self.step, self.generation, self.attempt)
            self.generation += 1
            self.journal.generation(start(self.generation, parent, self.attempt))
        elif what == "waiting":
            self.journal.event(EventKind.WAITING, needed=2, there=1, reason="one is missing")
        else:
            self.journal.event(EventKind.FAILURE, step=self.step, reason=f"at {self.clocks.passed_s}")

    def end(self) -> None:
        self.journal.event(EventKind.END, outcome="stopped", reason="asked to", by="stop")
        self.journal.close()
        self.store.write_end(self.attempt, "stopped", "asked to")

    def views(self) -> RunViews:
        return RunViews(self.store, lambda: self.clocks.now().timestamp(), lambda: 0.0)


def written(moments: Sequence[tuple[str, int]], jumps: dict[int, int], **more: Any) -> Written:
    """One attempt; before the moments with these numbers the wall clock steps."""
    run = Written(**more)
    run.begin()
    for number, (what, seconds) in enumerate(moments):
        run.clocks.moved_s += jumps.get(number, 0)
        run.write(what, seconds)
    run.end()
    return run


def rows(views: RunViews) -> list[dict[str, Any]]:
    return views.events(limit=500)["rows"]


def without_jumps(views: RunViews) -> list[tuple[Any, ...]]:
    found = [(row["t"], row["kind"], row["text"]) for row in rows(views)]
    return [row for row in found if row[1] != EventKind.CLOCK_JUMPED]


@settings(max_examples=60)
@given(moments=st.lists(MOMENTS, min_size=1, max_size=25), jumps=st.dictionaries(st.integers(0, 24), JUMPS))
def test_steps_of_the_wall_clock_change_no_duration_and_no_order_and_are_events(
    moments: list[tuple[str, int]], jumps: dict[int, int]
) -> None:
    steady, stepped = written(moments, {}), written(moments, jumps)
    then, now = steady.views(), stepped.views()
    assert now.goodput() == then.goodput()
    assert without_jumps(now) == without_jumps(then)
    assert [now.series("time", ["loss"]), now.summary()["speed"]] == [
        then.series("time", ["loss"]),
        then.summary()["speed"],
    ]
    expected = [by for number, by in sorted(jumps.items()) if number < len(moments)]
    columns = read_columns(stepped.store.storage)
    assert [event.fields["by_s"] for event in columns.kinds.get(EventKind.CLOCK_JUMPED, ())] == expected
    assert read_columns(steady.store.storage).kinds.get(EventKind.CLOCK_JUMPED) is None
    for row in rows(now):
        assert row["kind"] != EventKind.CLOCK_JUMPED or row["level"] == "fault"


@settings(max_examples=30)
@given(moments=st.lists(MOMENTS, min_size=1, max_size=12), jumps=st.dictionaries(st.integers(0, 11), JUMPS))
def test_ages_are_those_of_a_clock_that_never_stepped(
    moments: list[tuple[str, int]], jumps: dict[int, int]
) -> None:
    """The reader's clock was set with the writer's."""
    found = []
    for of in ({}, jumps):
        run = written(moments, of)
        run.clocks.passed_s += 100
        summary = run.views().summary()
        found.append(summary["now"] - (summary["last_step"]["t"] or summary["last_sign"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("by_s", [-DAY_S, -3600, 3600])
def test_status_names_the_newest_step_of_the_clock(by_s: int) -> None:
    tail = read_tail(written([("step", 10), ("step", 10)], {1: by_s}).store.storage)
    assert tail.fault is not None
    assert f"{abs(by_s):,}" in tail.fault.text


def test_a_clock_that_drifts_by_less_is_no_step() -> None:
    run = Written()
    run.begin()
    for _ in range(20):
        run.clocks.moved_s -= JUMP_S / 30
        run.write("step", 5)
    run.end()
    assert EventKind.CLOCK_JUMPED not in read_columns(run.store.storage).kinds


def test_an_attempt_on_a_clock_that_is_behind_comes_after_the_one_that_it_continues() -> None:
    found = []
    for behind_s in (0, DAY_S):
        run = written([("step", 10), ("step", 10)], {})
        run.clocks = Clocks(passed_s=run.clocks.passed_s, moved_s=-behind_s)
        run.begin()
        for _ in range(3):
            run.write("step", 10)
        run.end()
        found.append(run)
    then, now = (run.views() for run in found)
    assert now.goodput() == then.goodput()
    assert without_jumps(now) == without_jumps(then)
    (jump,) = [row for row in rows(now) if row["kind"] == EventKind.CLOCK_JUMPED]
    assert (jump["attempt"], now.event(jump["id"])["fields"]["by_s"]) == (2, -DAY_S)


def test_a_journal_of_an_earlier_version_shows_that_the_clock_went_back() -> None:
    moments = [("step", 10)] * 12
    then = written(moments, {}, notes_jumps=False).views().goodput()["parts"]["productive"]
    views = written(moments, {6: -3600}, notes_jumps=False).views()
    assert then - 10 <= views.goodput()["parts"]["productive"] <= then
    (jump,) = [row for row in rows(views) if row["kind"] == EventKind.CLOCK_JUMPED]
    assert views.event(jump["id"])["fields"]["by_s"] == -3600 + 10


def test_steps_whose_lines_a_busy_coordinator_writes_together_keep_their_time() -> None:
    run = Written()
    run.begin()
    run.clocks.passed_s += 5 + 4 * 2  # the group begins after 5 s, and each step takes 2 s
    for _ in range(4):
        run.clocks.passed_s -= 2
        run.write("step", 2)  # at the same time as the others
    run.end()
    parts = run.views().goodput()["parts"]
    of_steps = sum(parts[name] for name in ("productive", "data_wait", "saving"))
    assert (of_steps, parts["starting"]) == (pytest.approx(8.0, abs=0.11), pytest.approx(5.0, abs=0.11))
