"""A run whose steps are taken from the real feed, to be audited, and faults of its samples and cursors."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orchestrator
from benchmarks.made_run import note
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.history.claims.claim_files import RESUME, START
from orchestrator.history.claims.claims import ClaimParent, GenerationStart
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.launch.start import run_preparation as starting
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.order import block_at
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey, StepRange, StepRecord
from orchestrator.storage.files import Storage
from tests.data.making import some_texts, write_corpus

Make = Callable[..., dict[str, Any]]


class TrainedRun:
    """A run of attempts, each of which goes on where the one before ended; one generation each."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.job = parse_config(dict(mapping))
        self.folder = Path(starting.run_storage(self.job).root)
        self.store = RunStore(Storage(str(self.folder)))
        self.spec = starting.prepare(self.job, self.store.storage, freeze=True)
        self.run_id = self.store.create_run(self.job.run.name, self.spec.identity()).id
        self.cursor, self.number = Cursor(), 0
        self.key: StateKey | None = None
        self.encoders: tuple[EncoderSpan, ...] = ()

    def attempt(
        self,
        num_steps: int,
        batch: int = 8,
        seq_len: int = 64,
        label: int | None = None,
        noted: Callable[[Cursor], Cursor] = lambda cursor: cursor,
        wrong: int = 0,
    ) -> None:
        """Trains `num_steps` steps, or to the end of the data, counting from `label` on. Every fourth step's
        cursor, and the data's last, goes into the journal as `noted` makes it. The digest of step `wrong` is
        not that of its samples.
        """
        self.number += 1
        why = RESUME if self.key else START
        self.store.claim(self.number, f"{self.number:016x}", why, "host", self.run_id)
        inherited = (self.key.point_name,) if self.key else ()
        self.store.write_parent(
            ClaimParent(attempt=self.number, parent=self.key, inherited=inherited, encoders=self.encoders)
        )
        journal = JournalWriter(self.store.storage, self.number, run_id=self.run_id)
        note(journal, EventKind.ATTEMPT, config=self.job.flat())
        first = (self.key.step if self.key else 0) if label is None else label
        journal.generation(
            GenerationStart(
                attempt=self.number, generation=1, parent=self.key, step=first, world_size=1,
                consumed_samples=self.cursor.consumed_samples, consumed_tokens=self.cursor.consumed_tokens,
                target_tokens=self.cursor.target_tokens, global_batch_size=batch, seq_len=seq_len,
            )
        )  # fmt: skip
        feed = InProcessFeed(self.spec.made_by(self.encoders))
        for step in range(first + 1, first + num_steps + 1):
            asked = StepRange(
                first_sample=self.cursor.consumed_samples, num_samples=batch, num_tokens=batch * seq_len,
                seq_len=seq_len,
            )  # fmt: skip
            taken = feed.get(asked, 0, 1, batch, self.cursor)
            if not taken.step.num_samples:
                break
            self.cursor = taken.cursor
            at = self.cursor
            record = StepRecord(
                attempt=self.number, generation=1, step=step, consumed_samples=at.consumed_samples,
                consumed_tokens=at.consumed_tokens, target_tokens=at.target_tokens, loss=1.0, grad_norm=1.0,
                lr=1.0, digest=f"{taken.step_digest + (step == wrong):016x}", step_s=1.0,
                data_wait_s=0.0, save_blocked_s=0.0,
            )  # fmt: skip
            journal.step(record)
            self.key = record.key
            if step % 4 == 0 or taken.end_of_data:
                journal.event(EventKind.CURSOR, cursor=encode(noted(self.cursor)))
            if taken.end_of_data:
                break
        feed.close()
        journal.close()

    def copied(self, storage: Path) -> TrainedRun:
        """The run as it stands, in another storage folder."""
        other = copy.copy(self)
        run = self.job.run.model_copy(update={"storage": str(storage)})
        other.job = self.job.model_copy(update={"run": run})
        other.folder = Path(starting.run_storage(other.job).root)
        shutil.copytree(self.folder, other.folder)
        other.store = RunStore(Storage(str(other.folder)))
        return other

    def records(self) -> tuple[StepRecord, ...]:
        return survey(self.store).lineage.records

    def audit(self, steps: str | None = None) -> dict[str, Any]:
        return orchestrator.open(self.folder).audit(steps)


def made_in(folder: Path, tiny_config: Make) -> dict[str, Any]:
    """Two epochs of a small corpus in many fragments, blocks and windows."""
    write_corpus(folder / "data", some_texts(120), "jsonl")
    source = {"name": "made", "path": str(folder / "data"), "format": "jsonl"}
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.num_epochs": 2}
    return tiny_config({"data.sources": [source], **small})


def one_token_later(cursor: Cursor) -> Cursor:
    source = cursor.sources["made"]
    return replace(cursor, sources={"made": replace(source, token=source.token + 1)})


def a_block_twice(seed: int, source: str, epoch: int, position: int, num_blocks: int, shuffle: str) -> int:
    """Position 1 gives the block of position 0 again."""
    return block_at(seed, source, epoch, 0 if position == 1 else position, num_blocks, shuffle)


def one_lost_one_repeated(inputs: Any, labels: Any, documents: Any) -> None:
    """In each sample token 6 is token 5 again."""
    inputs[:, 6] = inputs[:, 5]
    labels[:, 5] = labels[:, 4]


def changed(run: TrainedRun, weights: tuple[float, ...] = (), **data: Any) -> None:
    """The job is edited before the next attempt."""
    mapping = run.job.to_json()
    for source, weight in zip(mapping["data"]["sources"], weights, strict=False):
        source["weight"] = weight
    mapping["data"] |= data
    run.job = parse_config(mapping)
    run.spec = starting.prepare(run.job, run.store.storage, freeze=True)
