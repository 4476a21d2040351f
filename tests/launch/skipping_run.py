"""A run that is started with real start commands and trains what the feed gives, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orchestrator
from orchestrator.checkpoint.commit.store_actions import note_committed
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt, note_beginning
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.history.claims.claims import ClaimParent, GenerationStart
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.json_form import decode, encode, seal, unseal
from orchestrator.launch.process import launch_report
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import BatchSlice, StateKey, StepRange, StepRecord
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import write_vote

BATCH, SEQ_LEN = 4, 32


class SkippingRun:
    """A run that is started with real start commands; what a launch trains is what the feed gives from the
    attempt's point on.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = dict(mapping)
        self.folder = Path(starting.run_storage(parse_config(self.mapping)).root)
        self.store = RunStore(Storage(str(self.folder)))
        self.trained: list[int] = []  # indices, in the order of training
        self.batches: list[BatchSlice] = []

    def job(self, *overrides: str) -> JobConfig:
        return parse_config(self.mapping, overrides)

    def plan(self, *overrides: str) -> ResumePlan:
        return orchestrator.plan(self.job(*overrides))

    def begin(self, *overrides: str) -> Attempt:
        """A start command until it has claimed."""
        job = self.job(*overrides)
        spec = starting.prepare(job, self.store.storage, freeze=False)
        newest = max(self.store.claim_numbers(), default=0)
        said: list[str] = []
        looked = preview.look_before_start(self.store, job, spec, lambda: newest)
        assert not preview.reached(looked)
        with attempt_claim.claimed(self.store, job, spec, newest, looked=looked) as (attempt, plan):
            starting.freeze(job, self.store.storage, spec, attempt)
            launch_report.announce(said.append, job, attempt, plan)
        self.said = "\n".join(said)
        return attempt

    def launch(self, num_steps: int, *overrides: str) -> StateKey:
        """A whole launch; the key of the point that it leaves."""
        return self.train(self.begin(*overrides), num_steps, *overrides)

    def train(self, attempt: Attempt, num_steps: int, *overrides: str, save: bool = True) -> StateKey:
        """The rest of a launch, which trains from the attempt's point on; without `save` as if killed."""
        job, point = self.job(*overrides), attempt.point
        journal = JournalWriter(self.store.storage, attempt.number, run_id=attempt.run_id)
        note_beginning(journal, attempt, job.flat())
        cursor = point.cursor if point else Cursor()
        batch, seq_len = job.train.global_batch_size, job.pack.seq_len
        key = StateKey(attempt=attempt.number, generation=1, step=attempt.step_label)
        journal.generation(
            GenerationStart(
                attempt=attempt.number, generation=1, parent=attempt.parent, step=key.step, world_size=1,
                consumed_samples=cursor.consumed_samples, consumed_tokens=cursor.consumed_tokens,
                target_tokens=cursor.target_tokens, global_batch_size=batch, seq_len=seq_len,
            )
        )  # fmt: skip
        data = starting.read_frozen_data(job, self.store.storage, starting.reading_of(attempt))
        feed = InProcessFeed(data.made_by(attempt.encoders))
        for _ in range(num_steps):
            asked = StepRange(
                first_sample=cursor.consumed_samples, num_samples=batch, num_tokens=batch * seq_len,
                seq_len=seq_len,
            )  # fmt: skip
            taken = feed.get(asked, 0, 1, batch, cursor)
            if not taken.step.num_samples:
                break
            self.trained += range(taken.first_index, taken.first_index + taken.step.num_samples)
            self.batches.append(taken)
            cursor, key = taken.cursor, replace(key, step=key.step + 1)
            journal.step(
                StepRecord(
                    attempt=key.attempt, generation=1, step=key.step,
                    consumed_samples=cursor.consumed_samples, consumed_tokens=cursor.consumed_tokens,
                    target_tokens=cursor.target_tokens, loss=1.0,
                    grad_norm=1.0, lr=1.0, digest=f"{taken.step_digest:016x}", step_s=1.0, data_wait_s=0.0,
                    save_blocked_s=0.0,
                )
            )  # fmt: skip
            if taken.end_of_data:
                break
        feed.close()
        if save:
            votes = [replace(write_vote(self.store.storage, key, rank), cursor=cursor) for rank in range(2)]
            made = self.store.commit_point(
                votes, job.flat(), {"rule": "none"}, attempt.parent, run_id=attempt.run_id
            )
            note_committed(journal, made)
        journal.close()
        self.store.write_end(attempt.number, "stopped", "asked to", attempt.run_id)
        return key

    def claim(self, number: int) -> ClaimParent:
        found = self.store.read_parent(number)
        assert isinstance(found, ClaimParent)
        return found

    def audit(self, steps: str | None = None) -> dict[str, Any]:
        return orchestrator.open(self.folder).audit(steps)

    def rewrite_claim(self, number: int, change: Callable[[ClaimParent], ClaimParent]) -> None:
        path = self.folder / "attempts" / f"{number:04d}.parent.json"
        path.write_bytes(seal(encode(change(decode(ClaimParent, unseal(path.read_bytes()))))))


def survey_newest(run: SkippingRun) -> str:
    return orchestrator.open(run.folder).list_points()[-1]["name"]
