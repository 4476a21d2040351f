"""How many steps a run has in all: `status`, the page and its list say the same, for any kind of stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from benchmarks.made_run import note
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.history.claims.claim_files import START
from orchestrator.history.claims.claims import ClaimParent, GenerationStart
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.dashboard.runs import Runs
from orchestrator.planning.schedule import budgets_for
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage
from tests.planning.identities import IDENTITY


@pytest.mark.parametrize(
    ("stop", "batch", "seq_len", "total"),
    [
        ({"train.max_steps": 20}, 8, 32, 20),
        ({"train.max_steps": 20}, 4, 32, 37),  # the steps after the third are of half the size
        ({"train.max_steps": None, "train.max_samples": 100}, 8, 32, 13),
        ({"train.max_steps": None, "train.max_samples": 100}, 8, 16, 13),  # samples are samples, however long
        ({"train.max_steps": None, "train.max_tokens": 1000}, 8, 32, 4),
    ],
)
@pytest.mark.parametrize("trained", [0, 1])
def test_all_say_the_same_total(
    tmp_path: Path, tiny_config: Callable[..., dict[str, Any]], stop: dict[str, Any],
    batch: int, seq_len: int, total: int, trained: int,
) -> None:  # fmt: skip
    """Three steps of 8 samples of 32 tokens, and then another generation, of other steps."""
    sizes = {"train.global_batch_size": 8, "pack.seq_len": 32}
    config = parse_config(tiny_config({**sizes, **stop}))
    store = RunStore(Storage(str(tmp_path / "run")))
    run_id = store.create_run("run", IDENTITY).id
    store.claim(1, "aa", START, "host", run_id)
    store.write_parent(ClaimParent(attempt=1, parent=None, inherited=(), budgets=budgets_for(config, None)))
    journal = JournalWriter(store.storage, 1, run_id=run_id)
    note(journal, EventKind.ATTEMPT, config=config.flat())
    start = GenerationStart(
        attempt=1, generation=1, parent=None, step=0, world_size=1, consumed_samples=0, consumed_tokens=0,
        target_tokens=0, global_batch_size=8, seq_len=32,
    )  # fmt: skip
    journal.generation(start)
    record = StepRecord(
        attempt=1, generation=1, step=1, consumed_samples=8, consumed_tokens=256, target_tokens=256, loss=1.0,
        grad_norm=1.0, lr=1.0, digest="0" * 16, step_s=1.0, data_wait_s=0.0, save_blocked_s=0.0,
    )  # fmt: skip
    for step in (1, 2, 3):
        at = {"consumed_samples": 8 * step, "consumed_tokens": 256 * step, "target_tokens": 256 * step}
        record = replace(record, step=step, **at)
        journal.step(record)
    at = {"consumed_samples": 24, "consumed_tokens": 768, "target_tokens": 768}
    journal.generation(
        replace(
            start, generation=2, parent=record.key, step=3, global_batch_size=batch, seq_len=seq_len, **at
        )
    )
    if trained:
        size = {"consumed_samples": 24 + batch, "consumed_tokens": 768 + batch * seq_len}
        journal.step(replace(record, generation=2, step=4, **size))
    journal.close()
    status = orchestrator.open(tmp_path / "run").status(0)
    runs = Runs(Storage(str(tmp_path)))
    with runs.open("run").reading() as views:
        summary = views.summary(full=False)
    (row,) = runs.rows()
    assert status.total_steps == total
    assert summary["progress"]["max_step"] == total
    assert row["progress"]["max_step"] == total
