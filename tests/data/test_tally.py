"""An epoch holds every document of the files once, in any order; an order that repeats one is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.config import parse_config
from orchestrator.data import sources
from orchestrator.data.local_feed import InProcessFeed
from orchestrator.data.spec import DataSpec, prepare_data
from orchestrator.data.tally import Tallies, tally_files
from orchestrator.history import _first_difference
from orchestrator.plan.claims import GenerationStart
from orchestrator.plan.order import block_at, record_order
from orchestrator.records import Cursor, StepRange, StepRecord
from tests.conftest import TinyConfig


@pytest.fixture(scope="module")
def spec(tiny_config: TinyConfig) -> DataSpec:
    return prepare_data(parse_config(tiny_config({"data.num_epochs": 2})))


def tallies_of(spec: DataSpec) -> Tallies:
    tallies = Tallies()
    for _ in tallies.watch(spec.chunks(Cursor())):
        pass
    return tallies


def test_every_epoch_holds_what_the_files_hold(spec: DataSpec) -> None:
    files, stream = tally_files(spec), tallies_of(spec)
    assert files.documents > 50
    assert stream.of(0) == stream.of(1) == files
    assert str(files.documents) in str(files).replace(",", "")


def a_block_twice(seed: int, source: str, epoch: int, position: int, num_blocks: int, shuffle: str) -> int:
    """Position 1 gives the block of position 0 again."""
    return block_at(seed, source, epoch, 0 if position == 1 else position, num_blocks, shuffle)


def a_record_twice(*arguments):
    """Within a window the second record is the first one again."""
    order = record_order(*arguments).copy()
    order[1:2] = order[:1]
    return order


WRONG = [("block_at", a_block_twice), ("record_order", a_record_twice)]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_an_order_that_repeats_something_is_found_out(
    spec: DataSpec, monkeypatch: pytest.MonkeyPatch, name: str, wrong
) -> None:
    files = tally_files(spec)
    monkeypatch.setattr(sources, name, wrong)
    once = replace(spec, settings=replace(spec.settings, num_epochs=1))
    assert tallies_of(once).of(0) != files


def trained(spec: DataSpec) -> tuple[StepRecord, ...]:
    """Records of a run that trained this stream to its end, 1,000 samples of 64 tokens a step."""
    feed, cursor, records = InProcessFeed(spec), Cursor(), []
    while True:
        step = StepRange(
            first_sample=cursor.consumed_samples, num_samples=1000, num_tokens=64_000, seq_len=64
        )
        batch = feed.get(step, 0, 1, 1000, cursor)
        cursor = batch.cursor
        record = StepRecord(
            attempt=1, generation=1, step=len(records) + 1, consumed_samples=cursor.consumed_samples,
            consumed_tokens=cursor.consumed_tokens, target_tokens=cursor.target_tokens, loss=1.0,
            grad_norm=1.0, lr=1.0, digest=f"{batch.step_digest:016x}", step_s=1.0, data_wait_s=0.0,
            save_blocked_s=0.0,
        )  # fmt: skip
        records.append(record)
        if batch.end_of_data:
            feed.close()
            return tuple(records)


START = GenerationStart(
    attempt=1, generation=1, parent=None, step=0, consumed_samples=0, consumed_tokens=0, target_tokens=0,
    world_size=1, global_batch_size=1000, seq_len=64,
)  # fmt: skip


def test_the_audit_sees_what_the_plan_cannot(spec: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    records, endless = trained(spec), replace(spec, settings=replace(spec.settings, num_epochs=None))
    assert _first_difference(endless, records, {(1, 1): START}) is None
    other = (*records[:3], replace(records[3], digest="0" * 16), *records[4:])
    found = _first_difference(endless, other, {(1, 1): START})
    assert found is not None
    assert found["step"] == "00000004-a0001-g0001"
    # the run was trained by a wrong order, and the audit recomputes it by the same one: every step agrees

    def wrong(*arguments):
        return block_at(*arguments) if arguments[-1] == "none" else a_block_twice(*arguments)

    monkeypatch.setattr(sources, "block_at", wrong)
    found = _first_difference(endless, trained(spec), {(1, 1): START})
    assert found is not None
    assert (found["step"], "epoch 0 held" in found["reason"]) == (None, True)
