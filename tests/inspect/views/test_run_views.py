"""The views of one run: what a reader that follows it shows is what one shows that reads it anew."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.launch_attempts import begin_launch
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.spec import DataSpec
from orchestrator.errors import RefusedError, StorageError
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.run import Run
from orchestrator.inspect.status.integrity import Verifying
from orchestrator.inspect.status.point_rows import PointRow, point_rows
from orchestrator.inspect.status.status_reader import SnapshotReader
from orchestrator.inspect.views import points_table
from orchestrator.inspect.views.events import EventFilter
from orchestrator.inspect.views.goodput import PARTS, apportioned
from orchestrator.inspect.views.incidents import happenings
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.inspect.views.summary import run_snapshot
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, start
from tests.history.histories import MOVES, play
from tests.inspect import live_run
from tests.inspect.live_run import LiveRun
from tests.inspect.views.written import write
from tests.raising import raises
from tests.storage.crashfs import ModelDisk

NOW = 1795400000.0
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "format2" / "example"
MOVE = st.tuples(st.sampled_from(sorted(MOVES)), st.integers(0, 3))
# without attempts that go on beside those that have replaced them, and claims that train nothing
OF_ONE = st.tuples(
    st.sampled_from([name for name in sorted(MOVES) if not name.startswith(("cut-off", "claim"))]),
    st.integers(0, 3),
)
METRICS = (
    "loss",
    "grad_norm",
    "lr",
    "step_s",
    "data_wait_s",
    "save_blocked_s",
    "tokens_per_s",
    "data_wait_share",
)


class Clock:
    """Seconds that go on when they are told to."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 100_000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return starting.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)


@pytest.fixture
def live(job: JobConfig, data: DataSpec) -> LiveRun:
    run = LiveRun(ModelDisk(), job, data)
    run.launch()
    run.save(run.live)
    return run


def views_of(store: RunStore, clock: Callable[[], float] | None = None) -> RunViews:
    views = RunViews(store, lambda: NOW, clock or Clock())
    views.refresh()
    return views


def documents(views: RunViews) -> dict[str, Any]:
    """All that does not depend on for how long the run was watched."""
    summary = views.summary()
    for name in ("alive", "state", "reason", "since", "last_sign", "verdict", "checks", "files"):
        summary.pop(name)
    shown = {
        "summary": summary,
        "timeline": views.timeline(),
        "points": views.points(),
        "attempts": views.attempts(routine=True),
        "sources": views.sources(),
        "goodput": views.goodput(),
        "events": views.events(limit=500),
        "time": views.series("time", METRICS, px=100),
        "tokens": views.series("tokens", METRICS, px=60),
    }
    return json.loads(json.dumps(shown, allow_nan=False))  # type: ignore[no-any-return]


@pytest.mark.quick("0", "5")
@pytest.mark.parametrize("seed", range(6))
def test_who_follows_a_run_shows_what_one_shows_who_reads_it_anew(
    job: JobConfig, data: DataSpec, seed: int
) -> None:
    random = Random(seed)
    run = LiveRun(ModelDisk(), job, data, keep_latest=random.choice([1, 2, 3]))
    run.launch()
    followed = views_of(run.store)
    for _ in range(40):
        run.anything(random)
        if random.random() < 0.5:
            followed.refresh()
            followed.summary()
            if random.random() < 0.15:
                assert documents(followed) == documents(views_of(run.store))
    followed.refresh()
    shown = documents(followed)
    assert shown == documents(views_of(run.store))
    seen = survey(run.store)
    assert shown["summary"]["progress"]["tokens"] == seen.lineage.records[-1].consumed_tokens
    assert shown["tokens"]["steps"] == len(seen.lineage.records)
    healthy = {row["name"] for row in shown["points"]["rows"] if row["state"] == "healthy"}
    assert healthy == set(seen.points)
    assert shown["points"]["counts"]["damaged"] == len(seen.lost)


