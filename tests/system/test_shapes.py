"""Continue with another shape, several times in a row: no token trained twice, none skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import RefusedError
from orchestrator.storage.files import Storage
from tests.data.preferences import pairs, write_pairs
from tests.raising import raises
from tests.system.harness import Job, assert_exactly_once

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]


@pytest.fixture
def job(llama: Job) -> Job:
    """Here with a model of transformers."""
    return llama


@pytest.mark.chaos
def test_world_batch_and_length_change_at_every_start_and_somebody_dies_in_each(
    job: Job, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    # token budgets that are no multiples of anything: last samples are shortened, and the next start goes on
    # behind them
    budget = {"train__max_steps": None, "resume__every_steps": 3}
    plan = job.faults().kill("summary_received", step=5, rank=1)
    first = job.train(
        plan, **budget, train__max_tokens=40_001, train__global_batch_size=16, pack__seq_len=256
    )
    assert (first.outcome, first.consumed_tokens) == ("done", 40_001), first.reason
    other = {"cluster__num_workers": 1, "train__global_batch_size": 24, "pack__seq_len": 128}
    other |= {"data__encoder": "tokenizers"}  # the ids are the same, who makes them changes within a document
    # the only worker dies: the whole group goes back to a point
    second_plan = job.faults().kill("gradient_done", rank=0, step=(first.step or 0) + 8)
    second = job.train(second_plan, **budget, **other, train__max_tokens=77_777)
    assert (second.outcome, second.consumed_tokens) == ("done", 77_777), second.reason
    # back to the first batch, more tokens than before, two workers that leave one CPU for two tokenizers, and
    # the coordinator dies
    third_plan = job.faults().kill("votes_complete")
    beside = {"cluster__cpus_per_worker": 2, "data__num_tokenizers": 2}
    third = job.train(
        third_plan,
        **budget,
        **beside,
        train__max_tokens=100_000,
        train__global_batch_size=16,
        pack__seq_len=128,
    )
    beside_workers = "the tokenizers take no CPU of their own and run beside the workers"
    assert capfd.readouterr().err.count(beside_workers) == 1
    assert (third.outcome, third.consumed_tokens) == ("done", 100_000), third.reason
    assert [len(p.struck()) for p in (plan, second_plan, third_plan)] == [1, 1, 1]
    assert_exactly_once(job)
    spans = survey(RunStore(Storage(job.run.uri))).encoders
    assert [span.encoder.name for span in spans] == ["gigatoken", "tokenizers"], "auto stays with the newest"
    again = job.config(**budget, train__max_tokens=100_000, train__global_batch_size=16, pack__seq_len=128)
    found = orchestrator.plan(again)
    assert (found.action, found.remaining_steps, found.consumed_tokens) == ("resume", 0, 100_000)


@pytest.mark.chaos
def test_packed_documents_are_trained_once_and_within_themselves_through_a_kill_and_another_shape(
    job: Job, cluster: Any
) -> None:
    packed: dict[str, Any] = {"pack__mode": "bestfit", "pack__long_document": "split", "pack__seq_len": 256}
    packed |= {"train__max_steps": None, "resume__every_steps": 3, "monitor__digest_every_steps": 1}
    packed |= {"model__config": None, "model__factory": "tests.system.tiny_model:build_document_model"}
    plan = job.faults().kill("summary_received", step=5, rank=1)
    first = job.train(plan, **packed, train__max_tokens=40_001, train__global_batch_size=16)
    assert (first.outcome, first.consumed_tokens) == ("done", 40_001), first.reason
    with raises(RefusedError, "resume.seq_len_within_window", " 256 ", "pack.seq_len=256"):
        job.train(**{**packed, "pack__seq_len": 128}, train__max_tokens=77_777)
    other = {"cluster__num_workers": 1, "train__global_batch_size": 24}
    second = job.train(**packed, **other, train__max_tokens=77_777)
    assert (second.outcome, second.consumed_tokens) == ("done", 77_777), second.reason
    assert len(plan.struck()) == 1
    report = job.run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert job.run.replay(13).expected_digest


@pytest.mark.chaos
def test_pairs_of_answers_are_trained_once_through_a_kill_and_another_shape(
    job: Job, cluster: Any, tmp_path: Path
) -> None:
    write_pairs(tmp_path / "pairs", pairs(400))
    source = {"name": "pairs", "path": str(tmp_path / "pairs"), "format": "jsonl", "content": "preference"}
    change: dict[str, Any] = {"data__sources": [source], "pack__mode": "pad", "pack__seq_len": 64}
    change |= {"train__objective": "tests.trainer.preference_objectives:margin", "resume__every_steps": 3}
    change |= {"train__objective_units": "samples", "monitor__digest_every_steps": 1}
    plan = job.faults().kill("summary_received", step=5, rank=1)
    first = job.train(plan, **change, train__max_steps=9, train__global_batch_size=16)
    assert (first.outcome, first.consumed_tokens) == ("done", 9 * 16 * 2 * 64), first.reason
    budget = {"train__max_steps": None, "train__max_samples": 301}
    other = {"cluster__num_workers": 1, "train__global_batch_size": 24}
    second = job.train(**change, **budget, **other)
    assert (second.outcome, second.consumed_tokens) == ("done", 301 * 2 * 64), second.reason
    assert len(plan.struck()) == 1
    report = job.run.audit()
    assert report["exactly_once"], report["first_difference"]
    found = job.run.replay(tokens=second.consumed_tokens)
    assert (found.equal, found.first_difference) == (True, None)


def test_a_stop_that_is_reached_ends_at_once_and_what_must_stay_is_refused(
    finished: Job, cluster: Any
) -> None:
    again = finished.train()
    assert (again.outcome, again.consumed_tokens) == ("done", 16 * 8 * 32)
    assert len(finished.run.records()) == 16
    with raises(RefusedError, "resume.changed_setting", "data.seed=0", " 7"):
        finished.train(data__seed=7)
    assert_exactly_once(finished)
