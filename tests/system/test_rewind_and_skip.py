"""A launch that goes back to a resume point by itself, and leaves out the samples up to a bad step."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import orchestrator
from orchestrator.errors import TrainingError
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.storage.files import Storage
from tests.raising import raises
from tests.system.harness import Job, assert_exactly_once

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
BAD = 8 * 9 + 3  # a sample of step 10


def poisoned(job: Job, **changes: Any) -> dict[str, Any]:
    """The job with a model for which the loss of sample `BAD` is not finite."""
    sample = next(islice(orchestrator.open_stream(job.config()), BAD, None))
    arguments = {"first_ids": sample.input_ids[:16].tolist()}
    factory = {"factory": "tests.system.tiny_model:build_poisoned", "factory_args": arguments}
    return {f"model__{name}": value for name, value in factory.items()} | {"model__config": None, **changes}


def test_the_launch_goes_back_leaves_out_the_samples_and_ends_as_if_it_had_been_told_to(
    job: Job, cluster: Any
) -> None:
    result = job.train(**poisoned(job, train__on_nonfinite="rewind_and_skip"))
    assert (result.outcome, result.attempt) == ("done", 2), result.reason
    assert result.consumed_samples == 16 * 8, "later samples are trained instead"
    (row,) = job.run.audit()["skipped_samples"]
    # on a busy machine the save of step 4 may last until step 8 is over, and no other one begins
    assert row["point"] in ("00000004-a0001-g0001", "00000008-a0001-g0001")
    before = 8 * int(row["point"][:8])
    assert (row["first_index"], row["samples"]) == (before, 80 - before), "up to the end of step 10"
    left_out = {before: (80 - before, (80 - before) * 32)}
    assert_exactly_once(job, left_out)
    ends = [e.fields for e in read_journal(Storage(job.run.uri)).events if e.kind == EventKind.END]
    assert [end["outcome"] for end in ends] == ["failed", "done"]
    # the same command continues, and skips nothing more
    result = job.train(**poisoned(job, train__on_nonfinite="rewind_and_skip", train__max_steps=18))
    assert (result.outcome, result.attempt) == ("done", 3), result.reason
    assert_exactly_once(job, left_out)


@pytest.mark.chaos
def test_without_a_point_or_a_budget_the_launch_ends_with_the_reason(job: Job, cluster: Any) -> None:
    with raises(TrainingError, "training.rewind_nonfinite", "step 10 ", "no resume point"):
        job.train(**poisoned(job, train__on_nonfinite="rewind_and_skip", resume__every_steps=None))