@pytest.mark.quick("2")
@pytest.mark.parametrize("seed", range(3))
def test_status_and_the_page_know_the_same_of_a_run(job: JobConfig, data: DataSpec, seed: int) -> None:
    """`status` reads the newest part of the journal, the page all of it. They word faults differently. Steps
    that a crash took are shown by `status` until the next attempt has trained.
    """
    random = Random(seed)
    run = LiveRun(ModelDisk(), job, data, keep_latest=random.choice([1, 2, 3]))
    run.launch()
    num_compared = num_evaluations = 0
    for _ in range(40):
        run.anything(random)
        views = views_of(run.store)
        page = run_snapshot(views.facts)
        assert _shared(points_table.table(views.facts)) == _shared(point_rows(run.store, survey(run.store)))
        status = SnapshotReader(store=run.store).read(None, 0.0, page.watch_s)
        assert (status.number, status.point, status.missing) == (page.number, page.point, page.missing)
        assert status.evaluation == page.evaluation
        num_evaluations += page.evaluation is not None
        if page.step is not None and page.step.attempt == page.number:
            if status.point_t is None or page.cursor is None:  # its commit is in no journal
                page = replace(page, point_t=status.point_t, cursor=status.cursor)
            assert replace(page, fault=None) == replace(status, fault=None)
            num_compared += 1
    assert num_compared
    assert num_evaluations


def _shared(rows: Sequence[PointRow]) -> list[PointRow]:
    """Without what only the page reads (earlier findings), or only `points` (manifests and exports), and
    without the time of a point whose commit is in no journal.
    """
    names = {"t": None, "checked": "", "checked_at": None, "num_shards": 0, "num_replicas": 0, "export": None}
    return [replace(row, **names) for row in rows]


@settings(max_examples=100)
@given(st.lists(MOVE, max_size=60), st.integers(0, 99))
def test_the_parts_of_goodput_are_not_negative_and_sum_to_the_wall_time(
    moves: list[tuple[str, int]], seed: int
) -> None:
    views = views_of(write(play([("train", 0), *moves]), seed))
    good = views.goodput()
    for parts in (good["parts"], good["percent"]):
        assert tuple(parts) == PARTS
        assert min(parts.values()) >= 0.0
    assert sum(round(value * 10) for value in good["parts"].values()) == round(good["wall_s"] * 10)
    assert sum(round(value * 100) for value in good["percent"].values()) in (0, 10_000)
    columns = views._facts.columns
    first = min(written.first for written in columns.attempts.values())
    last = max(written.last for written in columns.attempts.values())
    assert good["wall_s"] + good["off_s"] == pytest.approx(max(0.0, last - first), abs=0.5)
    by_day = {part: sum(day["parts"].get(part, 0.0) for day in good["days"]) for part in PARTS}
    for part in PARTS:
        assert by_day[part] == pytest.approx(good["parts"][part], abs=0.11 * (len(good["days"]) + 1))


@settings(max_examples=200)
@given(st.lists(OF_ONE, max_size=60), st.integers(0, 99))
def test_each_step_that_is_made_again_is_lost_once_in_all_that_happened_and_in_every_view(
    moves: list[tuple[str, int]], seed: int
) -> None:
    world = play([("train", 0), *moves])
    history = {state.key for state in world.true_history()}
    made_again = [record for record in world.records if record.key not in history]
    store = write(world, seed)
    views = views_of(store)
    told = happenings(views._facts)
    assert sum(entry["lost_steps"] for entry in told) == len(made_again)
    for entry in told:
        said = f"{entry['lost_steps']} step"
        assert (said in entry["text"]) == bool(entry["lost_steps"]), entry
    segments = views.timeline()["segments"]
    fate, first, last = (segments["columns"].index(name) for name in ("fate", "s0", "s1"))
    assert sum(row[last] - row[first] for row in segments["rows"] if row[fate]) == len(made_again)
    seen = survey(store)
    assert seen.lineage.orphans == len(made_again)
    assert {record.key for record in seen.lineage.records} <= history


@given(st.dictionaries(st.sampled_from(PARTS), st.floats(0, 1e9), min_size=1), st.integers(0, 10**12))
def test_whole_numbers_in_proportion_sum_to_the_whole_and_are_less_than_one_off(
    parts: dict[str, float], whole: int
) -> None:
    found = apportioned(parts, whole)
    total = math.fsum(parts.values())
    assert sum(found.values()) == (whole if total else 0)
    for name, value in parts.items():
        assert abs(found[name] - (value / total * whole if total else 0)) <= 1 + 1e-6 * whole


def test_a_run_that_an_earlier_version_wrote_is_shown() -> None:
    views = views_of(RunStore(Storage(str(EXAMPLE))))
    summary = views.summary()
    assert (summary["state"], summary["verdict"]["text"]) == ("done", "Done at step 10.")
    assert [row["name"] for row in views.points(sort="step")["rows"]] == [
        row["name"] for row in Run(EXAMPLE).list_points()
    ]
    assert [row["why"] for row in views.attempts()["rows"]] == ["rewind", "resume", "start"]
    assert views.event("a0002:20")["text"] == "Done: done at step 8"
    assert views.point("00000010-a0003-g0001")["aside"] == {"steps": 0, "tokens": 0, "seconds": 0.0}


