"""Which step follows, and of which coming ones a feed is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.schema import EvalConfig, ResumeConfig
from orchestrator.config.sections import ModelConfig, TrainConfig
from orchestrator.planning.schedule import Budgets, Length
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from orchestrator.trainer.interfaces import loop_interface as job_module
from orchestrator.trainer.interfaces.loop_interface import (
    SMALL_STEPS_AHEAD,
    SMALL_STEPS_TOKENS,
    STEPS_AHEAD,
    TrainJob,
    coming_ranges,
    next_range,
)


def job(batch: int, seq_len: int, stop_tokens: int | None = None, until: int | None = None) -> TrainJob:
    stop = (
        None
        if stop_tokens is None
        else Length(
            given=stop_tokens, unit="tokens", global_batch_size=batch, seq_len=seq_len, tokens=stop_tokens
        )
    )
    return TrainJob(
        model=ModelConfig(config={}),
        train=TrainConfig(global_batch_size=batch, micro_batch_size=1, lr=0.1),
        resume=ResumeConfig(),
        eval=EvalConfig(),
        seq_len=seq_len,
        budgets=Budgets(max_tokens=stop),
        config_digest="",
        until_tokens=until,
    )


JOBS = st.builds(
    job,
    st.integers(1, 64),
    st.sampled_from((1, 32, 1 << 14, 1 << 18)),
    st.none() | st.integers(1, 1 << 25),
    st.none() | st.integers(1, 1 << 25),
)


def one_by_one(of: TrainJob, num: int) -> list[StepRange]:
    """The first steps, each asked for at the cursor that the one before leaves."""
    found, cursor = list[StepRange](), Cursor()
    while len(found) < num and (step := next_range(of, cursor)) is not None:
        found.append(step)
        samples, tokens = cursor.consumed_samples + step.num_samples, cursor.consumed_tokens + step.num_tokens
        cursor = Cursor(consumed_samples=samples, consumed_tokens=tokens)
    return found


@given(JOBS)
def test_a_feed_is_told_of_the_steps_that_come_and_of_many_only_while_they_are_small(of: TrainJob) -> None:
    told, coming = coming_ranges(of, Cursor()), one_by_one(of, SMALL_STEPS_AHEAD + 1)
    assert told == coming[: len(told)]
    assert len(told) >= min(STEPS_AHEAD, len(coming)), "a few are always told, to the stop"
    assert len(told) <= SMALL_STEPS_AHEAD
    if len(told) > STEPS_AHEAD:
        assert sum(step.num_tokens for step in told) <= SMALL_STEPS_TOKENS
    elif len(told) < len(coming):
        assert sum(step.num_tokens for step in coming[: len(told) + 1]) > SMALL_STEPS_TOKENS


def test_a_launch_that_was_to_stop_sees_no_step_after_that() -> None:
    assert len(one_by_one(job(8, 32, until=300), 99)) == 2
    assert len(coming_ranges(job(8, 32, until=300), Cursor())) == 2


def test_steps_that_are_told_without_a_bound_on_their_tokens_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = test_a_feed_is_told_of_the_steps_that_come_and_of_many_only_while_they_are_small
    monkeypatch.setattr(job_module, "SMALL_STEPS_TOKENS", 1 << 40)
    with pytest.raises(AssertionError):
        check()
