"""What the views say of forks and rewinds: where a fork stands before it trains, and what a rewind by command
sets aside.
"""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.spec import DataSpec
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.views.events import EventFilter
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.launch.branch.fork import take_over_and_end
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.inspect.live_run import LiveRun
from tests.storage.crashfs import ModelDisk


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 1000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return starting.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)


@pytest.fixture
def disk() -> ModelDisk:
    return ModelDisk()


@pytest.fixture
def live(disk: ModelDisk, job: JobConfig, data: DataSpec) -> LiveRun:
    """A run that saved after 3 steps, trained 4 more, and ended."""
    run = LiveRun(disk, job, data)
    run.launch()
    run.save(run.live)
    run.train(run.live, 4)
    run.live.journal.flush()
    run.end()
    return run


@pytest.fixture
def fork(disk: ModelDisk, live: LiveRun, job: JobConfig, data: DataSpec) -> LiveRun:
    """A fork of it, as `orchestrator fork` leaves it."""
    run = LiveRun(disk, job, data, root="/fork", fork_of=live)
    take_over_and_end(run.store, run.run, 0, job.flat(), "me")
    return run


def views_of(run: LiveRun) -> RunViews:
    views = RunViews(run.store)
    views.refresh()
    return views


def texts(views: RunViews) -> list[str]:
    """What happened, oldest first."""
    table = views.timeline()["happenings"]
    return [row[table["columns"].index("text")] for row in table["rows"]]


def test_a_fork_that_has_not_trained_stands_where_the_other_run_stood(live: LiveRun, fork: LiveRun) -> None:
    views, (point,) = views_of(fork), live.on_lineage
    origin = views_of(live).points()["rows"][0]
    (row,) = views.points()["rows"]
    shown = ("consumed_tokens", "consumed_samples", "world_size", "global_batch_size", "seq_len", "state")
    assert [row[name] for name in shown] == [origin[name] for name in shown]
    (claimed,) = [e["t"] for e in views.events(EventFilter(kinds=["attempt"]))["rows"]]
    assert abs(row["t"] - claimed) < 60
    summary = views.summary()
    progress = summary["progress"]
    assert (progress["step"], progress["tokens"]) == (3, origin["consumed_tokens"])
    assert (summary["point"]["t"], summary["risk"]["tokens"]) == (row["t"], 0)
    assert views.point(row["name"])["forked_from"]["point"] == point
    assert texts(views) == [f"Begun as a fork of run at {point}"]
    assert views.events(EventFilter(kinds=["attempt"]))["rows"][0]["text"] == "The run begins as a fork"


def test_a_fork_that_has_trained_keeps_the_facts_of_what_it_began_with(fork: LiveRun) -> None:
    before = views_of(fork).points()["rows"][0]
    fork.launch()
    fork.train(fork.live, 2)
    fork.live.journal.flush()
    views = views_of(fork)
    (after,) = views.points()["rows"]
    assert after["checked"] == "sizes", "the launch compared sizes; its workers verify what they load"
    since = ("held", "checked", "checked_at")
    assert {**after, **{name: before[name] for name in since}} == before
    summary = views.summary()
    assert (summary["risk"]["steps"], summary["risk"]["tokens"]) == (2, 2 * 256)
    assert texts(views)[1:] == ["Started with 2 workers"]


def test_lineage_shows_of_what_a_run_is_a_fork_and_which_runs_are_forks_of_it(
    live: LiveRun, fork: LiveRun
) -> None:
    views, (point,) = views_of(fork), live.on_lineage
    (row,) = views.attempts()["rows"]
    assert row["forked_from"] == {
        "run": "run", "uri": live.store.storage.root, "run_id": live.run.id, "point": point
    }  # fmt: skip
    made = views.forked_from()
    assert made is not None
    (row,) = views_of(live).attempts(forks=[made])["rows"]
    assert row["forks"] == [{"run": "fork", "point": point, "step": 3, "is_here": True, "path": None}]
    (row,) = views_of(fork).attempts(forks=[made])["rows"]
    assert (row["forks"], views_of(live).forked_from()) == ([], None)


def test_a_fork_that_lies_elsewhere_is_known_by_the_pin_that_it_made(live: LiveRun) -> None:
    (point,) = live.on_lineage
    for reason, known in (
        ("parent of fork /other/token=abcdefgh/fork", True),
        ("parent of fork /storage/.replay-run-x1y2", False),
        ("before the change of /other/fork", False),
    ):
        live.store.unpin(point)
        live.store.pin(point, "me", reason, live.run.id)
        (row,) = views_of(live).attempts()["rows"]
        path = "/other/token=***"
        there = {"run": "fork", "point": point, "step": 3, "is_here": False, "path": path}
        assert row["forks"] == ([there] if known else []), reason


