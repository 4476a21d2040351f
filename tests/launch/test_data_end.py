"""Where a launch came to the end of the data, plans know how much is left; compared with what is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.coordinator.machine.launch_actions import THE_BUDGET, THE_DATA
from orchestrator.launch.start import preview
from orchestrator.records.cursor import Cursor
from tests.data.making import some_texts, write_corpus
from tests.launch.skipping_run import SkippingRun, survey_newest

Make = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def run(tiny_config: Make, tmp_path: Path) -> SkippingRun:
    write_corpus(tmp_path / "d", some_texts(40, 20), "jsonl")
    source = {"name": "d", "path": str(tmp_path / "d"), "format": "jsonl"}
    endless = {"train.max_steps": None, "train.schedule": "constant", "train.warmup_steps": 0}
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500}
    return SkippingRun(
        tiny_config({"data.sources": [source], **endless, **small, "run.storage": str(tmp_path / "runs")})
    )


def cursor(run: SkippingRun) -> Cursor:
    return run.store.read_point(survey_newest(run)).cursor


def to_the_end(run: SkippingRun, *overrides: str, by: str = THE_DATA) -> None:
    run.launch(1000, *overrides)
    number = max(run.store.claim_numbers())
    (run.folder / "attempts" / f"{number:04d}.end.json").unlink()  # in these runs a launch is asked to stop
    run.store.write_end(number, "done", "done", run.store.read_claim(number).run_id, by)


def test_what_is_left_of_further_epochs_is_what_is_then_trained(run: SkippingRun) -> None:
    assert run.plan().data_tokens is None
    to_the_end(run)
    at_end = cursor(run)
    two, three = run.plan("data.num_epochs=2"), run.plan("data.num_epochs=3")
    endless = run.plan("data.num_epochs=null", "train.max_steps=100000")
    assert (run.plan().data_tokens, endless.data_tokens) == (0, None)
    run.launch(3, "data.num_epochs=2", "train.global_batch_size=3", "pack.seq_len=20")  # within an epoch
    within, inside = run.plan("data.num_epochs=2"), cursor(run)
    assert two.data_tokens is not None
    assert within.data_tokens == two.data_tokens - (inside.consumed_tokens - at_end.consumed_tokens)
    assert 1 < within.sources[0].epochs == within.sources[0].epochs_at_most < 2
    to_the_end(run, "data.num_epochs=2")
    assert cursor(run).consumed_tokens == at_end.consumed_tokens + two.data_tokens
    assert run.plan("data.num_epochs=2").sources[0].epochs == 2
    to_the_end(run, "data.num_epochs=3")
    assert cursor(run).consumed_tokens == at_end.consumed_tokens + (three.data_tokens or 0)


def test_a_start_at_the_end_of_the_data_trains_nothing_and_says_what_leads_further(run: SkippingRun) -> None:
    to_the_end(run)
    plan = run.plan()
    assert (plan.action, plan.remaining_steps) == ("resume", 0)
    assert preview.reached(plan)
    assert preview.stop_is_reached(run.job(), plan) == (
        f"nothing is left to train at {plan.point}: the data have ended (data.num_epochs=1); to go on, raise "
        "data.num_epochs"
    )
    assert not preview.reached(run.plan("data.num_epochs=2"))


def test_packs_that_are_all_taken_say_so_by_themselves(run: SkippingRun) -> None:
    packs = ("pack.mode=bestfit", "pack.long_document=split")
    run.launch(1000, *packs)
    assert (run.plan(*packs).data_tokens, run.plan(*packs).remaining_steps) == (0, 0)
    assert preview.reached(run.plan(*packs))
    assert run.plan(*packs, "data.num_epochs=2").data_tokens is None
    run.launch(2, *packs, "data.num_epochs=2")
    assert run.plan(*packs, "data.num_epochs=2").data_tokens is None


@pytest.mark.parametrize(
    "change",
    ["data.refresh=epoch", "data.encoder=tokenizers", "resume.accept_changed=true", "resume.data=restart"],
)
def test_where_the_next_pass_may_have_another_length_nothing_is_said_of_it(
    run: SkippingRun, change: str
) -> None:
    to_the_end(run)
    assert run.plan("data.num_epochs=2").data_tokens is not None
    assert run.plan("data.num_epochs=2", change).data_tokens is None


def test_a_run_that_its_budget_ended_says_nothing_of_its_data(run: SkippingRun) -> None:
    to_the_end(run, by=THE_BUDGET)
    assert run.plan("data.num_epochs=2").data_tokens is None


def test_without_a_known_length_the_epochs_seen_are_said_as_far_as_blocks_tell(run: SkippingRun) -> None:
    run.launch(2)
    (seen,) = run.plan().sources
    assert 0 <= seen.epochs < seen.epochs_at_most <= 1
    num_blocks = round(1 / (seen.epochs_at_most - seen.epochs))
    place = f" in the {round(seen.epochs_at_most * num_blocks)}"
    assert place in str(seen)
    assert f" of {num_blocks} blocks of its 1st epoch" in str(seen)
