"""Decisions about steps with a loss that is not finite, or a spike: pure functions of the history."""

import math

import pytest

from orchestrator.config.sections import SpikePolicy, TrainConfig
from orchestrator.planning.loss_policy import LossPolicies, judge, policy_of, window_of
from orchestrator.records.steps import NONFINITE, SPIKE, LossHistory
from tests.planning.jobs import job

WRONG = "the loss is not finite"
# mean 2, standard deviation 1 (of loss), and gradients that are 10 times as large
CALM = ((1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (2.0, 20.0), (1.0, 10.0), (3.0, 30.0), (2.0, 20.0))
DEVIATION = math.sqrt(4 / 6)


def policies(nonfinite="stop", **spike) -> TrainConfig:
    more = ["train.on_nonfinite=" + nonfinite] if isinstance(nonfinite, str) else []
    config = job(*more).train
    return config.model_copy(update={"on_spike": SpikePolicy(**spike) if spike else None})


SPIKES = {"window": 7, "threshold": 3.0, "action": "skip_step", "budget": 2}


def test_without_a_policy_a_step_that_is_not_finite_stops_the_run_and_no_other():
    verdict = judge(policies(), LossHistory(), None, math.nan, WRONG)
    assert (verdict.action, verdict.cause, verdict.text) == ("stop", NONFINITE, WRONG)
    assert judge(policies(), LossHistory(recent=CALM), 1e9, 1e9, None) is None


def test_steps_that_are_not_finite_are_skipped_until_the_budget_is_spent():
    train = job("train.on_nonfinite={action: skip_step, budget: 3}").train
    for spent in range(3):
        verdict = judge(train, LossHistory(num_nonfinite=spent), None, math.inf, WRONG)
        assert (verdict.action, verdict.cause) == ("skip_step", NONFINITE)
    verdict = judge(train, LossHistory(num_nonfinite=3, num_spikes=9), None, math.inf, WRONG)
    assert (verdict.action, verdict.code) == ("stop", "training.skip_budget")
    assert job("train.on_nonfinite=skip_step").train.nonfinite.budget == 10


def test_a_policy_that_rewinds_leaves_the_budget_to_the_launch():
    train = job("train.on_nonfinite={action: rewind_and_skip, budget: 2}").train
    verdict = judge(train, LossHistory(num_nonfinite=9), None, math.nan, WRONG)
    assert (verdict.action, verdict.code) == ("rewind_and_skip", "training.rewind_nonfinite")
    assert policy_of(train, verdict.code) == ("train.on_nonfinite", 2)
    spike = policies(**{**SPIKES, "action": "rewind_and_skip"})
    verdict = judge(spike, LossHistory(recent=CALM), 1e9, 1.0, None)
    assert policy_of(spike, verdict.code) == ("train.on_spike", 2)
    assert policy_of(train, "training.step_refused") is None


@pytest.mark.parametrize(
    ("loss", "norm", "is_spike"),
    [
        (2.0 + 2.99 * DEVIATION, 20.0, False),
        (2.0 + 3.01 * DEVIATION, 20.0, True),
        (2.0, 20.0 + 29.9 * DEVIATION, False),
        (2.0, 20.0 + 30.1 * DEVIATION, True),
        (-50.0, 0.0, False),
    ],
)
def test_a_spike_lies_so_many_deviations_above_the_mean(loss, norm, is_spike):
    verdict = judge(policies(**SPIKES), LossHistory(recent=CALM), loss, norm, None)
    assert (verdict is not None) == is_spike
    assert verdict is None or (verdict.cause, verdict.action) == (SPIKE, "skip_step")


def test_half_a_window_must_be_known_and_only_the_newest_values_count():
    train = policies(**SPIKES)
    assert judge(train, LossHistory(recent=CALM[:2]), 1e9, 1.0, None) is None
    assert judge(train, LossHistory(recent=CALM[:3]), 1e9, 1.0, None) is not None
    old = tuple((1e6, 1e6) for _ in range(9))
    assert judge(train, LossHistory(recent=(*old, *CALM)), 100.0, 1.0, None) is not None
    assert judge(train, LossHistory(recent=CALM), None, 0.0, None) is None, "a step without targets"


def test_only_steps_that_moved_the_weights_are_remembered():
    history = LossHistory()
    for loss, norm, skipped in (
        (1.0, 2.0, None),
        (None, 0.0, None),
        (9.0, 9.0, SPIKE),
        (None, math.nan, NONFINITE),
        (3.0, 4.0, None),
        (5.0, 6.0, None),
    ):
        history = history.after_step(loss, norm, skipped, 2)
    assert history == LossHistory(recent=((3.0, 4.0), (5.0, 6.0)), num_nonfinite=1, num_spikes=1)
    assert history.after_step(9.0, 9.0, SPIKE, 2).is_skipped


def test_the_policies_of_a_stored_configuration_are_those_of_the_job():
    train = policies(**SPIKES)
    flat = {f"train.{name}": value for name, value in train.model_dump(mode="json").items()}
    found = LossPolicies.of_flat(flat)
    assert (found.on_spike, found.nonfinite) == (train.on_spike, train.nonfinite)
    old = LossPolicies.of_flat({"train.lr": 1.0})
    assert (old.on_spike, old.nonfinite.action, window_of(old)) == (None, "stop", 0)
