"""Micro-batches of pairs: two rows for each sample, on any rank, and what is computed of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.objectives import Terms
from orchestrator.planning.batches import rank_samples
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, StepRange
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.objective.micro_batches import NumberedMicroBatch, StepPlace, cut
from orchestrator.trainer.objective.objective import objective_of, step_units
from orchestrator.trainer.objective.token_losses import TokenLosses
from tests.trainer.member import tiny_job

CPU = torch.device("cpu")
ROW_LEN, NUM = 6, 7
PLACE = StepPlace(step=1, consumed_tokens=0)


def pairs_of_step(start: int, stop: int, row_len: int = ROW_LEN) -> BatchSlice:
    """Pairs [start, stop) of a step of `NUM`, whose rows have different lengths."""
    inputs = np.zeros((NUM, 2, row_len), np.int32)
    labels, documents = np.full_like(inputs, -100), np.full_like(inputs, -1)
    for sample in range(NUM):
        for row in (0, 1):
            num = 1 + (sample + 2 * row) % row_len
            inputs[sample, row, :num] = (3 * sample + 5 * row + np.arange(num)) % 16
            labels[sample, row, num - 1 : num] = 3 + sample
            documents[sample, row, :num] = row
    tables = (each.reshape(NUM, -1)[start:stop] for each in (inputs, labels, documents))
    names = ("input_ids", "labels", "document_ids")
    return BatchSlice(
        step=StepRange(
            first_sample=100, num_samples=NUM, num_tokens=NUM * 2 * row_len, seq_len=2 * row_len
        ),
        start=100 + start,
        stop=100 + stop,
        source_numbers=np.arange(NUM, dtype=np.int32)[start:stop] % 2,
        **dict(zip(names, tables, strict=True)),
        step_targets=2 * NUM,
        step_digest=0,
        cursor=Cursor(skipped_samples=50),
        end_of_data=False,
        rows_per_sample=2,
    )


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_get_whole_pairs_in_order(world: int) -> None:
    found: list[NumberedMicroBatch] = []
    for rank in range(world):
        start, stop = (at - 100 for at in rank_samples(100, NUM, 2, rank, world))
        found += cut(pairs_of_step(start, stop), 2, rank, world, CPU)
    assert [micro.number for micro in found] == [0, 1, 2, 3]
    assert [tuple(micro.batch.input_ids.shape) for micro in found] == [(4, ROW_LEN)] * 3 + [(2, ROW_LEN)]
    whole = pairs_of_step(0, NUM)
    for name in ("input_ids", "labels", "document_ids"):
        rows = torch.cat([getattr(micro.batch, name) for micro in found])
        assert rows.tolist() == getattr(whole, name).reshape(2 * NUM, ROW_LEN).tolist()
    for name, expected in (("sample_indices", range(150, 157)), ("source_ids", [0, 1, 0, 1, 0, 1, 0])):
        rows = torch.cat([getattr(micro.batch, name) for micro in found])
        assert rows[:, 0].tolist() == [value for value in expected for _ in (0, 1)]
        assert (rows == rows[:, :1]).all()
    assert step_units(tiny_job(train__objective_units="samples").train, whole) == NUM


def plug_in(by_document: bool = False) -> Any:
    job = tiny_job(train__objective="tests.trainer.preference_objectives:margin")
    return objective_of(job.train, by_document, ROW_LEN, rows_per_sample=2), job


def test_an_objective_is_tried_on_two_rows_and_gets_them_where_a_rank_has_no_pair() -> None:
    objective, job = plug_in()
    model = build_model(job.model, "float32", 0, CPU, True)
    objective.prepare(model)
    assert objective.metric_names == ("accuracy",)
    empty = objective.empty(CPU).batch
    assert tuple(empty.input_ids.shape) == (2, ROW_LEN)
    assert empty.document_ids.tolist() == [[0] * ROW_LEN, [1] * ROW_LEN]


def test_each_row_is_a_document_of_its_own_for_attention() -> None:
    found = []
    (micro,) = cut(pairs_of_step(0, NUM), NUM, 0, 1, CPU)
    for by_document in (False, True):
        objective, job = plug_in(by_document)
        model = build_model(job.model, "float32", 0, CPU, True)
        objective.prepare(model)
        found.append(objective.terms(model, micro, PLACE))
    assert float(found[0].loss_sum.detach()) == pytest.approx(float(found[1].loss_sum.detach()), rel=1e-6)
    torch.testing.assert_close(found[0].per_token, found[1].per_token)


@pytest.mark.parametrize("row_len", [1, 2, 6])
def test_the_documents_with_the_highest_loss_are_named_by_pair_and_answer(row_len: int) -> None:
    (micro,) = cut(pairs_of_step(0, NUM, row_len), NUM, 0, 1, CPU)
    losses = torch.zeros(2 * NUM, row_len)
    highest = {(6, 1): 3.0, (0, 1): 2.0, (6, 0): 1.0}
    for (sample, row), loss in highest.items():
        losses[2 * sample + row] = loss
    kept = TokenLosses({0: "a", 1: "b"}, 3)
    kept.begin()
    kept.metrics(Terms(losses.sum(), {}, losses), micro)
    assert [(each.sample, each.document, each.loss, each.targets) for each in kept.worst()] == [
        (150 + sample, row, loss, 1) for (sample, row), loss in highest.items()
    ]
