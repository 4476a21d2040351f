"""Starts that skip samples after a resume point: real claims, points and data, batches of the real feed, and
no model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.cli.tables import plan_lines
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt import launch_attempts as beginning
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.coordinator.attempt.launch_attempts import continue_launch
from orchestrator.data.packing import samples as data_samples
from orchestrator.data.packing.samples import open_samples
from orchestrator.errors import RefusedError
from orchestrator.faults import no_fault
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.inspect.views.events import EventFilter
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey
from tests.data.making import some_texts, write_corpus
from tests.launch.skipping_run import BATCH, SEQ_LEN, SkippingRun, survey_newest
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


def test_the_status_after_going_back_far_shows_the_last_step_before_the_point_whoever_continues_from_there(
    mapping: dict[str, Any],
) -> None:
    run = SkippingRun(mapping)

    def shown() -> tuple[int | None, int]:
        seen = orchestrator.open(run.folder).status(0)
        return seen.step, seen.consumed_samples

    first = run.launch(2)
    run.launch(60, "train.global_batch_size=1")
    assert shown()[1] == 2 * BATCH + 60
    back = f"resume.from={first.point_name}"
    begun = run.begin(back)
    assert shown() == (2, 2 * BATCH)
    run.train(begun, 0, back, save=False)
    assert shown() == (2, 2 * BATCH)
    again = run.begin()
    assert shown() == (2, 2 * BATCH), "a start that continues from there has not trained yet"
    run.train(again, 1)
    assert shown() == (3, 3 * BATCH)
    run.begin()  # and is killed: what it had trained stands
    assert shown() == (3, 3 * BATCH)


@pytest.fixture
def mapping(tmp_path: Path, tiny_config: Make) -> dict[str, Any]:
    write_corpus(tmp_path / "data", some_texts(60), "jsonl")
    source = {"name": "made", "path": str(tmp_path / "data"), "format": "jsonl"}
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "train.max_steps": 1000}
    shape = {"train.global_batch_size": BATCH, "pack.seq_len": SEQ_LEN}
    return tiny_config({"data.sources": [source], **small, **shape})


@pytest.fixture
def run(mapping: dict[str, Any]) -> SkippingRun:
    return SkippingRun(mapping)


def mixture(tmp_path: Path, tiny_config: Make, **pack: Any) -> SkippingRun:
    """Three sources of different sizes; one that ends is dropped."""
    sources = []
    for i, name in enumerate(("books", "code", "web")):
        write_corpus(tmp_path / name, [f"{name} {text}" for text in some_texts(12 + 25 * i, 30)], "jsonl")
        folder = str(tmp_path / name)
        sources.append({"name": name, "path": folder, "format": "jsonl", "weight": (0.3, 0.2, 0.5)[i]})
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.on_end": "drop"}
    shape = {"train.global_batch_size": BATCH, "pack.seq_len": SEQ_LEN, "train.max_steps": 1000}
    packed = {f"pack.{name}": value for name, value in pack.items()}
    return SkippingRun(tiny_config({"data.sources": sources, **small, **shape, **packed}))


@pytest.fixture
def mixed(tmp_path: Path, tiny_config: Make) -> SkippingRun:
    return mixture(tmp_path, tiny_config)


@pytest.fixture(params=["bestfit", "pad"])
def packed(request: pytest.FixtureRequest, tmp_path: Path, tiny_config: Make) -> SkippingRun:
    return mixture(tmp_path, tiny_config, mode=request.param, long_document="split")


def test_steps_are_skipped_at_the_points_shape_and_all_that_follows_is_the_stream(run: SkippingRun) -> None:
    spike = run.launch(5)
    run.launch(3)
    shape = ("train.global_batch_size=3", "pack.seq_len=48")
    skip = (*shape, f"resume.from={spike.point_name}", "resume.skip_steps=2")
    plan = run.plan(*skip)
    assert plan.skip is not None
    assert (plan.skip.samples, plan.skip.steps, plan.skip.tokens) == (2 * BATCH, 2, 2 * BATCH * SEQ_LEN)
    assert (plan.skip.first_index, plan.skip.cursor is not None) == (5 * BATCH, True)
    assert any(
        "skips 8 samples (2 steps at the point's batch size), 256 tokens" in t for t in plan_lines(plan)
    )
    assert json.loads(json.dumps(plan.to_json()))["skip"]["seconds"] > 0
    assert "skips 8 samples" in plan._repr_html_()
    attempt = run.begin(*skip)
    assert "skipped 8 samples (256 tokens) after" in run.said
    assert attempt.point is not None
    assert attempt.point.cursor == plan.skip.cursor == attempt.skip.end if attempt.skip else False
    at = attempt.point.cursor
    assert (at.consumed_samples, at.consumed_tokens, at.skipped_samples) == (20, 20 * SEQ_LEN, 8)
    assert run.claim(3).skip == attempt.skip, "the claim says it"
    run.trained = []
    newest = run.train(attempt, 4, *skip)
    assert run.trained == [*range(28, 40)], "indices count what was skipped"
    # the same tokens as the stream has them after 28 samples of the point's shape
    spec = starting.prepare(run.job(), run.store.storage, freeze=False)
    whole = [sample for sample, _ in zip(open_samples(spec, Cursor(), SEQ_LEN), range(28), strict=False)]
    assert whole[-1].cursor.sources == at.sources
    assert run.store.read_point(newest.point_name).cursor.skipped_samples == 8
    found = run.audit()
    assert found["exactly_once"], found["first_difference"]
    events = RunViews(run.store).events(EventFilter(levels=["data"]))["rows"]
    assert any("8 samples (256 tokens) after" in event["text"] for event in events)


def test_the_same_setting_skips_once_however_often_it_is_given(run: SkippingRun) -> None:
    first = run.launch(4)
    skip = "resume.skip_samples=5"
    begun = run.begin(skip)
    again = run.begin(skip)  # the first one trained nothing
    assert (begun.skip, begun.point) == (again.skip, again.point) != (None, None)
    killed = run.begin(skip)
    run.train(killed, 2, skip, save=False)  # what it trained is lost
    fourth = run.begin(skip)
    assert fourth.skip == begun.skip
    newest = run.train(fourth, 3, skip)
    plan = run.plan(skip)
    assert (plan.skip, plan.action) == (None, "resume")
    assert any("is done: attempt 5 skipped these samples after" in note for note in plan.all_notes)
    later = run.begin(skip)
    assert later.skip is None
    assert "they are not skipped twice" in run.said
    # also where the point is not named any more, or by a job that a restart gives it again and again
    run.train(later, 1, skip)
    assert run.begin(f"resume.from={newest.point_name}", "resume.skip_samples=5").skip is not None, (
        "asked anew"
    )
    assert run.begin(f"resume.from={first.point_name}", "resume.skip_samples=6").skip is not None


def test_a_setting_that_was_meant_for_another_point_is_refused(run: SkippingRun) -> None:
    old = run.launch(2)
    run.launch(2)
    run.launch(2, "resume.skip_steps=2")
    run.launch(1, f"resume.from={old.point_name}")  # left the history on which it was skipped
    shutil.rmtree(run.folder / "points" / survey_newest(run))
    plan = run.plan("resume.skip_steps=2")
    assert plan.action == "refuse"
    assert plan.codes[-1] == "resume.request_at_another_point"
    assert f"resume.from={plan.point}" in plan.refusals[-1]
    with raises(RefusedError, "resume.request_at_another_point", f"resume.from={plan.point}"):
        run.begin("resume.skip_steps=2")


def test_without_a_point_there_is_nothing_to_skip_from(run: SkippingRun) -> None:
    assert run.plan("resume.skip_steps=1").codes == ("resume.skip_without_point",)
    with raises(RefusedError, "resume.skip_without_point", "resume.skip_steps=1"):
        run.begin("resume.skip_steps=1")


def test_a_skip_to_the_end_of_the_data_or_beyond_is_refused_with_both_numbers(run: SkippingRun) -> None:
    point = run.launch(4)
    spec = starting.prepare(run.job(), run.store.storage, freeze=False)
    left = sum(1 for _ in open_samples(spec, run.store.read_point(point.point_name).cursor, SEQ_LEN))
    for number in (left, left + 1, 10 * left):
        values = f"{number:,} samples of {SEQ_LEN} tokens", point.point_name, f"{left:,} from there on"
        plan = run.plan(f"resume.skip_samples={number}")
        assert plan.codes[0] == "resume.skip_past_end"
        assert all(value in plan.refusals[0] for value in values)
        with raises(RefusedError, "resume.skip_past_end", *values):
            run.begin(f"resume.skip_samples={number}")
    assert run.store.claim_numbers() == [1], "refused before anything is claimed"
    assert run.begin(f"resume.skip_samples={left - 1}").skip is not None
    assert run.begin(f"resume.skip_samples={left + 1}", "data.num_epochs=2").skip is not None


def test_what_was_drawn_before_the_claim_counts_at_its_point_alone(run: SkippingRun) -> None:
    first, second = run.launch(2), run.launch(3)
    spec = starting.prepare(run.job(), run.store.storage, freeze=False)

    def job(point: StateKey) -> JobConfig:
        return run.job(f"resume.from={point.point_name}", "resume.skip_samples=5")

    looked = preview.look_before_start(run.store, job(first), spec, lambda: 2)
    assert looked.drawn is not None
    assert looked.drawn.begin == run.store.read_point(first.point_name).cursor
    with attempt_claim.claimed(run.store, job(second), spec, 2, looked=looked) as (attempt, _):
        assert attempt.skip is not None
    assert attempt.skip.begin == run.store.read_point(second.point_name).cursor
    assert attempt.skip.end.skipped_samples == 5


def test_a_restarted_coordinator_stands_after_what_its_launch_skips(run: SkippingRun) -> None:
    run.launch(3)
    attempt = run.begin("resume.skip_steps=2")
    journal = JournalWriter(run.store.storage, attempt.number, run_id=attempt.run_id)
    note_beginning(journal, attempt, run.job("resume.skip_steps=2").flat())
    journal.flush()
    restarted = continue_launch(run.store, attempt, "host", no_fault)
    assert restarted.number == attempt.number + 1
    assert (restarted.point, restarted.skip) == (attempt.point, attempt.skip)
    assert run.claim(restarted.number).skip == attempt.skip
    # once the launch has a point of its own, that holds it
    newest = run.train(restarted, 2, "resume.skip_steps=2")
    (run.folder / "attempts" / f"{restarted.number:04d}.end.json").unlink()
    third = continue_launch(run.store, attempt, "host", no_fault)
    assert third.point is not None
    assert (third.point.name, third.skip, run.claim(third.number).skip) == (newest.point_name, None, None)
    assert third.point.cursor.skipped_samples == 8


def test_a_fork_skips_after_the_point_that_it_begins_with(run: SkippingRun) -> None:
    point = run.launch(3)
    where = f"resume.from={run.folder / 'points' / point.point_name}"
    fork = SkippingRun({**run.mapping, "run": {**run.mapping["run"], "name": "fork"}})
    assert fork.plan(where, "resume.skip_steps=2").skip is not None
    fork.launch(4, where, "resume.skip_steps=2")
    assert fork.trained == [*range(20, 36)]
    found = fork.audit()
    assert found["exactly_once"], found["first_difference"]
    assert [row["samples"] for row in found["skipped_samples"]] == [8]
    again = fork.begin(where, "resume.skip_steps=2")
    assert again.skip is None


# ---------------------------------------------------------------------------------------- the audit
def test_an_audit_follows_the_skips_and_says_what_was_not_trained(run: SkippingRun) -> None:
    run.launch(4)
    second = run.launch(3, "resume.skip_steps=2")
    run.launch(1000, f"resume.from={second.point_name}", "resume.skip_samples=3", "pack.seq_len=24")
    found = run.audit()
    assert found["exactly_once"], found["first_difference"]
    assert [
        (s["attempt"], s["first_index"], s["samples"], s["tokens"]) for s in found["skipped_samples"]
    ] == [
        (2, 16, 8, 256),
        (3, 36, 3, 96),
    ]
    told = [text for text in found["not_shown"] if text.startswith("that every token was trained: ")]
    assert len(told) == 2
    assert "8 samples (256 tokens) from sample 16 on were skipped on purpose" in told[0]
    # parts begin before, at and behind a skip
    for steps, passed in ((":4", 0), ("5:7", 1), ("4:7", 1), ("6:6", 0), ("11:", 1), ("12:", 0)):
        part = run.audit(steps)
        assert part["exactly_once"], (steps, part["first_difference"])
        assert len(part["skipped_samples"]) == passed, steps


def one_sample_fewer(claim: ClaimParent) -> ClaimParent:
    assert claim.skip is not None
    return replace(claim, skip=replace(claim.skip, samples=claim.skip.samples - 1))


def another_end(claim: ClaimParent) -> ClaimParent:
    assert claim.skip is not None
    at = claim.skip.end.sources["made"]
    end = replace(claim.skip.end, sources={"made": replace(at, documents=at.documents + 1)})
    return replace(claim, skip=replace(claim.skip, end=end))


def none(claim: ClaimParent) -> ClaimParent:
    return replace(claim, skip=None)


@pytest.mark.parametrize("change", [one_sample_fewer, another_end, none])
def test_a_claim_that_says_another_skip_than_was_done_is_found(
    run: SkippingRun, change: Callable[[ClaimParent], ClaimParent]
) -> None:
    run.launch(4)
    run.launch(3, "resume.skip_steps=2")
    run.rewrite_claim(2, change)
    found = run.audit()
    assert found["exactly_once"] is False
    assert found["first_difference"]["step"] == "5"


def test_what_was_skipped_and_trained_all_the_same_is_found(run: SkippingRun) -> None:
    run.launch(4)
    attempt = run.begin("resume.skip_steps=2")
    assert attempt.point is not None
    assert attempt.skip is not None
    repeats = replace(attempt, point=replace(attempt.point, cursor=attempt.skip.begin))
    run.train(repeats, 2, "resume.skip_steps=2")
    assert run.audit()["first_difference"]["step"] == "5"


def test_several_sources_are_skipped_by_the_points_weights_and_go_on_by_the_jobs(mixed: SkippingRun) -> None:
    mixed.launch(6)
    weights = ("data.sources.0.weight=0.1", "data.sources.1.weight=0.6", "data.weight_by=samples")
    plan = mixed.plan(*weights, "resume.skip_steps=4")
    assert plan.skip is not None
    assert plan.skip.cursor is not None
    before = {seen.source: seen for seen in plan.sources}
    assert {name: seen.target_before for name, seen in before.items()} == {
        "books": 0.3,
        "code": 0.2,
        "web": 0.5,
    }
    assert before["code"].target == pytest.approx(0.5)
    assert sum(seen.samples for seen in before.values()) == 24
    assert before["web"].actual == pytest.approx(0.5, abs=1 / 24)
    assert any("source code: " in line and "wanted 20.00% -> 50.00%" in line for line in plan_lines(plan))
    after = plan.skip.cursor.mixture
    share = {name: after[name].samples - before[name].samples for name in before}
    assert (sum(share.values()), share["web"]) == (16, 8), "the old weights drew what is skipped"
    mixed.launch(3, *weights, "resume.skip_steps=4")
    mixed.launch(1000, *weights, "data.on_end=drop")
    found = mixed.audit()
    assert found["exactly_once"], found["first_difference"]
    (skipped,) = found["skipped_samples"]
    assert (skipped["first_index"], skipped["samples"]) == (24, 16)


@pytest.mark.quick("bestfit")
def test_packs_of_several_sources_are_skipped_and_the_audit_follows(packed: SkippingRun) -> None:
    weights = ("data.sources.0.weight=0.1", "data.sources.1.weight=0.6")
    packed.launch(6)
    second = packed.launch(3, *weights, "resume.skip_steps=3")
    packed.launch(1, *weights)
    packed.launch(1000, *weights, f"resume.from={second.point_name}", "resume.skip_samples=7")
    found = packed.audit()
    assert found["exactly_once"], found["first_difference"]
    rows = [(row["attempt"], row["first_index"], row["samples"]) for row in found["skipped_samples"]]
    assert rows == [(2, 24, 12), (4, 48, 7)]
    lineage = orchestrator.open(packed.folder).records()
    assert found["samples"] == lineage[-1].consumed_samples
    assert found["tokens"] == SEQ_LEN * found["samples"], "positions, padding included"
    told = [text for text in found["not_shown"] if text.startswith("that every token was trained: ")]
    assert len(told) == 2
    assert not any("completeness" in text for text in found["not_shown"]), "all that was read is shown"
    for steps, passed in ((":6", 0), ("7:9", 1), ("8:9", 0), ("9:10", 1), ("10:", 1), ("12:", 0)):
        part = packed.audit(steps)
        assert part["exactly_once"], (steps, part["first_difference"])
        assert len(part["skipped_samples"]) == passed, steps


def the_skipped_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "after_skip", lambda point, skip: point)


def one_pack_too_few_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = data_samples.draw_past

    def wrong(spec: Any, cursor: Cursor, num_samples: int, seq_len: int) -> data_samples.Passed:
        asked, short = (right(spec, cursor, num, seq_len) for num in (num_samples, num_samples - 1))
        tokens, samples = asked.cursor.skipped_tokens, asked.cursor.skipped_samples
        end = replace(short.cursor, skipped_tokens=tokens, skipped_samples=samples)
        return replace(asked, cursor=end)

    monkeypatch.setattr(data_samples, "draw_past", wrong)


@pytest.mark.quick("bestfit-the_skipped_are_trained", "pad-one_pack_too_few_is_passed")
@pytest.mark.parametrize("plant", [the_skipped_are_trained, one_pack_too_few_is_passed])
def test_packs_that_come_again_after_a_skip_are_found(
    packed: SkippingRun, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    packed.launch(5)
    plant(monkeypatch)
    packed.launch(3, "resume.skip_steps=2")
    assert packed.audit()["first_difference"]["step"] == "6"
    assert packed.audit(":5")["exactly_once"]


def test_a_source_that_ends_among_the_skipped_samples_is_dropped_there(mixed: SkippingRun) -> None:
    mixed.launch(4)
    skip = "resume.skip_samples=240"
    plan = mixed.plan(skip)
    assert plan.skip is not None
    assert plan.skip.cursor is not None
    assert plan.skip.cursor.mixture["books"].ended == 1
    assert plan.skip.tokens < 240 * SEQ_LEN, "its last sample is shorter"
    mixed.launch(1000, skip)
    found = mixed.audit()
    assert found["exactly_once"], found["first_difference"]
    total = sum(
        share.tokens for share in mixed.store.read_point(survey_newest(mixed)).cursor.mixture.values()
    )
    assert total == found["tokens"] + found["skipped_samples"][0]["tokens"]


def test_a_replay_goes_around_what_was_skipped(run: SkippingRun) -> None:
    point = run.launch(2)
    newest = run.launch(2, "resume.skip_steps=2")
    end = run.store.read_point(newest.point_name).cursor
    begin = run.store.read_point(point.point_name).cursor
    shutil.rmtree(run.folder / "points")  # their weights are no model's: it begins with the first ones
    here = orchestrator.open(run.folder).at(2)
    assert here.cursor == begin
    assert here.batch is not None
    assert here.batch.first_index == 16, "the next step's batch lies after the skip"
    assert orchestrator.open(run.folder).at(4).cursor == end
