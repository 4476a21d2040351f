"""The fixed tree: whoever sums which run of micro-batches, the additions are the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.batches import num_micro_batches, rank_run
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from orchestrator.trainer.gradient.invariant import (
    Gradient,
    InvariantGradient,
    TreeSum,
    finish_tree,
    scale,
    square_sum,
    tree_nodes,
)
from orchestrator.trainer.gradient.parallel import FastGradient
from orchestrator.trainer.objective.micro_batches import StepPlace, cut
from orchestrator.trainer.objective.objective import CausalLM
from tests.trainer.feed import FormulaFeed
from tests.trainer.member import tiny_job
from tests.trainer.states import begun_state

SIZES = st.integers(1, 40)
WORLDS = st.integers(1, 9)


def partial_sums(values: torch.Tensor, world_size: int) -> dict[tuple[int, int], torch.Tensor]:
    """What all ranks together hold when each has summed its run."""
    known = {}
    for rank in range(world_size):
        tree = TreeSum()
        for number in rank_run(len(values), rank, world_size):
            tree.add(number, values[number].clone())
        known |= {(start, size): value for start, size, value in tree.nodes}
    return known


def tree_sum(values: torch.Tensor, world_size: int) -> torch.Tensor:
    total = finish_tree(partial_sums(values, world_size), 0, 1 << (len(values) - 1).bit_length())
    assert total is not None
    return total


def rank_after_rank(values: torch.Tensor, world_size: int) -> torch.Tensor:
    """The planted wrong version: each rank adds up its run, then the ranks are added."""
    runs = [rank_run(len(values), rank, world_size) for rank in range(world_size)]
    sums = [values[run.start : run.stop].cumsum(0)[-1] for run in runs if len(run)]
    return torch.stack(sums).cumsum(0)[-1]


def gradients(num: int) -> torch.Tensor:
    """Numbers of very different size, whose sum depends on the order of additions."""
    return torch.randn(num, 50, generator=torch.Generator().manual_seed(num)) * torch.logspace(-4, 4, 50)


@settings(deadline=None)
@given(SIZES, WORLDS)
def test_the_tree_gives_the_same_bits_for_every_world_size(num, world_size):
    values = gradients(num)
    assert torch.equal(tree_sum(values, world_size), tree_sum(values, 1))


def test_adding_rank_after_rank_does_not_and_is_caught():
    values = gradients(13)
    assert not torch.equal(rank_after_rank(values, 3), rank_after_rank(values, 1))
    assert torch.allclose(rank_after_rank(values, 3), tree_sum(values, 2))


@settings(deadline=None)
@given(SIZES, WORLDS)
def test_a_rank_is_left_with_the_nodes_that_the_others_expect_of_it(num, world_size):
    expected = [node for r in range(world_size) for node in tree_nodes(*_bounds(num, r, world_size))]
    assert list(partial_sums(gradients(num), world_size)) == expected
    covered = [number for start, size in expected for number in range(start, start + size)]
    assert covered == list(range(num))


def _bounds(num: int, rank: int, world_size: int) -> tuple[int, int]:
    run = rank_run(num, rank, world_size)
    return run.start, run.stop


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_ranks_micro_batches_together_are_those_of_the_step(world_size):
    step = StepRange(first_sample=100, num_samples=7, num_tokens=7 * 8 - 3, seq_len=8)
    feed, cursor = FormulaFeed(), Cursor(consumed_samples=100, consumed_tokens=800, target_tokens=800)
    micros = [
        micro
        for rank in range(world_size)
        for micro in cut(
            feed.get(step, rank, world_size, 2, cursor), 2, rank, world_size, torch.device("cpu")
        )
    ]
    assert [m.number for m in micros] == list(range(num_micro_batches(7, 2)))
    assert [m.first_sample for m in micros] == [100, 102, 104, 106]
    whole = feed.get(step, 0, 1, 2, cursor)
    assert np.array_equal(torch.cat([m.batch.input_ids for m in micros]).numpy(), whole.input_ids)
    assert np.array_equal(torch.cat([m.batch.labels for m in micros]).numpy(), whole.labels)


# ---------------------------------------------------------------------------------------- clipping
def test_the_norm_of_many_elements_is_as_right_as_that_of_few_and_in_any_order_the_same():
    """torch's own, in float32 on one thread, is 2e-4 too small here."""
    many = torch.randn(8_000_000, generator=torch.Generator().manual_seed(1))
    right = float(torch.sum(many.double() ** 2))
    assert square_sum([many]) == pytest.approx(right, rel=1e-6)
    parts = list(torch.split(many, [1 << 14, 0, 5 << 14, 7, 8_000_000 - (6 << 14) - 7]))
    assert square_sum(parts) == pytest.approx(right, rel=1e-6)
    assert square_sum(parts[::-1]) == square_sum(parts)
    assert square_sum([many.bfloat16()]) == pytest.approx(right, rel=1e-3)
    assert square_sum([]) == 0.0
    assert square_sum([torch.tensor([1.0, math.inf])]) == math.inf
    assert math.isnan(square_sum([torch.tensor([1.0, math.nan])]))


@pytest.mark.parametrize(
    ("max_norm", "after"),
    [(1.0, [0.6, 0.8]), (2.5, [1.5, 2.0]), (5.0, [3.0, 4.0]), (50.0, [3.0, 4.0]), (None, [3.0, 4.0])],
)
def test_a_gradient_of_norm_5_is_scaled_down_to_a_lower_limit_and_no_other_is_changed(max_norm, after):
    parts = [torch.tensor([3.0]), torch.tensor([[4.0], [0.0]])]
    scale(parts, 5.0, max_norm)
    assert torch.cat([part.flatten() for part in parts]).tolist() == pytest.approx([*after, 0.0], rel=1e-6)


@pytest.mark.quick(
    "1.1-1.0-FastGradient",
    "0.2-0.2-InvariantGradient",
    "0.9-0.9-FastGradient",
    "None-1.0-InvariantGradient",
)
@pytest.mark.parametrize("numerics", [InvariantGradient, FastGradient])
@pytest.mark.parametrize(("share", "left"), [(0.2, 0.2), (0.9, 0.9), (1.1, 1.0), (None, 1.0)])
def test_a_clipped_gradient_keeps_its_direction_and_has_the_lower_of_its_norm_and_the_limit(
    numerics, share, left
):
    job = tiny_job()
    state = begun_state(job.model, job.train, torch.device("cpu"), invariant=True)
    state.model.eval()  # no dropout: the same gradient again
    step = StepRange(first_sample=0, num_samples=4, num_tokens=4 * 8, seq_len=8)
    micros = cut(FormulaFeed().get(step, 0, 1, 2, Cursor()), 2, 0, 1, torch.device("cpu"))
    gradient: Gradient = numerics(state.model, CausalLM(job.train.seed, "float32", False, 0))

    def whole() -> torch.Tensor:
        return torch.cat([p.grad.flatten().double() for p in state.model.parameters() if p.requires_grad])

    gradient.reduce(micros, len(micros), 32, StepPlace(step=1, consumed_tokens=0))
    before = whole()
    norm = before.norm().item()
    assert norm > 0.01
    told = gradient.clip(None if share is None else share * norm)
    assert told == pytest.approx(norm, rel=1e-5), "the norm before it was scaled"
    assert torch.allclose(whole(), left * before, rtol=1e-5, atol=0.0)
