"""What every start does before there is a cluster: one row of starts after another, on the real store and the
real data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator import starting
from orchestrator.attempt import Attempt
from orchestrator.config import JobConfig, parse_config
from orchestrator.monitor.journal import JournalWriter
from orchestrator.plan.resume import ResumePlan
from orchestrator.records import StateKey
from orchestrator.resume.store import RunStore
from orchestrator.storage import Storage
from tests.resume.samples import key, record, start, write_vote


class Runner:
    """A run that is started again and again; each launch trains ten steps and saves, without a model."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = dict(mapping)
        self.folder = starting.run_folder(self.config())
        self.store = RunStore(Storage(str(self.folder)))

    def config(self, **data: Any) -> JobConfig:
        return parse_config({**self._mapping, "data": {**self._mapping["data"], **data}})

    def plan(self, **data: Any) -> ResumePlan:
        job = self.config(**data)
        return starting.look_ahead(self.store, job, starting.prepare(job, self.folder, freeze=False))

    def begin(self, **data: Any) -> Attempt:
        job = self.config(**data)
        spec = starting.prepare(job, self.folder, freeze=True)
        return starting.claim(self.store, job, spec)[0]

    def launch(self, **data: Any) -> StateKey:
        """A whole launch; the key of the point that it leaves."""
        attempt = self.begin(**data)
        journal = JournalWriter(self.store.storage, attempt.number)
        journal.generation(start(1, attempt.parent, attempt.number))
        first = attempt.parent.step if attempt.parent else 0
        for step in range(first + 1, first + 11):
            journal.step(record(key(step, attempt=attempt.number)))
        journal.close()
        at = key(first + 10, attempt=attempt.number)
        votes = [write_vote(self.store.storage, at, rank) for rank in range(2)]
        flat = self.config(**data).flat()
        self.store.commit_point(votes, flat, {"rule": "none"}, attempt.parent)
        self.store.write_end(attempt.number, "stopped", "asked to")
        return at


@pytest.fixture
def runner(tiny_config: Any) -> Runner:
    return Runner(tiny_config({"train.max_steps": 1000}))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize(("first", "other"), [("tokenizers", "gigatoken"), ("gigatoken", "tokenizers")])
def test_another_encoder_is_refused_at_every_start_and_the_runs_own_goes_on_at_every_start(
    runner: Runner, first: str, other: str
) -> None:
    newest = runner.launch(encoder=first)
    for wanted in ("auto", first, "auto", first):
        before = files(runner.folder)
        refused = runner.plan(encoder=other)
        assert refused.action == "refuse"
        (refusal,) = refused.refusals
        assert f"the run encodes with {first} " in refusal
        assert f"the job asks for data.encoder={other}" in refusal
        assert "data.encoder" in [difference.field for difference in refused.differences]
        assert files(runner.folder) == before
        plan = runner.plan(encoder=wanted)
        assert (plan.action, plan.point) == ("resume", newest.point_name)
        newest = runner.launch(encoder=wanted)
