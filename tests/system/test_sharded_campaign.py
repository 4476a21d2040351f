"""The campaign of sharded groups (`make chaos`): workers, all of them, and the coordinator are killed at
scripted places of steps, memory points, saves and re-formings, while layout and number of workers change
between launches. It ends in the losses of the same launches that nobody disturbed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.faults import FREEZE, FaultPlan
from orchestrator.history.journal.journal_reader import Journal, read_journal
from orchestrator.storage.files import Storage
from tests.conftest import TinyConfig
from tests.inspect.lost_steps import assert_views_count_each_lost_step_once, lost_steps
from tests.system.conftest import OPEN, TINY, with_evaluation
from tests.system.harness import LIMIT_S, Job, assert_exactly_once, sigkill, thaw, when_struck
from tests.trainer.read_back import read_back

pytestmark = [pytest.mark.system, pytest.mark.chaos, pytest.mark.timeout(1800)]

SHARD, HSDP = "shard", {"shard": 2, "replicate": 2}
COORDINATOR = -1  # who is killed, beside ranks


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Whoever comes to `place` next dies there; only `rank`, if it is given. With `victims` (ranks,
    `COORDINATOR`) it stands still instead until these are killed.
    """

    place: str
    rank: int = -1
    victims: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Part:
    """A launch of the campaign: who trains up to which step, and who is killed meanwhile, one after the
    other.

    Nobody trains while one is missing, but for one step that is saved. So the last rank is there only while
    all are, and has agreed on the state wherever it steps: each kill that names it finds a whole group. Who
    has lost the coordinator alone trains on, nobody knows how far: so it is killed while nobody can train, or
    as the last one.
    """

    parallel: Any
    workers: int
    until: int
    kills: tuple[Kill, ...]

    def settings(self) -> dict[str, Any]:
        return {
            "train__parallel": self.parallel,
            "cluster__num_workers": [self.workers, self.workers],
            "train__max_steps": self.until,
        }


CAMPAIGN = (
    Part(
        parallel=SHARD,
        workers=3,
        until=40,
        kills=(
            Kill(place="sealed", rank=2),
            Kill(place="generation_journalled"),
            Kill(place="claim_made"),
            Kill(place="memory_staged", rank=2),
            Kill(place="neighbour_half_sent", rank=2),
            Kill(place="staged", rank=2),
            Kill(place="summary_received", rank=2, victims=(0, 1, 2)),
            Kill(place="votes_complete"),
        ),
    ),
    # whoever is lost from all four leaves a whole replica, and who joins has nothing that the others lack
    Part(
        parallel=HSDP,
        workers=4,
        until=80,
        kills=(
            Kill(place="step_begin", rank=3, victims=(1, COORDINATOR)),
            Kill(place="gradient_done", rank=3),
            Kill(place="state_half_received", rank=3),
            Kill(place="applied", rank=3, victims=(0,)),
            Kill(place="save_part_written", rank=3),
            Kill(place="commit_sent"),
        ),
    ),
    Part(
        parallel=SHARD,
        workers=2,
        until=95,
        kills=(Kill(place="sealed", rank=1), Kill(place="gradient_done", rank=1)),
    ),
)


def plan_of(job: Job, kills: Sequence[Kill]) -> FaultPlan:
    """Each strikes once the one before it has."""
    plan = job.faults()
    for number, kill in enumerate(kills):
        if kill.victims:
            plan = plan.add(FREEZE, kill.place, rank=kill.rank, after=number - 1)
        else:
            plan = plan.kill(kill.place, rank=kill.rank, after=number - 1)
    return plan


def journal_of(job: Job) -> Journal:
    return read_journal(Storage(job.run.uri))