# ------------------------------------------------------------ life
def test_a_run_without_an_end_is_watched_until_it_shows_life_or_none_for_ten_seconds(live: LiveRun) -> None:
    clock = Clock()
    views = views_of(live.store, clock)
    assert views.summary()["state"] == "open"
    live.train(live.live, 1)
    clock.s = 3.0
    assert views.refresh()
    summary = views.summary()
    assert (summary["state"], summary["alive"], summary["last_sign"]) == ("running", True, NOW)
    assert summary["verdict"]["text"].startswith("Running: step 4 of ")
    assert (
        "If everything died now, 1 step (256 tokens, 0.50 s of work) would be trained again"
        in (summary["verdict"]["text"])
    )
    clock.s = 12.9
    assert not views.refresh()
    assert views.summary()["state"] == "running"
    clock.s = 13.0
    assert views.refresh()
    summary = views.summary()
    assert (summary["state"], summary["alive"], summary["verdict"]["level"]) == ("gone", False, "bad")
    live.store.heartbeat(1).beat()
    clock.s = 14.0
    assert views.refresh()
    assert views.summary()["state"] == "running"
    live.end()
    assert views.refresh()
    assert (views.summary()["state"], views.summary()["alive"]) == ("stopped", False)


def test_that_a_run_has_ended_is_no_sign_of_its_life(live: LiveRun) -> None:
    clock = Clock()
    views = views_of(live.store, clock)
    live.end()
    clock.s = 3.0
    assert views.refresh()
    (wrote,) = [row["t1"] for row in views.attempts()["rows"]]
    assert views.summary()["last_sign"] == wrote != NOW


def test_a_run_that_nobody_works_on_is_gone_after_ten_seconds_of_watching(live: LiveRun) -> None:
    clock = Clock()
    views = views_of(live.store, clock)
    clock.s = 9.9
    views.refresh()
    assert views.summary()["state"] == "open"
    clock.s = 10.0
    views.refresh()
    summary = views.summary()
    assert summary["state"] == "gone"
    assert "gave no sign of life" in summary["verdict"]["text"]


def test_while_a_start_follows_a_crash_what_is_trained_again_is_said_as_certain(live: LiveRun) -> None:
    (name,) = live.on_lineage
    live.train(live.live, 4)
    clock = Clock()
    views = views_of(live.store, clock)
    live.kill()
    claim = live.claim()
    again = f"4 steps (1.02 k tokens, 2.0 s of work) after {name} are trained again"
    for change in (lambda: None, lambda: begin_launch(live.store, live.job, claim, live.run, live.data)):
        change()
        clock.s += 1.0
        views.refresh()
        summary = views.summary()
        assert summary["state"] == "starting"
        assert again in summary["verdict"]["text"]
    assert "If everything died now" not in summary["verdict"]["text"]


@pytest.mark.parametrize(
    ("outcome", "by", "off"),
    [("done", "", True), ("stopped", "ann", True), ("stopped", "drain notice", False), ("failed", "", False)],
)
def test_the_time_after_a_wanted_end_is_off_in_goodput_and_on_the_timeline(
    live: LiveRun, monkeypatch: pytest.MonkeyPatch, outcome: str, by: str, off: bool
) -> None:
    def later() -> datetime:
        return datetime.now(UTC) + timedelta(hours=1)

    live.live.journal.event(EventKind.END, outcome=outcome, reason="r", by=by)
    live.live.journal.close()
    live.kill()
    monkeypatch.setattr(live_run, "JournalWriter", partial(JournalWriter, now=later))
    live.launch()
    live.train(live.live, 1)
    views = views_of(live.store)
    table = views.timeline()["attempts"]
    assert [row[table["columns"].index("then_off")] for row in table["rows"]] == [off, False]
    good = views.goodput()
    assert (good["off_s"] > 3000, good["parts"]["down"] > 3000) == (off, not off)


def test_a_run_before_its_first_attempt_is_starting(data: DataSpec) -> None:
    store = RunStore(Storage("/run", ModelDisk(), no_sleep))
    store.create_run("run", data.identity())
    views = views_of(store)
    assert views.summary()["state"] == "starting"
    assert views.last_id == ""
    assert documents(views)["goodput"]["wall_s"] == 0.0


