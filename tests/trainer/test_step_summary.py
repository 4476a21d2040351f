"""The summary of a step: integer sums that mean the same however divided, and refuse a wrong step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.objectives import Mean, Terms
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, StepRange
from orchestrator.trainer.interfaces.step_summary import (
    NUM_SLOTS,
    MetricSum,
    RankContribution,
    RankTerms,
    StepSummary,
    TermSums,
)

DIGESTS = st.integers(0, 2**64 - 1)


def of_rank(loss: int | None = 0, metrics: tuple[MetricSum, ...] = (), **fields) -> RankContribution:
    plain = {"targets": 8, "samples": 1, "digest": 0, "data_wait_s": 0.0, "save_blocked_s": 0.0}
    return RankContribution(terms=RankTerms(loss=loss, metrics=metrics), **(plain | fields))


def said(contributions: list[RankContribution], *names: str) -> StepSummary:
    vectors = [s.pack(rank, len(contributions)) for rank, s in enumerate(contributions)]
    return StepSummary.unpack(sum(vectors, start=vectors[0] * 0), names)


def summed(losses: list[float], *metrics: tuple[float, float]) -> RankTerms:
    """The sums of micro-batches with these losses, of which each has the metrics (sum, count)."""
    names = [f"m{number}" for number in range(len(metrics))]
    sums = TermSums(names)
    for loss in losses:
        means = [Mean(torch.tensor(total), num) for total, num in metrics]
        of_each = dict(zip(names, means, strict=True))
        sums.add(Terms(torch.tensor(loss, dtype=torch.float64), of_each))
    return sums.total()


def both(terms: RankTerms) -> tuple[int | None, tuple[MetricSum, ...]]:
    return terms.loss, terms.metrics


def announced(num_samples: int, targets: int, digest: int) -> BatchSlice:
    nothing = np.zeros((0, 8), np.int32)
    return BatchSlice(
        step=StepRange(first_sample=0, num_samples=num_samples, num_tokens=8 * num_samples, seq_len=8),
        start=0,
        stop=0,
        source_numbers=nothing[:, 0],
        input_ids=nothing,
        labels=nothing,
        document_ids=nothing,
        step_targets=targets,
        step_digest=digest,
        cursor=Cursor(),
        end_of_data=False,
    )


@settings(deadline=None)
@given(st.lists(st.tuples(DIGESTS, st.integers(-(2**40), 2**40)), min_size=1, max_size=5))
def test_digests_wrap_and_losses_add_up_whatever_the_number_of_ranks(rows):
    summary = said([of_rank(digest=digest, loss=loss) for digest, loss in rows])
    assert summary.digest == sum(d for d, _ in rows) % 2**64
    assert summary.loss == sum(loss for _, loss in rows) / 2**24
    assert (summary.ranks, summary.not_finite, summary.samples) == (len(rows), 0, len(rows))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=5))
def test_the_greatest_memory_of_all_ranks_arrives_to_the_byte(peaks):
    assert said([of_rank(peak_memory_bytes=peak) for peak in peaks]).peak_memory_bytes == max(peaks)


@settings(deadline=None)
@given(st.floats(allow_nan=False), st.integers(0, 7), st.integers(-1, 10**9))
def test_what_rank_0_alone_says_arrives_to_the_last_bit(number, control, acknowledged):
    first = of_rank(grad_norm=number, step_s=number, control=control, acknowledged=acknowledged)
    summary = said([first, replace(first, grad_norm=1.0, control=7, acknowledged=3), first])
    assert math.copysign(1, summary.grad_norm) == math.copysign(1, number)
    assert (summary.grad_norm, summary.step_s, summary.control, summary.acknowledged) == (
        number,
        number,
        control,
        acknowledged,
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e30])
def test_a_loss_that_is_no_number_counts_its_rank_and_adds_nothing(loss):
    assert summed([2.5, loss, 1.0]).loss is None
    summary = said([of_rank(loss=summed([2.0, 0.5]).loss), of_rank(loss=summed([loss]).loss)])
    assert (summary.not_finite, summary.loss) == (1, 2.5)


@settings(deadline=None)
@given(st.lists(st.integers(-(10**15), 10**15), min_size=1, max_size=40), st.integers(1, 5))
def test_losses_and_metrics_have_the_same_sum_however_their_micro_batches_are_divided(millionths, num_ranks):
    losses = [number / 1e6 for number in millionths]
    terms = [summed(losses[rank::num_ranks], (3.0, 2.0)) for rank in range(num_ranks)]
    summary = said([of_rank(one.loss, one.metrics) for one in terms], "a")
    alone = said([of_rank(*both(summed(losses, (3.0, 2.0))))], "a")
    assert (summary.loss, summary.metrics) == (alone.loss, alone.metrics)
    assert summary.loss == sum(round(loss * 2**24) for loss in losses) / 2**24
    assert summary.metrics == {"a": 1.5}


def test_a_metric_without_a_count_or_with_a_value_that_is_no_number_has_no_value():
    terms = summed([1.0, 1.0], (3.0, 0.0), (math.nan, 1.0), (1.0, math.inf), (4.0, 8.0))
    assert said([of_rank(*both(terms)), of_rank(*both(terms))], "a", "b", "c", "d").metrics == {
        "a": None,
        "b": None,
        "c": None,
        "d": 0.5,
    }
    assert terms.loss == 2 << 24, "the loss has its value all the same"


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_metric_whose_sum_would_wrap_has_no_value(num_ranks):
    largest = (2**63 - 1) // num_ranks
    fits = MetricSum(sum=largest, count=1, not_finite=0)
    assert said([of_rank(0, (fits,))] * num_ranks, "a").metrics == {"a": float(largest)}
    wraps = replace(fits, sum=-largest - 2)
    assert said([of_rank(0, (wraps,))] * num_ranks, "a").metrics == {"a": None}


def test_a_rank_without_micro_batches_adds_nothing():
    assert TermSums(["a"]).total() == RankTerms(loss=0, metrics=(MetricSum(sum=0, count=0, not_finite=0),))


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_losses_whose_sum_would_wrap_are_refused_as_absurd(num_ranks):
    largest = (2**63 - 1) // num_ranks
    assert said([of_rank(largest)] * num_ranks).not_finite == 0
    assert said([of_rank(largest + 1)] * num_ranks).not_finite == num_ranks


@pytest.mark.parametrize(
    ("contributions", "message"),
    [
        ([of_rank(digest=5)], "1 ranks took part in a group of 2"),
        ([of_rank(digest=5), of_rank(loss=None)], "on 1 of 2 ranks"),
        ([of_rank(digest=5, grad_norm=math.inf), of_rank()], "the norm of its gradient is inf"),
        ([of_rank(digest=5), of_rank(samples=2)], "trained 3 samples, the feed announced 2"),
        ([of_rank(digest=5), of_rank(targets=7)], "trained 15 target tokens, the feed announced 16"),
        (
            [of_rank(digest=5), of_rank(digest=1)],
            "digest 0000000000000006, the feed announced 0000000000000005",
        ),
        ([of_rank(digest=5), of_rank()], None),
    ],
)
def test_a_step_is_refused_with_both_values(contributions, message):
    summary = said(contributions)
    problem = summary.not_finite_text() or summary.mismatch(2, announced(2, 16, 5))
    assert problem is None if message is None else message in str(problem)


def test_the_vector_holds_nothing_but_its_slots():
    assert of_rank().pack(1, 2).shape == (NUM_SLOTS + 2,)
    metric = MetricSum(sum=2, count=3, not_finite=1)
    assert of_rank(0, (metric,)).pack(1, 2)[NUM_SLOTS:].tolist() == [2, 3, 1, 0, 0]
    packed = of_rank(control=4, acknowledged=9, peak_memory_bytes=7).pack(1, 2)
    assert packed[8:].tolist() == [0, 0, 0, 0, 0, 0, 0, 7]
