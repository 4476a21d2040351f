"""Parts of the views, each for itself: pyramids, lanes, sentences, sources, the verdict."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.spec import DataSpec
from orchestrator.elastic.roster import Roster
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import AUDIT, VERIFY, FindingFiles
from orchestrator.inspect.status.snapshot import (
    DONE,
    FAILED,
    GONE,
    NEW,
    OPEN,
    RUNNING,
    STARTING,
    STOPPED,
    UNREADABLE,
    WAITING,
    Risk,
    Standing,
    level,
    verdict,
)
from orchestrator.inspect.views.charts import merged
from orchestrator.inspect.views.events import LEVELS, level_of, text_of
from orchestrator.inspect.views.facts.arrays import Pyramid
from orchestrator.inspect.views.facts.columns import Event
from orchestrator.inspect.views.facts.facts import shorts
from orchestrator.inspect.views.lineage_graph import lanes
from orchestrator.inspect.views.points_table import differences
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.json_form import encode
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from orchestrator.text import count, span
from tests.checkpoint.samples import key, record, start
from tests.inspect.live_run import LiveRun, reader
from tests.inspect.watched_attempt import JOIN
from tests.storage.crashfs import ModelDisk
from tests.traced import traced

pytestmark = pytest.mark.xdist_group("forked")


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 1000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return starting.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)


@pytest.fixture
def live(job: JobConfig, data: DataSpec) -> LiveRun:
    run = LiveRun(ModelDisk(), job, data)
    run.launch()
    return run


def views_of(live: LiveRun) -> RunViews:
    views = RunViews(live.store)
    views.refresh()
    return views


# ------------------------------------------------------------ pyramids
VALUES = st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf")])


@example([[1.0] * 32, [1.0] * 8], 1, [(0, 40)])  # a level begins when the one below is just full
@given(
    st.lists(st.lists(VALUES, max_size=60), max_size=5),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), min_size=1, max_size=8),
)
def test_a_pyramid_says_of_any_range_what_its_rows_say(
    pieces: list[list[float]], times: int, ranges: list[tuple[int, int]]
) -> None:
    pyramid, column = Pyramid(), np.zeros(0)
    for piece in pieces:
        column = np.concatenate([column, np.tile(piece, times)])
        pyramid.extend(column)
    size = len(column)
    cuts = np.array([sorted((min(a, size), min(b, size))) for a, b in ranges]).reshape(-1, 2)
    low, high, total, number = pyramid.over(cuts[:, 0], cuts[:, 1])
    for i, (a, b) in enumerate(cuts.tolist()):
        some = column[a:b][np.isfinite(column[a:b])]
        assert number[i] == len(some)
        assert total[i] == pytest.approx(some.sum(), rel=1e-9, abs=1e-3)
        assert low[i] == (some.min() if len(some) else np.inf)
        assert high[i] == (some.max() if len(some) else -np.inf)


def picture(size: int) -> tuple[Any, Any]:
    """Of a column; the peak is that of looking at it."""
    column, pyramid = np.arange(size, dtype="f8"), Pyramid()
    edges = np.linspace(0, size, 601).astype("i8")
    pyramid.extend(column)
    tracemalloc.reset_peak()
    assert pyramid.over(edges[:-1], edges[1:])[2].sum() == column.sum()
    return column, pyramid


def test_a_picture_of_a_long_column_takes_no_memory_that_grows_with_it() -> None:
    size = 400_000
    column, (held, peak) = 8 * size, traced(picture, size)
    assert column < held < 1.5 * column
    assert peak - held < column / 2


def test_numbers_of_a_picture_have_five_digits_and_none_that_json_lacks() -> None:
    values = np.array([1.23456789, 0.0, -123456.7, 1e-9 / 3, float("nan"), float("inf")])
    assert shorts(values) == [1.2346, 0.0, -123460.0, 3.3333e-10, None, None]


def test_durations_and_counts_are_said_as_people_say_them() -> None:
    seconds = (None, -1, 0.0042, 0.79, 4.21, 12, 89.4, 89.6, 178, 599.6, 720, 18_720, 717_120)
    assert [span(s) for s in seconds] == [
        "?", "0 s", "4.2 ms", "0.79 s", "4.2 s", "12 s", "89 s", "1 min 30 s", "2 min 58 s", "10 min",
        "12 min", "5 h 12 min", "8 d 7 h",
    ]  # fmt: skip
    assert [count(n) for n in (0, 912, 3_830_000, 11_234_050_048)] == ["0", "912", "3.83 M", "11.2 B"]


# ------------------------------------------------------------ lanes
def test_a_branch_has_a_lane_of_its_own_from_its_tip_to_where_it_left_the_history() -> None:
    parents = {1: None, 2: 1, 3: 2, 4: 1, 5: 4}
    rails = lanes([1, 2, 3, 4, 5], frozenset({1, 4, 5}), parents)
    assert [(r.attempt, r.lane, r.through, r.joins) for r in rails] == [
        (5, 0, [0], []),
        (4, 0, [0], []),
        (3, 1, [0, 1], []),
        (2, 1, [0, 1], []),
        (1, 0, [0, 1], [1]),
    ]


def test_two_branches_at_once_have_two_lanes() -> None:
    rails = lanes([1, 2, 3, 4], frozenset({1, 4}), {1: None, 2: 1, 3: 1, 4: 1})
    assert [(r.attempt, r.lane, r.through, r.joins) for r in rails] == [
        (4, 0, [0], []),
        (3, 1, [0, 1], []),
        (2, 2, [0, 1, 2], []),
        (1, 0, [0, 1, 2], [1, 2]),
    ]


def test_a_branch_of_a_branch_joins_it() -> None:
    rails = lanes([1, 2, 3, 4, 5], frozenset({1, 5}), {1: None, 2: 1, 3: 2, 4: 2, 5: 1})
    assert [(r.attempt, r.lane, r.through, r.joins) for r in rails] == [
        (5, 0, [0], []),
        (4, 1, [0, 1], []),
        (3, 2, [0, 1, 2], []),
        (2, 1, [0, 1, 2], [2]),
        (1, 0, [0, 1], [1]),
    ]


# ------------------------------------------------------------ sentences
SAMPLE: dict[str, Any] = {
    "by_s": 3600.0,
    "why": "resume", "outcome": "done", "reason": "because", "step": 3, "what": "save", "by": "mira",
    "request": 1, "text": "a text", "point": "00000003-a0001-g0001", "file": "a file", "member": "m" * 12,
    "error": "ValueError", "node": "n" * 56, "num_workers": 2, "save_s": 1.0, "healthy": True, "counts": {},
    "points": ["00000003-a0001-g0001"], "checked": "digests", "needed": 2, "there": 1, "retry_s": 5.0,
    "host": "gpu-7", "grace_s": 30.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(EventKind))
def test_every_kind_of_event_has_a_level_and_a_sentence(kind: EventKind) -> None:
    fields = {name: SAMPLE.get(name, "x") for name in kind.fields}
    if kind == EventKind.GROUP_FORMED:
        roster = Roster(2)
        for member in "ab":
            roster.came(replace(JOIN, member=member), 0.0)
        fields = encode(roster.formed(1, 1, ("a", "b"), 0, 0, 1.0))
    event = Event(attempt=1, seq=1, t=0.0, kind=kind, fields=fields)
    assert level_of(event) in LEVELS
    if kind != EventKind.CURSOR:
        assert text_of(event) != kind


def test_an_event_of_a_later_version_is_shown_by_its_kind() -> None:
    event = Event(attempt=1, seq=1, t=0.0, kind="teleported", fields={"kind": "teleported"})
    assert (level_of(event), text_of(event)) == ("routine", "teleported")
    assert text_of(replace(event, kind="end")) == "end"


def test_a_worker_that_is_lost_and_replaced_is_one_happening(live: LiveRun) -> None:
    by, journal = live.live, live.live.journal
    live.train(by, 2)
    for generation, world, members in ((2, 1, ("a",)), (3, 2, ("a", "c"))):
        if world == 1:
            journal.event(EventKind.MEMBER_DEAD, member="b", reason="killed (SIGKILL)")
        journal.generation(replace(start(generation, by.newest), world_size=world, members=members))
        by.newest = replace(by.newest, generation=generation)
        live.train(by, 2)
    told = views_of(live).summary()["recent"]
    assert [entry["kind"] for entry in told] == ["worker", "start"]
    assert told[0]["text"].startswith("Worker b died: 2 → 1 workers, training paused ")
    assert ", back to 2 after " in told[0]["text"]


def test_the_death_of_the_feeder_is_the_last_fault_and_no_failure_of_the_group(live: LiveRun) -> None:
    live.train(live.live, 2)
    live.live.journal.event(EventKind.FEEDER_DIED, pid=7, host="10.0.0.7", reason="it was killed")
    live.live.journal.flush()
    summary = views_of(live).summary()
    assert summary["last_fault"]["text"] == "The feeder (10.0.0.7, pid 7) died: it was killed; no step lost"
    assert summary["recent"][0]["kind"] == "feeder"
    assert summary["hour"] == {"faults": 1, "restarts": 0}
    (failures,) = (check for check in summary["checks"] if check["id"] == "failures")
    assert failures["value"] == "0"


def test_a_save_that_failed_is_a_check_until_a_point_or_another_attempt_comes(live: LiveRun) -> None:
    views = views_of(live)

    def last_save() -> list[tuple[str, str, str]]:
        live.train(live.live, 1)  # it is seen to live
        views.refresh()
        checks = views.summary()["checks"]
        return [(c["level"], c["value"], c["note"]) for c in checks if c["id"] == "last_save"]

    def fails(retry_s: float | None) -> None:
        name = live.live.newest.point_name
        live.live.journal.event(EventKind.SAVE_GIVEN_UP, point=name, reason="disk full", retry_s=retry_s)
        live.live.journal.flush()

    live.train(live.live, 2)
    assert last_save() == []
    fails(3600.0)
    ((level, value, note),) = last_save()
    assert (level, note) == ("warn", "disk full")
    assert re.fullmatch(r"failed, next try in .*", value)
    fails(0.0)
    assert last_save() == [("warn", "failed, next try: as soon as all workers are free", "disk full")]
    fails(None)
    assert last_save() == [], "nothing is tried again, as in earlier versions when a worker was lost"
    fails(3600.0)
    live.save(live.live)
    assert last_save() == []
    live.train(live.live, 1)
    fails(3600.0)
    live.kill()
    live.launch()
    assert last_save() == [], "the one before tries nothing any more"


def test_lost_steps_are_told_where_the_attempt_goes_on_and_drawn_with_their_fate(live: LiveRun) -> None:
    live.save(live.live)
    live.train(live.live, 4)
    live.kill()
    live.launch()
    live.save(live.live)
    live.end()
    first = live.on_lineage[0]
    live.launch(first)
    views = views_of(live)
    crashed, rewound = [entry["text"] for entry in views.summary()["recent"]][-2::-1]
    assert re.fullmatch("Everything died; resumed after .* with 2 workers, 4 steps lost", crashed)
    assert rewound == "Rewound to step 3: 3 steps set aside as an orphan branch"
    table = views.timeline()["segments"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [(r["attempt"], r["s0"], r["s1"], r["fate"], r["by"]) for r in rows] == [
        (1, 0, 3, 0, None),
        (1, 3, 7, 1, 2),
        (2, 3, 6, 2, 3),
    ]
    branches = views.series(px=40)["branches"]
    assert [(b["fate"], b["by"], b["from_step"], b["to_step"]) for b in branches] == [
        ("lost", 2, 4, 7),
        ("rewound", 3, 4, 6),
    ]
    assert [(r["attempt"], r["aside"], r["aside_by_fate"]) for r in views.attempts()["rows"]] == [
        (3, 0, {}),
        (2, 3, {"rewound": 3}),
        (1, 4, {"lost": 4}),
    ]


def test_segments_that_are_thinner_than_a_pixel_are_one_and_hide_no_other_fate_or_world_size() -> None:
    every = [
        [1, at, float(at), at + 0.9, 10 * at, 10 * at + 10, at, at + 1, 3 if at == 30 else 2, *other]
        for at, other in ((at, (1, 9) if at in (50, 51) else (0, None)) for at in range(100))
    ]
    assert merged(every, 1000) == every
    few = merged(every, 10)
    assert [(row[4], row[5], *row[8:]) for row in few if row[8:] != [2, 0, None]] == [
        (300, 310, 3, 0, None),
        (500, 520, 2, 1, 9),
    ]
    assert len(few) < 20
    assert [row[4] for row in few[1:]] == [row[5] for row in few[:-1]]


# ------------------------------------------------------------ data
def test_what_an_audit_and_a_verification_found_is_shown(
    live: LiveRun,
) -> None:
    live.save(live.live)
    views = views_of(live)
    shown = views.sources()
    (plan,) = live.data.plans
    assert (shown["audit"], shown["sources"][0]["num_blocks"]) == (None, plan.num_blocks)
    assert shown["sources"][0]["samples"] == views.summary()["progress"]["samples"] == 24
    findings = FindingFiles(live.store.storage, live.run.id)
    result = {"exactly_once": True, "first_step": "1", "last_step": "3", "final_up_to_step": 3}
    findings.add(AUDIT, 1, 2.5, result | {"samples": 24, "tokens": 768, "not_shown": []})
    (name,) = live.on_lineage
    findings.add(VERIFY, 1, 0.5, {"checked": "digests", "points": [{"point": name, "healthy": False}]})
    assert views.refresh()
    audit = views.sources()["audit"]
    assert (audit["exactly_once"], audit["final_up_to_step"], audit["seconds"]) == (True, 3, 2.5)
    (row,) = views.points()["rows"]
    assert (row["state"], row["checked"]) == ("damaged", "digests")
    assert "`verify` names it" in row["reason"]


def test_sources_and_reasons_are_counted_from_the_journal(live: LiveRun) -> None:
    config = live.job.flat()
    (source,) = config["data.sources"]
    live.train(live.live, 2)
    for at in (7, 9):
        text = f"corpus/a.jsonl: byte {at}: field `text` is missing"
        live.live.journal.event(EventKind.BAD_DOCUMENT, **_known(EventKind.BAD_DOCUMENT, text=text))
    live.live.journal.flush()
    shown = views_of(live).sources()
    assert [(row["why"], row["count"]) for row in shown["skipped"]] == [("field `text` is missing", 2)]
    (row,) = shown["sources"]
    assert (row["name"], row["samples"], row["tokens"], row["actual"]) == (source["name"], 16, 512, 1.0)


def _known(kind: EventKind, **fields: Any) -> dict[str, Any]:
    """The fields of a kind, those that are not given empty."""
    return {name: fields.get(name, "") for name in kind.fields}


def test_no_secret_is_in_what_is_shown_of_a_configuration_an_error_or_an_event(live: LiveRun) -> None:
    secret = "hf_" + "a" * 30
    found = differences({"data.tokenizer": "a"}, {"data.tokenizer": "b", "model.api_key": secret})
    assert secret not in str(found)
    live.live.journal.event(EventKind.UNREADABLE_FILE, file="f", reason=f"https://me:pw@host said {secret}")
    live.live.journal.flush()
    views = views_of(live)
    rows = views.events()["rows"]
    assert "***" in rows[0]["text"]
    assert secret not in str(rows)
    assert secret not in str(views.event(rows[0]["id"]))


def test_what_differs_in_the_sources_is_named_field_by_field() -> None:
    web = {"name": "web", "path": "web/*.jsonl", "format": "jsonl", "weight": 0.7}
    books = {"name": "books", "path": "books", "format": "jsonl", "weight": 0.3}
    found = differences(
        {"data.sources": [web, books]}, {"data.sources": [{**books, "weight": 0.5}, {**web, "path": "w2"}]}
    )
    assert [(row["field"], row["old"], row["new"], row["rule"]) for row in found] == [
        ("data.sources.books.weight", 0.3, 0.5, "may_change"),
        ("data.sources.web.path", "web/*.jsonl", "w2", "same"),
    ]


def test_of_a_mapping_only_what_differs_is_shown_without_secrets() -> None:
    old = {"train.objective_args": {"beta": 0.1, "api_key": "one"}}
    found = differences(old, {"train.objective_args": {"beta": 0.2, "api_key": "two"}})
    assert [(row["field"], row["old"], row["new"]) for row in found] == [
        ("train.objective_args.api_key", "***", "***"),
        ("train.objective_args.beta", 0.1, 0.2),
    ]


# ------------------------------------------------------------ the verdict
AT = Standing(
    state=RUNNING, attempt=2, step=412, total_steps=1000, workers=1, workers_wanted=2,
    point="00000400-a0002-g0001", has_no_point=False, risk=Risk(steps=12, tokens=3_830_000, seconds=14.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("at", "text", "how"),
    [
        (
            AT,
            "running: step 412 of 1,000, 1 of 2 workers. If everything died now, 12 steps (3.83 M tokens, "
            "14 s of work) would be trained again",
            "ok",
        ),
        (
            replace(AT, quiet_s=9.0, risk=Risk(steps=0, tokens=0), concerns=("last step (9 s ago)",)),
            "running: step 412 of 1,000, 1 of 2 workers, but no step for 9 s. If everything died now, "
            "nothing would be lost. Look at: last step (9 s ago)",
            "warn",
        ),
        (
            replace(AT, state=WAITING, there="1 of at least 2 workers are there", risk=None),
            "waiting for workers at step 412 of 1,000: 1 of at least 2 workers are there",
            "warn",
        ),
        (replace(AT, state=OPEN), "not ended: step 412 of 1,000", "ok"),
        (Standing(state=STARTING, attempt=1), "starting attempt 1: no step yet", "ok"),
        (
            replace(AT, state=STARTING, attempt=3, resumes=True),
            "starting attempt 3: step 412 of 1,000. 12 steps (3.83 M tokens, 14 s of work) after "
            "00000400-a0002-g0001 are trained again",
            "ok",
        ),
        (
            replace(AT, state=STARTING, attempt=3),  # a restarted coordinator, whose members live on
            "starting attempt 3: step 412 of 1,000. If everything died now, 12 steps (3.83 M tokens, 14 s of "
            "work) would be trained again",
            "ok",
        ),
        (Standing(state=NEW), "no attempt of this run has begun yet", "idle"),
        (replace(AT, state=DONE, reason="done at step 412"), "done at step 412", "idle"),
        (replace(AT, state=STOPPED, reason="asked to"), "stopped: asked to", "idle"),
        (
            replace(AT, state=STOPPED, reason="by ann", concerns=("waiting for data (9 %)",)),
            "stopped: by ann",
            "idle",
        ),
        (replace(AT, state=FAILED, reason="the loss is nan"), "failed: the loss is nan", "bad"),
        (
            replace(AT, state=GONE, silent_s=12.0),
            "not running: attempt 2 has no end record and gave no sign of life for 12 s, last at step 412 of "
            "1,000; start the same command again: it continues from 00000400-a0002-g0001; 12 steps (3.83 M "
            "tokens) after it are trained again",
            "bad",
        ),
        (Standing(state=UNREADABLE, reason="a line"), "unreadable: a line", "bad"),
    ],
)
def test_the_verdict_is_one_sentence_for_every_state(at: Standing, text: str, how: str) -> None:
    assert (verdict(at), level(at)) == (text, how)


def test_status_and_the_page_say_the_same(live: LiveRun) -> None:
    live.save(live.live)
    live.train(live.live, 2)
    live.end()
    with reader(live.disk, lambda call, path: None) as (run, store):
        said = run.status(0.0).verdict
        shown = RunViews(store).summary()["verdict"]["text"]
    assert (said, shown) == ("stopped: asked to", "Stopped: asked to.")


def test_steps_that_another_attempt_brings_count_where_they_were_trained(live: LiveRun) -> None:
    live.train(live.live, 3)
    live.train(live.live, 2, flush=False)
    live.restart()
    live.train(live.live, 1)
    views = views_of(live)
    assert views.summary()["progress"]["step"] == 6
    assert [r["trained"] for r in views.attempts(routine=True)["rows"]] == [1, 5]
    journal = JournalWriter(live.store.storage, 9, run_id=live.run.id)
    journal.step(record(key(7, attempt=9)))
    journal.close()
    views.refresh()
    assert views.series()["steps"] == 6
