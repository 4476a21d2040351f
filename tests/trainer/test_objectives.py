"""Plug-in objectives: the same bits as the built-in loss on any number of members, metrics, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.errors import ConfigError, TrainingError
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import decode
from orchestrator.records.cursor import Cursor
from orchestrator.records.run_status import GroupChange
from orchestrator.trainer.comm.interruptible import BACKEND, Interruptible
from orchestrator.trainer.interfaces.loop_interface import TrainJob, next_range
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.objective.logit_loss import LossTerms
from orchestrator.trainer.objective.micro_batches import NumberedMicroBatch, StepPlace, cut
from orchestrator.trainer.objective.objective import causal_lm_terms, objective_of
from orchestrator.trainer.objective.plug_in import PlugIn
from tests.raising import raises
from tests.trainer.feed import FormulaFeed
from tests.trainer.launch import Launch, trained_steps
from tests.trainer.member import Plan, members, run_to_end, tiny_job

CPU = torch.device("cpu")
PLACE = StepPlace(step=1, consumed_tokens=0)


def job_of(name: str, **changes: object) -> TrainJob:
    return tiny_job(train__objective=f"tests.trainer.objectives:{name}", **changes)


def metrics(launch: Launch) -> list[dict[str, float | None]]:
    return [dict(record.metrics or {}) for record in launch.journal().records]


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("built_in"), 1)


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_built_in_loss_as_a_plug_in_gives_its_bits(
    tmp_path: Path, built_in: Launch, world_size: int
) -> None:
    launch = run_to_end(tmp_path, world_size, job=job_of("cross_entropy"))
    assert launch.last_point().state_digest == built_in.last_point().state_digest
    assert trained_steps(launch) == trained_steps(built_in)
    assert [record.metrics for record in launch.journal().records] == [None] * 8


def test_metrics_have_the_same_bits_on_any_number_of_members(tmp_path: Path, built_in: Launch) -> None:
    job = job_of("with_z_loss", train__objective_args={"weight": 0.1})
    alone, group = (run_to_end(tmp_path / str(size), size, job=job) for size in (1, 3))
    assert group.last_point().state_digest == alone.last_point().state_digest
    assert alone.last_point().state_digest != built_in.last_point().state_digest
    found = metrics(alone)
    assert metrics(group) == found
    losses = [record.loss for record in alone.journal().records]
    for number, (loss, of_step) in enumerate(zip(losses, found, strict=True)):
        assert list(of_step) == sorted(of_step)
        assert loss == pytest.approx(of_step["cross_entropy"] + 0.1 * of_step["z_loss"], rel=1e-6)
        assert (of_step["number"], of_step["tokens_before"]) == (number + 1, number * 12 * 8)
        assert of_step["first_sample"] == number * 12 + 5  # the mean of 0, 2, …, 10
        assert of_step["source"] == 0
        assert of_step["never"] is None
    drawn = [of_step["drawn"] for of_step in found]
    assert len(set(drawn)) == 8, "the generator has other numbers in each step"


def test_metrics_that_are_not_finite_are_reported_once_in_each_generation(tmp_path: Path) -> None:
    job = job_of("has_metrics_without_values")
    with members(tmp_path, "ab", {"b": Plan(kill=("applied", 6))}, job=job) as group:
        group.finish()
    launch = group.launch
    for record in launch.journal().records:
        value = 1.0 if record.step < 3 else None
        assert record.metrics == {"inf": value, "nan": value, "never": None, "right": 2.0}
    events = [e.fields for e in launch.journal().events if e.kind == EventKind.NOT_FINITE]
    assert [(e["generation"], e["names"], e["part"]) for e in events] == [
        (1, ["inf", "nan"], ""), (2, ["inf", "nan"], ""),
    ]  # fmt: skip
    assert events[0]["step"] == 3
    assert len([text for text in launch.status().warnings if "inf, nan" in text and "step 3" in text]) == 1


@pytest.mark.quick("shard")
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_ddp_and_fsdp_train_a_plug_in_as_one_process_does(tmp_path: Path, parallel: str) -> None:
    """12 samples in micro-batches of 5 are three of them, so one of two members runs an empty one."""
    changes = {"train__micro_batch_size": 5}
    alone = run_to_end(tmp_path / "alone", 1, job=job_of("with_z_loss", **changes))
    fast = {"train__parallel": parallel, "train__numerics": "fast"}
    group = run_to_end(tmp_path / "group", 2, job=job_of("with_z_loss", **changes, **fast))
    for mine, theirs in zip(metrics(group), metrics(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert [row[1] for row in trained_steps(group)] == pytest.approx(
        [row[1] for row in trained_steps(alone)], rel=1e-4
    )


def test_ddp_sums_the_gradient_of_parts_of_the_model_that_are_called_several_times(tmp_path: Path) -> None:
    alone = run_to_end(tmp_path / "alone", 1, job=job_of("two_calls"))
    group = run_to_end(tmp_path / "group", 2, job=job_of("two_calls", train__numerics="fast"))
    assert [row[1:3] for row in trained_steps(group)] == [
        pytest.approx(row[1:3], rel=1e-4) for row in trained_steps(alone)
    ]


def test_the_loss_of_samples_is_divided_by_their_number(tmp_path: Path, built_in: Launch) -> None:
    launch = run_to_end(tmp_path, 2, job=tiny_job(train__objective_units="samples", train__max_steps=2))
    record, first = (each.journal().records[0] for each in (launch, built_in))
    assert record.loss == pytest.approx(first.loss * first.target_tokens / 12, rel=1e-6)


# ---------------------------------------------------------------------------------------- the built-in one
def test_the_built_in_z_loss_is_that_of_a_plug_in_and_a_metric(tmp_path: Path) -> None:
    arguments = {"z_loss": 0.1}
    job = tiny_job(train__objective_args=arguments, train__max_steps=4)
    mine = run_to_end(tmp_path / "mine", 3, job=job)
    theirs_job = job_of("with_z_loss", train__objective_args={"weight": 0.1}, train__max_steps=4)
    theirs = run_to_end(tmp_path / "theirs", 1, job=theirs_job)
    assert [row[1] for row in trained_steps(mine)] == pytest.approx(
        [row[1] for row in trained_steps(theirs)], rel=1e-6
    )
    for here, there in zip(metrics(mine), metrics(theirs), strict=True):
        assert list(here) == ["cross_entropy", "z_loss"]
        assert here["cross_entropy"] == pytest.approx(there["cross_entropy"], rel=1e-6)
        assert here["z_loss"] == pytest.approx(0.1 * there["z_loss"], rel=1e-6)


class Logits(torch.nn.Module):
    """A model whose output are its weights."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_smoothed_labels_and_capped_logits_are_what_their_formulas_say() -> None:
    logits = 5 * torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[3, 0, -100, 10], [1, -100, -100, 2]])
    of = LossTerms(label_smoothing=0.2, logit_softcap=2.0, z_loss=0.5)
    found = causal_lm_terms(Logits(logits), labels.clamp(min=0), labels, "float32", of=of)
    exact = 2.0 * (logits.double() / 2.0).tanh()
    chances = exact.log_softmax(-1)
    expected = entropy = z_loss = 0.0
    for row, label in zip(chances.flatten(0, 1), labels.flatten(), strict=True):
        if label >= 0:
            spread = torch.full((11,), 0.2 / 11, dtype=torch.float64)
            spread[label] += 0.8
            expected -= float(spread @ row)
            entropy -= float(row[label])
    z_loss = 0.5 * float((exact.logsumexp(-1)[labels >= 0] ** 2).sum())
    assert float(found.loss_sum.detach()) == pytest.approx(expected + z_loss, rel=1e-6)
    assert float(found.metrics["cross_entropy"].sum) == pytest.approx(entropy, rel=1e-6)
    assert float(found.metrics["z_loss"].sum) == pytest.approx(z_loss, rel=1e-6)
    assert int(found.metrics["z_loss"].count) == 5


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"zloss": 0.1}, "config.unknown_key"),
        ({"z_loss": -0.1}, "config.invalid_value"),
        ({"label_smoothing": 1.0}, "config.invalid_value"),
        ({"logit_softcap": 0}, "config.invalid_value"),
        ({"z_loss": True}, "config.invalid_value"),
    ],
)
def test_arguments_that_the_built_in_objective_does_not_take_are_refused(
    arguments: dict[str, float], code: str
) -> None:
    with raises(ConfigError, code, *arguments):
        tiny_job(train__objective_args=arguments)


