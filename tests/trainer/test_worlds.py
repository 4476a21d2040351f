"""The same training on one, two and three members, and continued on another number of them: bits, ends,
stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW
from orchestrator.inspect.run_control import SentRequest
from orchestrator.records.steps import StateKey
from orchestrator.trainer.interfaces.loop_interface import LEFT
from tests.trainer.feed import FormulaFeed
from tests.trainer.launch import Launch, trained_steps
from tests.trainer.member import Plan, members, run_to_end, tiny_job

pytestmark = pytest.mark.xdist_group("forked")

SHARDS = {"train__parallel": "shard", "train__numerics": "fast"}
SHORT_TAIL = 12 * 8 * 2 + 3 * 8 + 5  # tokens: two whole steps, then 3 whole samples and one of 5 tokens


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_final_state_is_the_same_to_the_last_bit_on_any_number_of_members(tmp_path, alone, world_size):
    launch = run_to_end(tmp_path, world_size)
    assert launch.last_point().key == StateKey(attempt=1, generation=1, step=8)
    assert launch.last_point().state_digest == alone.last_point().state_digest
    assert launch.last_point().cursor == alone.last_point().cursor
    assert trained_steps(launch) == trained_steps(alone)
    assert {outcome.reason for outcome in launch.outcomes.values()} == {"done"}


@pytest.mark.quick("muon")
@pytest.mark.parametrize("optimizer", ["muon", "lion", "adafactor", "tests.trainer.optimizers:Normed"])
def test_an_optimizer_gives_the_same_bits_on_any_number_of_members_and_across_a_change(tmp_path, optimizer):
    changes = {"train__optimizer": optimizer, "train__ema": 0.9}
    whole = run_to_end(tmp_path / "alone", 1, job=tiny_job(**changes))
    half = run_to_end(tmp_path / "run", 3, job=tiny_job(**changes, train__max_steps=4))
    (point,) = half.points
    later = run_to_end(tmp_path / "run", 2, attempt=2, point=point, job=tiny_job(**changes))
    assert later.last_point().state_digest == whole.last_point().state_digest
    assert trained_steps(half) + trained_steps(later) == trained_steps(whole)


def test_what_two_members_saved_is_continued_by_one_and_by_three(tmp_path, alone):
    half = run_to_end(tmp_path, 2, job=tiny_job(train__max_steps=4))
    (point,) = half.points
    for attempt, world_size in ((2, 1), (3, 3)):
        later = run_to_end(tmp_path, world_size, attempt=attempt, point=point)
        assert later.last_point().key == StateKey(attempt=attempt, generation=1, step=8)
        assert later.last_point().state_digest == alone.last_point().state_digest
        assert trained_steps(half) + trained_steps(later) == trained_steps(alone)


@pytest.mark.chaos
def test_the_digest_of_any_step_is_that_of_a_point_there_on_any_number_of_members(tmp_path):
    job = replace(tiny_job(resume__every_steps=4), digest_every_steps=2)
    found = []
    for world_size in (1, 2):
        launch = run_to_end(tmp_path / str(world_size), world_size, job=job)
        events = [event for event in launch.journal().events if event.kind == EventKind.STATE_DIGEST]
        found.append({event.fields["step"]: event.fields["weights_digest"] for event in events})
        store = RunStore(launch.storage)
        of_points = {p.key.step: p.commit.weights_digest for p in map(store.read_point, store.point_names())}
        assert of_points == {step: found[-1][step] for step in (4, 8)}
    assert found[0] == found[1]
    assert sorted(found[0]) == [2, 4, 6, 8]
    assert len(set(found[0].values())) == 4


def test_a_label_given_by_the_view_is_gone_on_from_while_the_optimizer_counts_its_own_steps(tmp_path):
    half = run_to_end(tmp_path, 1, job=tiny_job(train__max_steps=4))
    later = run_to_end(tmp_path, 1, attempt=2, point=max(half.points), step=20)
    assert [record.step for record in later.records.values()] == [21, 22, 23, 24]
    assert {vote.optimizer_steps for vote in later.last_point().votes} == {8}


def test_a_budget_that_is_reached_already_ends_at_once_without_a_save(tmp_path):
    first = run_to_end(tmp_path, 1)
    again = run_to_end(tmp_path, 2, attempt=2, point=max(first.points))
    assert set(again.points) == set(first.points)
    assert not again.records
    assert {reason for _, reason in again.finished.values()} == {"done"}


@pytest.mark.quick("invariant")
@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_the_end_of_the_data_is_a_smaller_step_in_which_some_members_have_no_sample(tmp_path, numerics):
    feed = FormulaFeed(total_tokens=SHORT_TAIL)
    ends = [
        run_to_end(tmp_path / str(world_size), world_size, feed=feed, job=tiny_job(train__numerics=numerics))
        for world_size in (1, 3)
    ]
    for launch in ends:
        assert [r.consumed_samples for r in launch.records.values()] == [12, 24, 28]
        assert launch.last_point().cursor.target_tokens == SHORT_TAIL
    if numerics == "invariant":
        assert trained_steps(ends[0]) == trained_steps(ends[1])
    losses = [[step[1] for step in trained_steps(end)] for end in ends]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fast_numerics_train_nearly_the_same(tmp_path, alone):
    fast = run_to_end(tmp_path, 2, job=tiny_job(train__numerics="fast"))
    for column in (1, 2):  # loss, norm of the gradient
        expected = [row[column] for row in trained_steps(alone)]
        assert [row[column] for row in trained_steps(fast)] == pytest.approx(expected, rel=1e-3)
    assert fast.last_point().state_digest != alone.last_point().state_digest


def test_saves_come_every_n_steps_and_each_is_committed(tmp_path):
    launch = run_to_end(tmp_path, 2, job=tiny_job(resume__every_steps=3))
    # the second begins when the first is decided, which may take these short steps longer than three
    assert [point.key.step for point in launch.points.values()] in ([3, 6, 8], [3, 7, 8], [3, 8])


def test_what_is_asked_for_from_outside_is_done_and_answered(tmp_path):
    job = tiny_job(resume__every_steps=None, train__max_steps=100_000)
    with members(tmp_path, ["a", "b"], job=job) as group:
        launch, store = group.launch, RunStore(group.launch.storage)
        launch.wait_for(lambda: len(launch.records) >= 2)
        saved = SentRequest(store, SAVE).answer(lambda: True)
        (point,) = launch.points
        stopped = SentRequest(store, STOP).answer(lambda: True)
        group.finish()
    assert (saved.request, saved.outcome, saved.point) == (1, "done", point)
    last = launch.last_point().key
    assert last == launch.outcomes["a"].key
    assert (stopped.request, stopped.outcome) == (2, "done")
    assert stopped.text == f"stopped: stopped at step {last.step}"


def test_a_stop_now_ends_the_run_without_a_save(tmp_path):
    job = tiny_job(resume__every_steps=None, train__max_steps=100_000)
    with members(tmp_path, ["a", "b"], job=job) as group:
        launch = group.launch
        launch.wait_for(lambda: len(launch.records) >= 2)
        stopped = SentRequest(RunStore(launch.storage), STOP_NOW).answer(lambda: True)
        group.finish()
    assert stopped.outcome == "done"
    assert "all is trained again" in stopped.text
    assert launch.points == {}
    assert {outcome.reason for outcome in launch.outcomes.values()} == {LEFT}


def test_saves_come_every_so_many_minutes(tmp_path):
    launch = run_to_end(tmp_path, 2, job=tiny_job(resume__every_minutes=1e-9))
    # one after the other: which of the others there are depends on how long a save takes
    assert {point.key.step for point in launch.points.values()} >= {1, 8}


def test_a_wished_stop_saves_and_leaves(tmp_path):
    with members(tmp_path, ["a", "b"], job=tiny_job(train__max_steps=1000)) as group:
        group.launch.wait_for(lambda: len(group.launch.records) >= 2)
        group.launch.request_stop()
        group.finish()
        launch = group.launch
    key, reason = launch.finished["a"]
    assert reason == "stopped"
    assert launch.last_point().key == key == launch.outcomes["b"].key
    assert 2 <= key.step < 1000


@pytest.mark.quick(
    "feed0-job0-the samples trained have digest",
    "feed1-job1-trained 96 target tokens, the feed announced 97",
    "feed3-job3-on 1 of 2 ranks",
)
@pytest.mark.parametrize(
    ("feed", "job", "message"),
    [
        (FormulaFeed(wrong_digest_at_sample=30), {}, "the samples trained have digest"),
        (FormulaFeed(wrong_targets_at_sample=30), {}, "trained 96 target tokens, the feed announced 97"),
        (
            FormulaFeed(poisoned_sample=30),
            {"model__factory": "tests.trainer.member:PoisonModel"},
            "on 1 of 2 ranks",
        ),
        (
            FormulaFeed(poisoned_sample=30),
            {**SHARDS, "model__factory": "tests.trainer.member:PoisonModel"},
            "on 1 of 2 ranks",
        ),
    ],
)
def test_a_wrong_step_is_applied_by_nobody_and_stops_the_run_naming_both_values(tmp_path, feed, job, message):
    # both have the summary before one ends: were its peer gone, a member might not get it
    plans = {name: Plan(hold=("summary_received", 3)) for name in "ab"}
    with members(tmp_path, ["a", "b"], plans, feed=feed, job=tiny_job(**job)) as group:
        launch, errors = group.launch, group.launch.errors
        launch.wait_for(lambda: len(launch.records) == 2 and all(launch.held(name) for name in "ab"))
        for name in "ab":
            launch.release(name)
        group.join_all()
        assert launch.wait_for_end().ended == "failed"
    assert set(errors) == {"a", "b"}
    good = StateKey(attempt=1, generation=1, step=2)
    for error in errors.values():
        assert error.startswith("TrainingError: step 3 ")
        assert message in error
        assert good.point_name in error
    assert [record.step for record in launch.journal().records] == [1, 2]
    assert not launch.outcomes
    assert launch.last_point().key == good


@pytest.mark.parametrize(
    ("text", "code", "generations"),
    [
        ("", "training.collectives_differ", 1),
        ("nobody knows what this means", "cluster.group_not_formed", None),
    ],
    ids=["that do not fit", "unknown"],
)
def test_errors_of_collectives_that_every_group_meets_again_end_the_run(tmp_path, text, code, generations):
    """What is surely nobody's loss stops it at once; what may be one, when it has come too often."""
    changes = {
        "model__factory": "tests.trainer.member:ModelOfCollectives",
        "model__factory_args": {"text": text},
    }
    job = tiny_job(train__parallel="shard", train__numerics="fast", **changes)
    with members(tmp_path, ["a", "b"], job=job) as group:
        ended = group.launch.wait_for_end()
        group.join_all()
        launch = group.launch
    assert (ended.ended, ended.code) == ("failed", code)
    if generations is not None:
        assert len(launch.views) == generations
        assert any(error.startswith("TrainingError: ") for error in launch.errors.values())
    assert launch.journal().records == ()


def test_a_member_that_loses_the_summary_of_a_wrong_step_does_not_apply_it_either(tmp_path):
    feed = FormulaFeed(wrong_digest_at_sample=30)
    # b goes on when the steps before have been reported: its failure ends the run
    plans = {"a": Plan(lose_summary=3), "b": Plan(hold=("summary_received", 3))}
    with members(tmp_path, ["a", "b"], plans, feed=feed) as group:
        launch = group.launch
        launch.wait_for(lambda: len(launch.records) == 2 and launch.held("b") is not None)
        launch.release("b")
        group.join_all()
        assert launch.wait_for_end().ended == "failed"
    # b cannot save alone: they meet again, refuse the step again, and save the state before it
    assert "b" in launch.errors
    assert all(error.startswith("TrainingError: step 3 ") for error in launch.errors.values())
    assert [record.step for record in launch.journal().records] == [1, 2]
    assert launch.last_point().key.step == 2