# ------------------------------------------------------------ what cannot be read
def test_a_run_with_a_damaged_line_is_shown_without_it_and_the_line_is_named(
    live: LiveRun, tmp_path: Path
) -> None:
    for path, content in live.disk.files().items():
        target = tmp_path / path.removeprefix("/run").lstrip("/")
        if content is None:
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.write_bytes(content)
    segment = tmp_path / "journal" / "a0001" / "000001.jsonl"
    whole = segment.read_bytes()
    segment.write_bytes(whole.replace(b'"kind":"step"', b'"kind":"step', 1))
    number = whole[: whole.index(b'"kind":"step"')].count(b"\n") + 1
    store = RunStore(Storage(str(tmp_path)))
    summary = views_of(store, Clock()).summary()
    assert summary["missing"] == [f"journal/a0001/000001.jsonl line {number}"]
    segment.write_bytes(whole)
    restored = views_of(store, Clock()).summary()
    assert restored["missing"] == []
    assert (summary["state"], summary["point"]) == (restored["state"], restored["point"])


def test_a_page_that_a_mount_shows_as_zeros_for_a_moment_is_read_again(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    RunStore(storage).claim(1, "aaaa", START, "host")
    RunStore(storage).write_parent(ClaimParent(attempt=1, parent=None))
    journal = JournalWriter(storage, 1)
    journal.generation(start(1, None))
    journal.flush()
    views = views_of(RunStore(storage), Clock())
    views.refresh()
    for step in (1, 2, 3):
        journal.step(record(key(step)))
    journal.flush()
    segment = tmp_path / "journal/a0001/000001.jsonl"
    whole = segment.read_bytes()
    first, second, *others = whole.splitlines(keepends=True)
    real = Storage.read

    def with_zeros(self: Storage, path: str, offset: int = 0) -> bytes:
        if path.endswith(".jsonl") and offset:
            return bytes(len(second) - 1) + b"\n" + b"".join(others)
        return real(self, path, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "read", with_zeros)
        assert views.refresh()
    assert views.facts.columns.damages == ()
    assert len(views.facts.columns) == 3


def test_storage_that_fails_is_told_and_the_next_look_goes_on(live: LiveRun) -> None:
    class Failing(ModelDisk):
        broken = False

        def list(self, path: str) -> list[str]:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().list(path)

    disk = Failing.of(live.disk.files())
    views = views_of(RunStore(Storage("/run", disk, no_sleep)))
    before = documents(views)
    disk.broken = True
    with pytest.raises(StorageError):
        views.refresh()
    disk.broken = False
    views.refresh()
    assert documents(views) == before


@pytest.mark.parametrize(
    ("call", "code", "value"),
    [
        (lambda v: v.point("00000009-a0001-g0001"), "point.unknown", "00000009-a0001-g0001"),
        (lambda v: v.points(state="odd"), "command.unknown_state", "'odd'"),
        (lambda v: v.points(sort="-odd"), "command.unknown_order", "'-odd'"),
        (lambda v: v.series("odd"), "command.unknown_axis", "'odd'"),
        (lambda v: v.series(metrics=["loss", "odd"]), "metrics.unknown", "'odd'"),
        (lambda v: v.series(start=math.inf), "command.range_not_finite", "inf"),
        (lambda v: v.event("a0001:900"), "journal.unknown_event", "a0001:900"),
        (lambda v: v.event("../run.json"), "journal.unknown_event", "../run.json"),
        (lambda v: v.events(EventFilter(levels=["odd"])), "command.unknown_level", "'odd'"),
    ],
)
def test_names_that_there_are_not_are_refused(
    live: LiveRun, call: Callable[[RunViews], Any], code: str, value: str
) -> None:
    with raises(RefusedError, code, value):
        call(views_of(live.store))


# ------------------------------------------------------------ points
def test_sizes_pins_and_what_was_read_back_show_in_the_table(live: LiveRun) -> None:
    views = views_of(live.store)
    (row,) = views.points()["rows"]
    assert (row["state"], row["checked"], row["pinned"]) == ("healthy", "sizes", False)
    live.store.pin(row["name"], "mira", "before the change", live.run.id)
    assert views.refresh()
    pin = views.points(state="pinned")["rows"][0]["pin"]
    assert (pin["by"], pin["reason"]) == ("mira", "before the change")
    live.live.journal.event(
        EventKind.POINT_VERIFIED, point=row["name"], checked="digests", healthy=True, seconds=1.0
    )
    live.live.journal.flush()
    views.refresh()
    assert views.points()["rows"][0]["checked"] == "digests"
    live.store.storage.delete(point_path(row["name"], "rng.json"))
    assert views.point(row["name"])["point"]["reason"] == "rng.json is missing"
    assert views.points()["counts"]["damaged"] == 1


def test_a_point_that_lost_its_commit_is_damaged_and_one_that_was_deleted_is_not(live: LiveRun) -> None:
    live.save(live.live)
    live.save(live.live)  # retention deletes the first of them
    views = views_of(live.store)
    names = [row["name"] for row in views.points(sort="step")["rows"]]
    assert len(names) == 2
    assert views.summary()["points"]["deleted"] == 1
    live.store.storage.delete(point_path(names[1], "COMMIT"))
    assert views.refresh()
    rows = views.points(sort="step")["rows"]
    assert [(row["name"], row["state"]) for row in rows] == [(names[0], "healthy"), (names[1], "damaged")]
    assert views.summary()["point"]["name"] == names[0]


def test_a_point_that_the_newest_attempt_holds_is_not_pinned(live: LiveRun) -> None:
    live.kill()
    live.launch()
    views = views_of(live.store)
    (row,) = views.points()["rows"]
    assert (row["held"], row["pinned"]) == (True, False)
    assert (views.points()["counts"]["pinned"], views.points(state="pinned")["total"]) == (0, 0)
    live.store.pin(row["name"], "mira", "", live.run.id)
    views.refresh()
    assert views.points()["counts"]["pinned"] == 1


# ------------------------------------------------------------ events
def test_a_start_marks_what_it_finds_damaged_and_lifts_the_mark_of_what_it_continues(live: LiveRun) -> None:
    for _ in range(2):
        live.save(live.live)
    older, newest = live.store.point_names()[-2:]
    views = views_of(live.store)

    def states() -> dict[str, tuple[str, bool]]:
        views.refresh()
        rows = {row["name"]: row for row in views.points()["rows"]}
        return {name: (rows[name]["state"], bool(rows[name]["quarantined"])) for name in (older, newest)}

    storage, entry = live.store.storage, live.store.read_point(newest).commit.files[-1]
    file = point_path(newest, entry.path)
    whole = storage.read(file)

    def put(data: bytes) -> None:
        storage.delete(file)
        storage.write(file, data)

    damaged = bytes([whole[0] ^ 1]) + whole[1:]
    put(damaged)
    Verifying(store=live.store).rows([newest])
    assert states() == {older: ("healthy", False), newest: ("damaged", True)}
    put(whole)
    live.kill()
    live.launch()
    assert live.first.parent == parse_point_name(newest), "its bytes are right again"
    assert live.first.found.lifted
    assert states() == {older: ("healthy", False), newest: ("healthy", False)}
    put(damaged)
    live.kill()
    live.launch()
    assert live.first.parent == parse_point_name(older)
    assert states() == {older: ("healthy", False), newest: ("damaged", True)}


def test_a_reader_of_the_stream_gets_what_came_after_its_id(live: LiveRun) -> None:
    views = views_of(live.store)
    at = views.last_id
    assert at == f"a0001:{at.partition(':')[2]}"
    assert views.happenings_since(at) == []
    live.kill()
    live.launch()
    views.refresh()
    came = views.happenings_since(at)
    assert [row["kind"] for row in came] == ["attempt", "sources", "generation"]
    assert views.happenings_since(came[0]["id"]) == came[1:]
    assert views.happenings_since("odd") == []


def test_events_are_found_by_level_kind_attempt_text_and_time(live: LiveRun) -> None:
    live.train(live.live, 1)
    live.kill()
    live.launch()
    views = views_of(live.store)
    every = views.events(limit=500)["rows"]
    assert every == sorted(every, key=lambda row: -row["t"])
    of_points = {row["kind"] for row in views.events(EventFilter(levels=["point"]))["rows"]}
    assert of_points == {"point committed"}
    assert {row["attempt"] for row in views.events(EventFilter(attempt=2))["rows"]} == {2}
    assert [row["kind"] for row in views.events(EventFilter(text="IS RESUMED"))["rows"]] == ["attempt"]
    assert views.events(EventFilter(kinds=["attempt"]), limit=1)["total"] == 2
    assert views.events(EventFilter(start=every[0]["t"] + 1))["rows"] == []