def test_a_fork_is_known_as_one_before_its_first_claim(
    disk: ModelDisk, live: LiveRun, job: JobConfig, data: DataSpec
) -> None:
    begun = LiveRun(disk, job, data, root="/fork", fork_of=live)
    made = views_of(begun).forked_from()
    assert made is not None
    assert (made.run, made.point) == ("fork", live.on_lineage[0])


def test_a_rewind_by_command_is_told_with_what_it_set_aside_before_and_after_the_next_start(
    live: LiveRun,
) -> None:
    live.launch()
    live.save(live.live)
    live.train(live.live, 2)
    live.live.journal.flush()
    live.kill()
    live.rewind(live.on_lineage[0])
    rewound = "Rewound to step 3: 5 steps set aside as an orphan branch"
    views = views_of(live)
    assert texts(views)[-1] == rewound
    live.launch()
    live.live.journal.flush()
    views = views_of(live)
    assert rewound in texts(views)
    assert texts(views)[-1].endswith("no step lost")
    rows = [(r["attempt"], r["first_step"], r["aside_by_fate"]) for r in views.attempts()["rows"]]
    assert rows[-2:] == [(2, 4, {"rewound": 5}), (1, 1, {"lost": 4})]


def test_an_attempt_says_how_much_was_lost_and_how_much_rewound(live: LiveRun) -> None:
    live.launch()
    live.save(live.live)
    live.train(live.live, 2)
    live.live.journal.flush()
    live.kill()
    live.launch()
    live.end()
    live.rewind(live.on_lineage[0])
    rows = {r["attempt"]: r["aside_by_fate"] for r in views_of(live).attempts()["rows"]}
    assert rows[2] == {"lost": 2, "rewound": 3}


def test_a_resume_that_changes_only_what_is_kept_has_the_same_shape(live: LiveRun) -> None:
    kept = live.job.resume.model_copy(update={"keep_latest": 7})
    live.job = live.job.model_copy(update={"resume": kept})
    live.launch()
    live.live.journal.flush()
    live.end()
    batch = live.job.train.model_copy(update={"global_batch_size": 4, "micro_batch_size": 2})
    live.job = live.job.model_copy(update={"train": batch})
    live.launch()
    live.live.journal.flush()
    table = views_of(live).timeline()["happenings"]
    kinds = [row[table["columns"].index("kind")] for row in table["rows"]]
    assert kinds == ["start", "change", "resize"]


def test_events_of_one_instant_stand_in_the_order_of_the_journal(live: LiveRun) -> None:
    live.launch()
    for at in range(20):
        live.live.journal.event(EventKind.LEFTOVER_REMOVED, point=f"{at:08d}-a0001-g0001")
    live.live.journal.flush()
    rows = views_of(live).events(limit=500)["rows"]
    places = [(r["t"], *map(int, r["id"].removeprefix("a").split(":"))) for r in rows]
    assert places == sorted(places, reverse=True)
    assert len({t for t, *_ in places}) < len(places), "some are of one instant"


def test_what_was_read_is_dated_by_a_place_on_the_history(live: LiveRun) -> None:
    live.launch()
    live.save(live.live)
    live.live.journal.flush()
    live.end()
    committed = {row["name"]: row["t"] for row in views_of(live).points()["rows"]}
    first, last = live.on_lineage
    assert views_of(live).sources()["at"] == committed[last]
    live.rewind(first)
    shown = views_of(live).sources()
    assert shown["at"] == committed[first]
    assert shown["counted_at"]["attempt"] is None
    fresh = LiveRun(ModelDisk(), live.job, live.data)
    shown = views_of(fresh).sources()
    assert (shown["at"], shown["counted_at"]) == (None, None)


def test_a_restart_is_left_out_unless_a_branch_leaves_it_or_it_is_one(live: LiveRun) -> None:
    live.launch()
    live.restart()
    live.restart()
    live.save(live.live)
    live.restart()
    live.train(live.live, 2)
    live.kill()
    live.launch()
    views = views_of(live)
    shown, every = views.attempts(), views.attempts(routine=True)
    assert [(row["attempt"], row["why"], row["on_history"]) for row in every["rows"]] == [
        (6, "resume", True),
        (5, "coordinator_restarted", False),
        (4, "coordinator_restarted", True),
        (3, "coordinator_restarted", True),
        (2, "resume", True),
        (1, "start", True),
    ]
    assert [row["attempt"] for row in shown["rows"]] == [6, 5, 4, 2, 1]
    assert (shown["total"], shown["all"]) == (5, 6)
