"""A run on pairs of answers under torchrun: a rank is killed, and another number of ranks continues with
another batch; each pair is trained once, and the bits are those of one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import orchestrator
from tests.data.preferences import pairs, preference_mapping, write_pairs
from tests.system.harness import Job
from tests.torchrun.ranks import ranks

pytestmark = [pytest.mark.xdist_group("forked"), pytest.mark.timeout(900)]

LIMIT_S = 300.0
PAIRS = pairs(120)
FIRST = {"train__max_steps": 5}
THEN: dict[str, Any] = {"train__max_steps": None, "train__max_samples": 90, "train__global_batch_size": 12}


def job_of(make: Any, folder: Path, **more: Any) -> Job:
    write_pairs(folder / "pairs", PAIRS)
    change = {
        "train.micro_batch_size": 3,
        "resume.every_steps": 2,
        "data.holdout": 0.2,
        "eval.at_end": True,
        "monitor.digest_every_steps": 1,
        "monitor.document_losses": 3,
        **more,
    }
    return Job(preference_mapping(make, folder / "pairs", change), folder)


def train(job: Job, folder: Path, world_size: int, *, faults: Any = None, **changes: Any) -> list[int | None]:
    with ranks(folder, world_size, job.config(**changes), faults) as group:
        return group.end(LIMIT_S)


@pytest.fixture(scope="module")
def runs(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job]:
    """A run with a kill and another world and batch, and one of a single rank with the same batches."""
    folder = tmp_path_factory.mktemp("preferences")
    broken, alone = (job_of(tiny_config, folder) for _ in range(2))
    plan = broken.faults().kill("gradient_done", step=4, rank=1)
    assert train(broken, folder, 2, faults=plan, **FIRST) == [1, -9]
    for world_size, changes in ((3, FIRST), (2, THEN)):
        assert not any(train(broken, folder, world_size, **changes))
        assert not any(train(alone, folder, 1, **changes))
    return broken, alone


@pytest.mark.chaos
def test_each_pair_is_trained_once_and_the_bits_are_those_of_one_rank(runs: tuple[Job, Job]) -> None:
    broken, alone = runs
    for job in runs:
        report = job.run.audit()
        assert report["exactly_once"], report["first_difference"]
        records = job.run.records()
        last = records[-1]
        assert (last.consumed_samples, last.consumed_tokens) == (90, 90 * 2 * 48)
        assert all(0 <= (record.metrics or {})["accuracy"] <= 1 for record in records)
    assert broken.losses() == alone.losses()
    assert broken.final_digest() == alone.final_digest()


@pytest.mark.chaos
def test_steps_are_replayed_and_the_last_state_is_evaluated_again(runs: tuple[Job, Job]) -> None:
    broken, _ = runs
    found = broken.run.replay(4)
    assert (found.equal, found.first_difference) == (True, None)
    assert found.weights_digest == found.expected_digest
    (now,) = [each for each in broken.run.evaluate("latest") if each.part == "holdout"]
    then = broken.run.evals()
    (row,) = [row for row in then.itertuples() if (row.attempt, row.step) == (3, now.step)]
    assert (row.loss, row.samples, row.targets) == (now.loss, now.samples, now.targets)
    assert 0 < now.samples < 60


@pytest.mark.chaos
def test_samples_show_both_answers_with_their_prompt(runs: tuple[Job, Job]) -> None:
    broken, _ = runs
    found = broken.run.list_samples(2, text=True)
    assert found["matches"]
    assert len(found["samples"]) == 8
    texts = {(each["prompt"] + each["chosen"], each["prompt"] + each["rejected"]) for each in PAIRS}
    end = "<|endoftext|>"
    for sample in found["samples"]:
        chosen, rejected = sample["documents"]
        assert (chosen["text"].removesuffix(end), rejected["text"].removesuffix(end)) in texts
        assert chosen["line"] == rejected["line"]
        assert all(document["begins"] and document["ends"] for document in (chosen, rejected))


def test_a_run_of_texts_is_not_continued_with_pairs(tiny_config: Any, tmp_path: Path) -> None:
    job = job_of(tiny_config, tmp_path)
    text = {"name": "texts", "path": str(tmp_path / "pairs"), "format": "jsonl", "text_field": "prompt"}
    texts = {
        "data__sources": [text],
        "train__objective": "causal_lm",
        "train__objective_units": "targets",
        "monitor__document_losses": None,
        "resume__every_steps": 1,
    }
    train(job, tmp_path, 1, **texts, train__max_steps=1)
    found = orchestrator.plan(job.config())
    assert (found.action, "resume.changed_setting" in found.codes) == ("refuse", True)
    assert any("samples have 1 rows" in text for text in found.refusals)