# ------------------------------------------------------------------------------------------------ refusals
def tried(name: str, **changes: object) -> PlugIn:
    job = job_of(name, **changes)
    objective = objective_of(job.train, job.document_attention, job.seq_len)
    assert isinstance(objective, PlugIn)
    objective.prepare(build_model(job.model, "float32", 0, CPU, invariant=True))
    return objective


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("nothing_there", "objective.not_callable"),
        ("returns_a_tensor", "objective.terms"),
        ("returns_a_vector", "objective.terms"),
        ("sums_each_row", "objective.terms"),
        ("has_a_negative_count", "objective.terms"),
        ("returns_a_constant", "objective.terms"),
        ("has_a_metric_of_no_number", "objective.terms"),
        ("has_the_metric_loss", "objective.terms"),
        ("has_per_token_of_another_shape", "objective.terms"),
        ("raises", "objective.fails"),
        ("counts_its_calls", "objective.impure"),
        ("writes_a_weight", "objective.impure"),
    ],
)
def test_an_objective_that_is_not_as_documented_is_refused_before_training(name: str, code: str) -> None:
    with raises(ConfigError, code):
        tried(name)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("tests.trainer.objectives:cross_entrpy", "tests.trainer.objectives:cross_entropy"),
        ("tests.trainer.objectivs:cross_entropy", "tests.trainer.objectives:cross_entropy"),
        ("tests.triner.objectives:cross_entropy", "tests.trainer.objectives:cross_entropy"),
        ("tests.trainer.objectives:zzz", None),
    ],
)
def test_a_misspelled_objective_is_answered_with_the_nearest_names(path: str, near: str | None) -> None:
    with raises(ConfigError, "objective.not_callable", path) as refused:
        PlugIn(path, {}, 0, "float32", False, 8)
    assert ("did you mean" in str(refused.value)) == (near is not None)
    assert near is None or f"did you mean {near}" in str(refused.value)


