"""Steps that `train.on_nonfinite` and `train.on_spike` leave out: the same on any number of members, through
lost summaries, kills, restarted coordinators and resumes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.inspect.audit.audit import skipped_notes, skipped_steps, wrong_decision
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.trainer.feed import FormulaFeed
from tests.trainer.launch import Launch, trained_steps
from tests.trainer.member import Plan, members, run_to_end, tiny_job

BAD = 6  # the step with sample 66, of steps of 12 samples
FEED = FormulaFeed(poisoned_sample=66)
SPIKE = {"window": 4, "threshold": 6.0, "action": "skip_step"}
POLICIES: dict[str, dict[str, Any]] = {
    "nonfinite": {"model__factory": "tests.trainer.member:PoisonModel", "train__on_nonfinite": "skip_step"},
    "spike": {"model__factory": "tests.trainer.member:SpikeModel", "train__on_spike": SPIKE},
}


def job_of(cause: str, **changes: Any) -> TrainJob:
    return tiny_job(**{**POLICIES[cause], "resume__every_steps": 1, **changes})


def settings(cause: str, **changes: Any) -> dict[str, Any]:
    job = job_of(cause, **changes)
    return {"job": job, "feed": FEED, "policies": job.train}


@pytest.fixture(scope="module", params=list(POLICIES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Launch]:
    """The cause, and a run of one process that nothing disturbs."""
    cause = request.param
    return cause, run_to_end(tmp_path_factory.mktemp(cause), 1, **settings(cause))


@pytest.mark.quick("nonfinite")
def test_a_skipped_step_moves_label_place_and_schedule_and_no_weight(
    tmp_path: Path, alone: tuple[str, Launch]
) -> None:
    cause, launch = alone
    records = {record.step: record for record in launch.journal().records}
    assert [step for step, record in records.items() if record.skipped is not None] == [BAD]
    bad = records[BAD]
    assert (bad.skipped, bad.loss is None) == (cause, cause == "nonfinite")
    assert bad.consumed_samples == BAD * 12
    assert bad.lr == records[BAD + 1].lr == 0.01, "behind the warm-up"
    runs = [
        run_to_end(tmp_path / str(last), 1, **settings(cause, train__max_steps=last))
        for last in (BAD - 1, BAD, BAD + 1)
    ]
    digests = [run.last_point().state_digest for run in runs]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.quick(
    "nonfinite-killed",
    "spike-three",
    "nonfinite-summary of the next lost",
    "spike-summary of the step lost",
)
@pytest.mark.parametrize(
    ("names", "plans"),
    [
        ("abc", {}),
        ("ab", {"b": Plan(lose_summary=BAD)}),
        ("ab", {"b": Plan(lose_summary=BAD + 1)}),
        ("ab", {"b": Plan(kill=("applied", BAD))}),
    ],
    ids=["three", "summary of the step lost", "summary of the next lost", "killed"],
)
def test_the_state_is_the_same_to_the_bit_whatever_happens(
    tmp_path: Path, alone: tuple[str, Launch], names: str, plans: dict[str, Plan]
) -> None:
    cause, expected = alone
    with members(tmp_path, names, plans, **settings(cause)) as group:
        group.finish()
    assert group.launch.last_point().state_digest == expected.last_point().state_digest
    assert trained_steps(group.launch) == trained_steps(expected)


def test_a_coordinator_that_begins_anew_knows_the_losses_before(
    tmp_path: Path, alone: tuple[str, Launch]
) -> None:
    cause, expected = alone
    with members(tmp_path, "ab", {"a": Plan(hold=("step_begin", BAD))}, **settings(cause)) as group:
        group.launch.wait_for(lambda: group.launch.held("a") is not None)
        group.launch.restart_coordinator()
        group.launch.release("a")
        group.finish()
    assert group.launch.last_point().state_digest == expected.last_point().state_digest


def test_a_resume_in_front_of_the_step_knows_the_losses_before(
    tmp_path: Path, alone: tuple[str, Launch]
) -> None:
    cause, expected = alone
    first = run_to_end(tmp_path, 1, **settings(cause, train__max_steps=BAD - 1))
    name = first.last_point().key.point_name
    later = run_to_end(tmp_path, 2, attempt=2, point=name, **settings(cause))
    assert later.last_point().state_digest == expected.last_point().state_digest
    seen = survey(RunStore(later.storage))
    assert [record.skipped for record in seen.lineage.records] == [
        cause if step == BAD else None for step in range(1, 9)
    ]
    assert wrong_decision(seen, range(8)) is None


def test_shards_skip_the_same_step(tmp_path: Path, alone: tuple[str, Launch]) -> None:
    cause, expected = alone
    shards = {"train__parallel": "shard", "train__numerics": "fast"}
    group = run_to_end(tmp_path, 2, sharded=True, **settings(cause, **shards))
    skipped = [record.skipped for record in group.journal().records]
    assert skipped == [record.skipped for record in expected.journal().records]


@pytest.mark.quick("muon")
@pytest.mark.parametrize("optimizer", ["muon", "tests.trainer.optimizers:Normed"])
def test_shards_that_step_whole_parameters_skip_the_same_step(tmp_path: Path, optimizer: str) -> None:
    """Normed fails on a gradient that is not finite."""
    for cause in POLICIES:
        settings_of_all = {"train__optimizer": optimizer, "train__numerics": "fast"}
        one = run_to_end(tmp_path / cause / "one", 1, **settings(cause, **settings_of_all))
        shards = settings(cause, **settings_of_all, train__parallel="shard")
        group = run_to_end(tmp_path / cause / "group", 2, sharded=True, **shards)
        skipped = [record.skipped for record in group.journal().records]
        assert skipped == [cause if step == BAD else None for step in range(1, 9)]
        losses = [record.loss for record in group.journal().records if record.skipped is None]
        expected = [record.loss for record in one.journal().records if record.skipped is None]
        assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.quick("muon")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_skipped_step_of_shards_leaves_optimizer_and_averages_as_they_are(
    tmp_path: Path, optimizer: str
) -> None:
    """A spike is finite, so the step of an optimizer that works on whole matrices is computed before."""
    changes = {"train__parallel": "shard", "train__numerics": "fast", "train__optimizer": optimizer}
    changes |= {"train__ema": 0.9}
    digests = []
    for last in (BAD - 1, BAD, BAD + 1):
        given = settings("spike", train__max_steps=last, **changes)
        launch = run_to_end(tmp_path / str(last), 2, sharded=True, **given)
        digests.append(launch.last_point().state_digest)
    assert digests[0] == digests[1] != digests[2]


def ended(folder: Path, code: str, *values: str, **settings: Any) -> Launch:
    """A launch that a policy ends; the state before the step is its last point."""
    with members(folder, "ab", **settings) as group:
        status = group.launch.wait_for_end()
        group.join_all()
    assert (status.ended, status.code) == ("failed", code)
    assert all(value in status.reason for value in values), status.reason
    return group.launch


def test_a_policy_that_stops_saves_the_state_before_the_step(tmp_path: Path) -> None:
    stop = settings("spike", train__on_spike={**SPIKE, "action": "stop"})
    launch = ended(tmp_path, "training.step_refused", f"step {BAD} ", "standard deviations", **stop)
    assert launch.last_point().key.step == BAD - 1


def test_a_budget_counts_the_skipped_steps_of_the_whole_history(tmp_path: Path) -> None:
    once = settings("nonfinite", train__on_nonfinite={"action": "skip_step", "budget": 1})
    first = run_to_end(tmp_path, 1, **once)
    longer = settings(
        "nonfinite", train__on_nonfinite={"action": "skip_step", "budget": 1}, train__max_steps=12
    )
    second = longer | {"feed": FormulaFeed(poisoned_sample=120)}
    point = first.last_point().key.point_name
    values = ("step 11 ", "train.on_nonfinite", "1 steps", "budget is 1")
    launch = ended(tmp_path, "training.skip_budget", *values, attempt=2, point=point, **second)
    assert launch.last_point().key.step == 10


def test_the_audit_names_skipped_steps_and_decides_each_again(alone: tuple[str, Launch]) -> None:
    cause, launch = alone
    seen = survey(RunStore(launch.storage))
    (row,) = skipped_steps(seen, range(8))
    assert row == {
        "attempt": 1,
        "point": None,
        "setting": f"train.on_{cause}",
        "first_index": 60,
        "samples": 12,
        "tokens": 96,
    }
    assert skipped_steps(seen, range(BAD, 8)) == []
    (note,) = skipped_notes(seen, range(8))
    assert f"step {BAD} " in note
    assert wrong_decision(seen, range(8)) is None


@pytest.mark.parametrize(("step", "skipped"), [(BAD, None), (BAD + 1, "spike"), (BAD, "other")])
def test_the_audit_finds_a_step_that_was_skipped_or_applied_against_the_policy(
    alone: tuple[str, Launch], step: int, skipped: str | None
) -> None:
    cause, launch = alone
    if cause == "nonfinite" and skipped is None:
        return  # of a loss that was not finite nothing but the cause is recorded
    seen = survey(RunStore(launch.storage))
    records = list(seen.lineage.records)
    other = "spike" if cause == "nonfinite" else "nonfinite"
    records[step - 1] = replace(records[step - 1], skipped=other if skipped == "other" else skipped)
    changed = replace(seen, lineage=replace(seen.lineage, records=tuple(records)))
    found = wrong_decision(changed, range(8))
    assert found is not None
    assert found["step"] == str(step)
    assert wrong_decision(changed, range(step - 1)) is None
