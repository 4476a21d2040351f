"""The loss of each source and of the worst documents, from the losses of the tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.errors import TrainingError
from orchestrator.history.journal.journal_reader import documents_of
from orchestrator.objectives import MicroBatch, Terms
from orchestrator.records.steps import DocumentLoss
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.objective.micro_batches import NO_LOSS, NumberedMicroBatch
from orchestrator.trainer.objective.token_losses import TokenLosses, highest
from tests.raising import raises
from tests.trainer.launch import Launch
from tests.trainer.member import members, run_to_end, tiny_job

SOURCES = {0: "web", 2: "a.b-c"}
NAN = math.nan


def micro(first: int, documents: list[list[int]], silent: list[list[int]], sources: list[int]) -> Any:
    """A micro-batch. `silent` has 1 where there is no target."""
    ids = torch.tensor(documents, dtype=torch.int32)
    rows = torch.arange(first, first + len(documents), dtype=torch.int32)[:, None]
    batch = MicroBatch(
        input_ids=torch.zeros_like(ids),
        labels=torch.where(torch.tensor(silent) == 1, NO_LOSS, 1).int(),
        document_ids=ids,
        source_ids=torch.tensor(sources, dtype=torch.int32)[:, None].expand_as(ids),
        sample_indices=rows.expand_as(ids),
    )
    return NumberedMicroBatch(number=0, first_sample=first, has_padding=True, batch=batch)


def terms(losses: list[list[float]]) -> Terms:
    per_token = torch.tensor(losses)
    return Terms(per_token.sum(), per_token=per_token)


FIRST = (
    terms([[1.0, 3.0, 5.0, 0.0], [2.0, 2.0, 8.0, 0.0]]),
    micro(5, [[0, 0, 1, -1], [0, 1, 1, 1]], [[0, 0, 0, 1], [0, 0, 0, 1]], [0, 2]),
)
SECOND = (terms([[7.0, 1.0, NAN, 9.0]]), micro(7, [[0, 0, 1, 2]], [[0, 0, 0, 1]], [2]))
EXPECTED = [
    DocumentLoss(sample=7, document=1, loss=None, targets=1),
    DocumentLoss(sample=5, document=1, loss=5.0, targets=1),
    DocumentLoss(sample=6, document=1, loss=5.0, targets=2),
    DocumentLoss(sample=7, document=0, loss=4.0, targets=2),
    DocumentLoss(sample=5, document=0, loss=2.0, targets=2),
    DocumentLoss(sample=6, document=0, loss=2.0, targets=1),
]


@pytest.mark.parametrize("num", [1, 3, 6, 100])
@pytest.mark.parametrize("together", [True, False])
def test_the_worst_documents_of_a_step_are_those_of_all_ranks(num: int, together: bool) -> None:
    ranks = [[FIRST, SECOND]] if together else [[FIRST], [SECOND], []]
    packed = []
    for micros in ranks:
        losses = TokenLosses(SOURCES, num)
        losses.metrics(*SECOND)
        losses.begin()
        for each in micros:
            losses.metrics(*each)
        packed.append(losses.packed())
    assert list(TokenLosses(SOURCES, num).of_step(packed)) == EXPECTED[:num]
    assert len({len(values) for values in packed}) == 1, "a collective needs as many of each rank"


def test_the_loss_of_a_source_is_that_of_its_targets_and_a_single_one_has_none() -> None:
    losses = TokenLosses(SOURCES, 0)
    assert losses.names == ("loss/web", "loss/a.b-c")
    found = losses.metrics(*FIRST)
    sums = {name: (float(mean.sum), float(mean.count)) for name, mean in found.items()}
    assert sums == {"loss/web": (9.0, 3.0), "loss/a.b-c": (12.0, 3.0)}
    assert losses.packed() == []
    assert TokenLosses({0: "web"}, 3).names == ()


def test_an_objective_without_losses_per_token_has_no_values_and_refuses_documents() -> None:
    bare = Terms(torch.tensor(1.0))
    assert [mean.count for mean in TokenLosses(SOURCES, 0).metrics(bare, FIRST[1]).values()] == [0.0, 0.0]
    with raises(TrainingError, "objective.no_per_token", "monitor.document_losses=2", "per_token"):
        TokenLosses(SOURCES, 2).metrics(bare, FIRST[1])


def job_of(**changes: Any) -> TrainJob:
    return replace(tiny_job(**changes), sources={0: "formula", 1: "other"}, document_losses=3)


def documents(launch: Launch) -> list[tuple[DocumentLoss, ...]]:
    return [documents_of(launch.storage, record.key) for record in launch.journal().records]


def test_the_journal_has_the_same_documents_and_losses_on_any_number_of_members(tmp_path: Path) -> None:
    plain = run_to_end(tmp_path / "plain", 1)
    alone, group = (run_to_end(tmp_path / str(size), size, job=job_of()) for size in (1, 3))
    assert group.last_point().state_digest == alone.last_point().state_digest
    assert alone.last_point().state_digest == plain.last_point().state_digest, "nothing else is trained"
    assert documents(group) == documents(alone)
    for number, (record, found) in enumerate(zip(alone.journal().records, documents(alone), strict=True)):
        assert list(found) == highest(found, 3)
        assert all(number * 12 <= each.sample < number * 12 + 12 for each in found)
        assert found[0].loss is not None
        assert record.loss is not None
        assert found[0].loss > record.loss
        assert record.metrics == {"loss/formula": pytest.approx(record.loss), "loss/other": None}
    assert [record.metrics for record in group.journal().records] == [
        record.metrics for record in alone.journal().records
    ]


def test_shards_record_the_documents_of_one_process(tmp_path: Path) -> None:
    alone = run_to_end(tmp_path / "alone", 1, job=job_of())
    shards = {"train__parallel": "shard", "train__numerics": "fast"}
    group = run_to_end(tmp_path / "group", 2, job=job_of(**shards), sharded=True)
    firsts = [[each[0].loss for each in documents(launch)] for launch in (group, alone)]
    assert firsts[0] == pytest.approx(firsts[1], rel=1e-4)


def test_a_plug_in_without_losses_per_token_ends_the_run_by_name(tmp_path: Path) -> None:
    job = job_of(train__objective="tests.trainer.objectives:cross_entropy")
    with members(tmp_path, "ab", job=job) as group:
        status = group.launch.wait_for_end()
        group.join_all()
    assert (status.ended, status.code) == ("failed", "objective.no_per_token")