def test_arguments_that_the_objective_does_not_take_are_refused() -> None:
    with raises(ConfigError, "objective.not_callable"):
        tried("with_z_loss", train__objective_args={"wieght": 0.1})


def first_micro(job: TrainJob) -> NumberedMicroBatch:
    step = next_range(job, Cursor())
    assert step is not None
    return cut(FormulaFeed().get(step, 0, 1, 2, Cursor()), 2, 0, 1, CPU)[0]


def test_other_metrics_in_a_later_step_are_refused() -> None:
    objective, job = tried("changes_its_metrics"), job_of("changes_its_metrics")
    model = build_model(job.model, "float32", 0, CPU, invariant=True)
    objective.terms(model, first_micro(job), PLACE)
    with raises(TrainingError, "objective.terms"):
        objective.terms(model, first_micro(job), StepPlace(step=2, consumed_tokens=96))


def test_an_objective_may_state_the_difference_between_two_evaluations() -> None:
    assert tried("nearly_pure").metric_names == ()


@pytest.mark.parametrize("name", ["raises_in_step_3", "exits_in_step_3"])
def test_an_objective_that_raises_while_it_trains_ends_the_run_by_name_and_line(name: str) -> None:
    objective, job = tried(name), job_of(name)
    model = build_model(job.model, "float32", 0, CPU, invariant=True)
    place = StepPlace(step=3, consumed_tokens=0)
    with raises(TrainingError, "objective.fails", name, "step 3", "objectives.py:", f" in {name}"):
        objective.terms(model, first_micro(job), place)


