"""A run that is started again and again without a model, rewound, and damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.commit.store_actions import note_committed
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.machine import Process
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt, note_beginning
from orchestrator.data.spec import DataSpec
from orchestrator.history.claims.claim_files import seal_starts
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, record, start, write_vote

LIMIT_S = 60.0


def newest_attempt(store: RunStore) -> int:
    """What a start has watched that found nobody at work."""
    return max(store.claim_numbers(), default=0)


class Runner:
    """A run that is started again and again; each launch trains ten steps and saves, without a model."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = dict(mapping)
        self.folder = Path(starting.run_storage(self.config()).root)
        self.store = RunStore(Storage(str(self.folder)))
        self.as_stored: Callable[[dict[str, Any]], dict[str, Any]] = (
            dict  # what a version writes of a flat one
        )

    def copied(self, storage: Path) -> Runner:
        """The run as it stands, in another storage folder."""
        other = Runner({**self.mapping, "run": {**self.mapping["run"], "storage": str(storage)}})
        shutil.copytree(self.folder, other.folder)
        return other

    def config(self, train: Mapping[str, Any] = {}, resume: Mapping[str, Any] = {}, **data: Any) -> JobConfig:
        sections = {"train": train, "resume": resume, "data": data}
        mapping = {name: {**self.mapping[name], **changes} for name, changes in sections.items()}
        return parse_config({**self.mapping, **mapping})

    def plan(self, **data: Any) -> ResumePlan:
        job = self.config(**data)
        return preview.look_ahead(
            self.store, job, starting.prepare(job, self.store.storage, freeze=False)
        )

    def prepared(self, **data: Any) -> DataSpec:
        return starting.prepare(self.config(**data), Storage(str(self.folder)), freeze=False)

    def begin(self, by: Process | None = None, **data: Any) -> Attempt:
        job = self.config(**data)
        spec = starting.prepare(job, self.store.storage, freeze=True)
        newest = newest_attempt(self.store)
        with attempt_claim.claimed(self.store, job, spec, newest, process=by) as (attempt, _):
            return attempt

    def journal(self, attempt: Attempt) -> JournalWriter:
        return JournalWriter(self.store.storage, attempt.number, run_id=attempt.run_id)

    def launch(self, **data: Any) -> StateKey:
        """A whole launch; the key of the point that it leaves."""
        attempt = self.begin(**data)
        journal = self.journal(attempt)
        note_beginning(journal, attempt, self.as_stored(self.config(**data).flat()))
        journal.generation(start(1, attempt.parent, attempt.number))
        first = attempt.parent.step if attempt.parent else 0
        for step in range(first + 1, first + 11):
            journal.step(record(key(step, attempt=attempt.number)))
        at = key(first + 10, attempt=attempt.number)
        votes = [write_vote(self.store.storage, at, rank) for rank in range(2)]
        flat = self.as_stored(self.config(**data).flat())
        journal.flush()
        seal_starts(self.store.storage, journal.starts_up_to(at), attempt.run_id)
        point = self.store.commit_point(votes, flat, {"rule": "none"}, attempt.parent, run_id=attempt.run_id)
        note_committed(journal, point)
        journal.close()
        lines = journal.num_durable
        self.store.write_end(attempt.number, "stopped", "asked to", attempt.run_id, "", lines)
        return at


def rewind(runner: Runner, to: StateKey, keep_latest: int = 3) -> tuple[Attempt, ResumePlan, JobConfig]:
    """A start that goes back to a point."""
    job = runner.config()
    changes = {"from_": to.point_name, "keep_latest": keep_latest}
    job = job.model_copy(update={"resume": job.resume.model_copy(update=changes)})
    spec = starting.prepare(job, runner.store.storage, freeze=True)
    with attempt_claim.claimed(runner.store, job, spec, newest_attempt(runner.store)) as (attempt, plan):
        return attempt, plan, job


def nobody() -> int:
    """A watch that found nobody at work."""
    return 2


def begun(runner: Runner, by: Process | None = None) -> Attempt:
    """An attempt whose coordinator has begun its journal."""
    attempt = runner.begin(by)
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, {}, by)
    journal.close()
    return attempt


def damage_weights(folder: Path, point: StateKey) -> str:
    weights = max((folder / "points" / point.point_name / "state").iterdir())
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    return weights.name
