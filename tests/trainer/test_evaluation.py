"""Evaluations in the training loop: the numbers of a plain loop on any number of members, repeated after a
loss, without any influence on training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.checkpoint.points.store import CommittedFiles
from orchestrator.config.schema import EvalConfig
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from orchestrator.trainer.evaluation import is_due
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.weights.state_tensors import load
from tests.trainer.launch import Launch, trained_steps
from tests.trainer.member import Plan, eval_parts, members, run_to_end, tiny_job
from tests.trainer.states import begun_state

CPU = torch.device("cpu")


def evals(launch: Launch) -> dict[tuple[int, str], dict[str, Any]]:
    """By step and part, without what differs between runs. What was recorded twice must be equal."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for event in launch.journal().events:
        if event.kind != EventKind.EVALUATED:
            continue
        fields = {k: v for k, v in event.fields.items() if k not in ("generation", "seconds")}
        key = fields.pop("step"), fields.pop("part")
        assert found.setdefault(key, fields) == fields
    return found


def job_of(**changes: Any) -> TrainJob:
    return tiny_job(**{"eval__every_steps": 3, **changes})


def by_hand(launch: Launch, job: TrainJob, name: str) -> tuple[float, int]:
    """The mean cross-entropy of a part in the last state, by plain torch, and the number of its targets."""
    state = begun_state(job.model, job.train, CPU, invariant=True)
    load(state.items(), launch.last_point().key.point_name, CommittedFiles(launch.storage))
    part = next(each for each in eval_parts(job) if each.name == name)
    step = StepRange(first_sample=0, num_samples=23, num_tokens=23 * 8, seq_len=8)
    batch = part.feed.get(step, 0, 1, 1, Cursor())
    labels = torch.from_numpy(batch.labels).long()
    model: Any = state.model.eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.input_ids).long()).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    num = int((labels != -100).sum())
    return float(loss) / num, num


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("plain"), 1)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("evaluated"), 1, job=job_of(eval__at_end=True))


def test_the_numbers_are_those_of_a_plain_loop(evaluated: Launch) -> None:
    found = evals(evaluated)
    assert list(found) == [(step, part) for step in (3, 6, 8) for part in ("held", "few")]
    for part in ("held", "few"):
        loss, num = by_hand(evaluated, job_of(), part)
        there = found[8, part]
        assert there["loss"] == pytest.approx(loss, rel=1e-6)
        assert there["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
        assert there["per_source"] == {"formula": pytest.approx(loss, rel=1e-6)}
        assert (there["targets"], there["samples"]) == (num, 23 if part == "held" else 3)


def test_training_has_the_bits_of_a_run_without_evaluations(plain: Launch, evaluated: Launch) -> None:
    assert evaluated.last_point().state_digest == plain.last_point().state_digest
    assert trained_steps(evaluated) == trained_steps(plain)


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluations_have_the_same_bits_on_any_number_of_members(
    tmp_path: Path, evaluated: Launch, world_size: int
) -> None:
    group = run_to_end(tmp_path, world_size, job=job_of(eval__at_end=True))
    assert evals(group) == evals(evaluated)


@pytest.mark.parametrize(
    ("size", "parallel"),
    [(2, "replicate"), (2, "shard"), (4, {"shard": 2, "replicate": 2})],
    ids=["ddp", "fsdp2", "hsdp"],
)
@pytest.mark.quick("hsdp")
def test_ddp_fsdp2_and_hsdp_evaluate_as_one_process_does(
    tmp_path: Path, evaluated: Launch, size: int, parallel: object
) -> None:
    job = job_of(train__parallel=parallel, train__numerics="fast", eval__at_end=True)
    group = run_to_end(tmp_path / "group", size, job=job)
    for key, fields in evals(evaluated).items():
        there = evals(group)[key]
        assert there["loss"] == pytest.approx(fields["loss"], rel=1e-4)
        assert there["targets"] == fields["targets"]
    without = tiny_job(train__parallel=parallel, train__numerics="fast")
    assert [row[1] for row in trained_steps(group)] == pytest.approx(
        [row[1] for row in trained_steps(run_to_end(tmp_path / "without", size, job=without))], rel=1e-6
    )


def test_a_plug_in_has_its_metrics_and_no_perplexity(tmp_path: Path) -> None:
    job = job_of(
        train__objective="tests.trainer.objectives:with_z_loss", train__max_steps=3, eval__max_samples=5
    )
    alone, group = (evals(run_to_end(tmp_path / str(size), size, job=job)) for size in (1, 2))
    assert alone == group
    there = alone[3, "held"]
    assert there["perplexity"] is None
    assert there["samples"] == 5
    assert there["metrics"]["cross_entropy"] == pytest.approx(there["per_source"]["formula"], rel=1e-6)
    assert there["loss"] > there["metrics"]["cross_entropy"]


def test_a_loss_that_is_not_finite_is_none_and_reported_once(tmp_path: Path) -> None:
    objective = "tests.trainer.objectives:has_no_loss_without_a_gradient"
    launch = run_to_end(tmp_path, 2, job=job_of(train__objective=objective))
    assert [fields["loss"] for fields in evals(launch).values()] == [None] * 4
    found = [e.fields for e in launch.journal().events if e.kind == EventKind.NOT_FINITE]
    assert [(e["step"], e["part"], e["names"]) for e in found] == [
        (3, "held", ["loss"]), (3, "few", ["loss"]),
    ]  # fmt: skip
    assert all(record.loss is not None for record in launch.journal().records)


@pytest.mark.quick("shard")
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_loss_in_the_middle_repeats_the_evaluation(
    tmp_path: Path, evaluated: Launch, parallel: str
) -> None:
    plans = {"m1": Plan(kill=("evaluating", 6))}
    job = job_of(eval__at_end=True, train__parallel=parallel, resume__memory_every_steps=1)
    with members(tmp_path, ["m0", "m1", "m2"], plans, job) as group:
        group.finish()
    found = evals(group.launch)
    assert list(found) == list(evals(evaluated))
    if parallel == "replicate":
        assert found == evals(evaluated)
        assert group.launch.last_point().state_digest == evaluated.last_point().state_digest


def test_the_state_is_saved_before_it_is_evaluated(evaluated: Launch) -> None:
    events = [event for event in evaluated.journal().events]
    saved = [event.fields["point"][:8] for event in events if event.kind == EventKind.POINT_COMMITTED]
    assert saved == ["00000003", "00000006", "00000008"]


@pytest.mark.parametrize(
    ("config", "due"),
    [
        ({"every_steps": 2}, [2, 4, 6]),
        ({"every_tokens": 200}, [3, 5, 7]),  # 96 tokens a step: 288, 480, 672
        ({"every_tokens": 96}, [1, 2, 3, 4, 5, 6, 7]),
        ({"at_end": True}, []),
    ],
)
def test_which_states_are_evaluated(config: dict[str, Any], due: list[int]) -> None:
    of = EvalConfig(**config)
    assert [step for step in range(8) if is_due(of, step, 96 * step, 96)] == due