@pytest.mark.quick("all", "evaluation", "fsdp2")
@pytest.mark.parametrize(
    ("name", "step", "changes"),
    [
        ("raises_in_step_3", 2, {}),
        ("raises_for_sample_30", 2, {}),
        ("raises_for_sample_30", 2, {"train__numerics": "fast"}),
        ("raises_for_sample_30", 2, {"train__numerics": "fast", "train__parallel": "shard"}),
        ("raises_without_a_gradient", 4, {"eval__every_steps": 4}),
    ],
    ids=["all", "one", "ddp", "fsdp2", "evaluation"],
)
def test_before_the_run_ends_because_an_objective_raises_the_state_before_is_saved(
    tmp_path: Path, name: str, step: int, changes: dict[str, Any]
) -> None:
    job = job_of(name, **changes)
    with members(tmp_path, "ab", job=job, sharded="train__parallel" in changes) as group:
        group.join_all()
    launch = group.launch
    status, point = launch.wait_for_end(), launch.last_point()
    assert (status.ended, status.code) == ("failed", "objective.fails")
    assert point.key.step == step
    failed_in = step if "eval__every_steps" in changes else step + 1
    assert name in status.reason
    assert f"step {failed_in}" in status.reason
    assert point.key.point_name in status.reason or f"point of step {step}" in status.reason
    assert [record.step for record in launch.journal().records] == list(range(1, step + 1))
    assert sentences.untold(status.lost, status.reason) == []
    formed = [each for each in launch.journal().events if each.kind == EventKind.GROUP_FORMED]
    told = [sentences.group_change(decode(GroupChange, {**each.fields, "attempt": 1})) for each in formed]
    if name == "raises_in_step_3":
        assert told[1].startswith(f"train.objective=tests.trainer.objectives:{name} raised in step 3")
        assert told[1].endswith(f"in {name}) · {sentences.NO_CHANGE}"), "and nothing of a group or of losses"
    if not changes:
        right = job_of("cross_entropy", train__max_steps=step)
        expected = run_to_end(tmp_path / "right", 2, job=right)
        assert point.state_digest == expected.last_point().state_digest


def test_an_objective_that_raises_in_the_first_step_ends_the_run_without_a_point(tmp_path: Path) -> None:
    with members(tmp_path, "a", job=job_of("raises_for_sample_3")) as group:
        group.join_all()
    status = group.launch.wait_for_end()
    assert (status.ended, status.code) == ("failed", "objective.fails")
    assert not group.launch.points


@pytest.mark.quick("writes_a_weight_without_a_gradient-2-replicate", "writes_a_weight_in_step_3-3-shard")
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
@pytest.mark.parametrize(
    ("name", "step"), [("writes_a_weight_in_step_3", 3), ("writes_a_weight_without_a_gradient", 2)]
)
def test_an_objective_that_writes_a_weight_ends_the_run_in_that_step_by_name(
    tmp_path: Path, name: str, step: int, parallel: str
) -> None:
    fast = {"train__parallel": parallel, "train__numerics": "fast", "eval__every_steps": 2}
    job = job_of(name, resume__every_steps=1, **fast)
    with members(tmp_path, "ab", job=job, sharded=parallel == "shard") as group:
        group.join_all()
    status = group.launch.wait_for_end()
    assert (status.ended, status.code) == ("failed", "objective.impure")
    for value in (name, "weight", f"step {step}"):
        assert value in status.reason
    assert max(record.step for record in group.launch.journal().records) == 2


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
def test_a_collective_is_refused_by_name(backend: str) -> None:
    objective, job = tried("sums_over_ranks"), job_of("sums_over_ranks")
    model = build_model(job.model, "float32", 0, CPU, invariant=True)
    Interruptible().register()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with raises(TrainingError, "objective.impure", "sums_over_ranks"):
            objective.check(model, first_micro(job), PLACE)
        dist.all_reduce(torch.ones(1))  # it is refused to the objective alone
    finally:
        dist.destroy_process_group()


def test_a_model_without_weights_gives_the_names_of_the_metrics() -> None:
    job = job_of("with_z_loss")
    objective = objective_of(job.train, job.document_attention, job.seq_len)
    assert isinstance(objective, PlugIn)
    with torch.device("meta"):
        model = build_model(job.model, "float32", 0, torch.device("meta"), invariant=True)
    objective.prepare(model)
    assert "z_loss" in objective.metric_names


@pytest.mark.parametrize("name", ["two_calls", "calls_the_model_with_parts_of_rows"])
def test_an_objective_that_loses_document_borders_is_refused(name: str) -> None:
    job = job_of(name)
    objective = objective_of(job.train, True, job.seq_len)
    assert isinstance(objective, PlugIn)
    with raises(ConfigError, "objective.call"):
        objective.prepare(build_model(job.model, "float32", 0, CPU, invariant=True))