def victims_of(journal: Journal, kill: Kill) -> tuple[int, list[int]]:
    """The processes of the newest generation that stands still there, and that are killed."""
    joins = {event.fields["member"]: event.fields for event in journal.events if event.kind == "join"}
    members = enumerate(journal.generations[-1].members)
    pids = {rank: int(joins[member]["pid"]) for rank, member in members}
    pids[COORDINATOR] = [int(e.fields["pid"]) for e in journal.events if e.kind == "attempt"][-1]
    return pids[kill.rank], [pids[victim] for victim in kill.victims]


def sigkill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        sigkill(pid)


def carry_out(job: Job, plan: FaultPlan, part: Part, killed: list[int]) -> None:
    """Kills whoever is to be killed when its place is reached, one after the other."""
    for number, kill in enumerate(part.kills):
        if kill.victims:
            when_struck(plan, number, lambda: None)
            stands, pids = victims_of(journal_of(job), kill)
            thaw(stands, partial(sigkill_all, pids))
            killed.append(number)


def train(job: Job, part: Part) -> FaultPlan:
    """One launch of the campaign; all its kills must have struck."""
    plan, killed = plan_of(job, part.kills), list[int]()
    killer = threading.Thread(target=carry_out, args=(job, plan, part, killed), daemon=True)
    killer.start()
    result = job.train(plan, **part.settings())
    assert (result.outcome, result.step) == ("done", part.until), result.reason
    assert plan.struck() == list(range(len(part.kills)))
    killer.join(LIMIT_S)
    assert killed == [number for number, kill in enumerate(part.kills) if kill.victims]
    return plan


@pytest.fixture(scope="module")
def calm(
    three_nodes: Any, tiny_config: TinyConfig, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], Job]:
    """The same launches without a kill, see `new_job`."""

    @cache
    def run(is_open: bool) -> Job:
        job = new_job(tiny_config, tmp_path_factory.mktemp("calm"), is_open)
        for part in CAMPAIGN:
            assert job.train(**part.settings()).outcome == "done"
        assert_exactly_once(job)
        return job

    return run


def new_job(tiny_config: TinyConfig, folder: Path, is_open: bool) -> Job:
    """The job of the campaign. `is_open`: with a user's own objective and a frozen model, Muon and
    evaluations.
    """
    mapping = tiny_config(
        {
            **(OPEN if is_open else TINY),
            "train.numerics": "fast",
            "resume.every_steps": 5,
            "resume.keep_latest": 1000,
            "resume.memory_every_steps": 3,
            "cluster.max_failures": 100,
        }
    )
    return Job(with_evaluation(mapping, 10) if is_open else mapping, folder)


@pytest.mark.parametrize("is_open", [False, True], ids=["built-in", "open"])
def test_kills_anywhere_in_sharded_groups_change_nothing(
    three_nodes: Any, tiny_config: TinyConfig, tmp_path: Path, calm: Callable[[bool], Job], is_open: bool
) -> None:
    job, undisturbed = new_job(tiny_config, tmp_path, is_open), calm(is_open)
    storage = Storage(job.config().run.run_uri)
    for part in CAMPAIGN:
        first = max((claim.number for claim in RunStore(storage).claims()), default=0) + 1
        plan = train(job, part)
        lost = sorted(key for key in lost_steps(storage) if key.attempt >= first)
        if part.parallel == HSDP:
            assert not lost, "a whole replica was left each time"
        else:
            # all were known to have that memory point when the first of them was killed
            sealed = plan.step_struck(0)
            assert all(key.step > sealed for key in lost), f"sealed was {sealed}, lost are {lost}"
    assert_exactly_once(job)
    # Newton-Schulz of Muon computes in bfloat16
    tolerance = 1e-3 if is_open else 1e-5
    assert job.losses() == pytest.approx(undisturbed.losses(), rel=tolerance)
    mine, theirs = (each.run.evals() for each in (job, undisturbed))
    assert [*mine["step"]] == [*theirs["step"]]
    assert [*mine["loss"]] == pytest.approx([*theirs["loss"]], rel=tolerance)
    assert_views_count_each_lost_step_once(job.run)
    config = job.config()
    assert read_back(storage, config.model, config.train) > len(CAMPAIGN)
