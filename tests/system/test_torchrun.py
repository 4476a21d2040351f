"""The same runs under plain torchrun, without Ray: real torchrun, real processes, kills and stops."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.coordinator.attempt import survey
from orchestrator.errors import FencedError
from orchestrator.faults import FREEZE, FaultPlan
from orchestrator.launch import start as starting
from orchestrator.records import Cursor, StateKey, StepRecord, Vote
from orchestrator.resume.store import RunStore
from orchestrator.storage.files import Storage
from orchestrator.torchrun.recorder import RankZeroRecorder
from tests.system.harness import Job, assert_exactly_once, log_text, when_said, when_step
from tests.torchrun.test_membership import free_port

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0  # of one torchrun, its restarts included


LLAMA = {"resume.every_steps": 4, "data.num_epochs": 1}
TINY = {**LLAMA, "model.factory": "tests.system.tiny_model:build"}


@pytest.fixture
def job(tiny_config: Any, tmp_path: Path) -> Job:
    """10 steps of 8 × 32 tokens, a point every 4."""
    return Job(tiny_config(TINY), tmp_path)


@pytest.fixture
def llama(tiny_config: Any, tmp_path: Path) -> Job:
    """The same job with a model of transformers."""
    return Job(tiny_config(LLAMA), tmp_path)


def start(
    job: Job,
    folder: Path,
    world_size: int,
    faults: FaultPlan | None = None,
    restarts: int = 0,
    meeting: Sequence[str] = ("--standalone",),
    **changes: Any,
) -> Any:
    """`torchrun` as a process of its own, which starts a failed group again `restarts` times. `meeting`: its
    options for where the machines meet.
    """
    path = folder / f"job-{len(list(folder.glob('job-*')))}.yaml"
    path.write_text(yaml.safe_dump(job.config(**changes).to_json()))
    program = [str(ROOT / "jobs" / "torchrun_train.py")]
    if faults is not None:
        program = [str(ROOT / "tests" / "system" / "torchrun_rank.py"), faults.to_json()]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, "--max-restarts", str(restarts)]
    return subprocess.Popen(
        [*launcher, "--nproc-per-node", str(world_size), *program, str(path)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(group: Any) -> tuple[int, str]:
    """(exit code, stderr) of a group that ends by itself."""
    try:
        _, err = group.communicate(timeout=LIMIT_S)
    finally:
        group.kill()
    return group.returncode, err


def last_end(job: Job) -> tuple[str, int]:
    """(outcome, attempt) of the newest attempt's end."""
    store = RunStore(Storage(job.run.uri))
    number = store.claim_numbers()[-1]
    ended = store.read_end(number)
    return (ended.outcome if ended else "no end", number)


@pytest.fixture(scope="module")
def unbroken(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same run on one rank, which nothing befell."""
    folder = tmp_path_factory.mktemp("unbroken")
    alone = Job(tiny_config(TINY), folder)
    code, err = end(start(alone, folder, 1))
    assert (code, last_end(alone)) == (0, ("done", 1)), err
    return alone


def test_ranks_that_this_machine_cannot_hold_are_refused_before_anything_is_written(
    llama: Job, tmp_path: Path
) -> None:
    shape = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200}
    model = {**(llama.config().model.config or {}), **shape}
    code, err = end(start(llama, tmp_path, 2, model__config=model))
    assert code != 0
    assert "GiB of memory are needed for 2 workers (" in err
    assert not Path(llama.config().run.run_uri).exists()


def test_a_killed_group_continues_on_another_world_batch_and_length(llama: Job, tmp_path: Path) -> None:
    # points are committed one after the other: that of step 4 is there when this one's turn comes
    plan = llama.faults().kill("votes_complete", step=8)
    code, _ = end(start(llama, tmp_path, 2, plan))
    assert (code, plan.struck()) == (1, [0])
    assert last_end(llama) == ("no end", 1)
    assert [row["step"] for row in llama.run.points()] == [4]

    # one rank, 6 × 16 tokens from the 1024 that the point holds, and a stop on request
    other = {"train__global_batch_size": 6, "pack__seq_len": 16, "train__max_steps": 100_000}
    group = start(llama, tmp_path, 1, **other)
    watch = when_step(llama, 14, group.terminate)
    _, err = end(group)
    watch.join()
    assert "SIGTERM: saving and stopping" in err, err
    assert last_end(llama) == ("stopped", 2), err
    stopped = llama.run.points()[-1]
    assert (stopped["attempt"], stopped["seq_len"], stopped["global_batch_size"]) == (2, 16, 6)
    assert stopped["consumed_tokens"] == llama.run.steps()[-1].consumed_tokens

    # two ranks and the first shape again, with a budget that is no multiple of anything
    budget = stopped["consumed_tokens"] + 1500
    code, err = end(start(llama, tmp_path, 2, train__max_steps=None, train__max_tokens=budget))
    assert code == 0, err
    assert llama.run.steps()[-1].consumed_tokens == budget
    assert last_end(llama) == ("done", 3)
    assert_exactly_once(llama)
    assert llama.run.audit()["attempts"] == 3


def test_torchrun_restarts_a_group_that_lost_a_rank_and_no_sample_is_trained_twice(
    job: Job, unbroken: Job, tmp_path: Path
) -> None:
    plan = job.faults().kill("applied", step=6, rank=1)
    code, err = end(start(job, tmp_path, 2, plan, restarts=1))
    assert code == 0, err
    assert plan.struck() == [0]
    store = RunStore(Storage(job.run.uri))
    ends = [store.read_end(number) for number in store.claim_numbers()]
    # the restart need not watch whether the first attempt still lives: it says that it has ended
    assert [ended and ended.outcome for ended in ends] == ["failed", "done"]
    assert_exactly_once(job)
    assert job.final_digest() == unbroken.final_digest()
    assert job.losses() == unbroken.losses()


def test_two_ranks_train_the_same_bits_as_one_and_a_frozen_one_is_named_while_the_other_waits(
    job: Job, unbroken: Job, tmp_path: Path
) -> None:
    plan = job.faults().add(FREEZE, "step_begin", step=6, rank=1)
    group = start(job, tmp_path, 2, plan)
    stopped = (
        r"worker 1 \(\S+, pid (\d+)\) has not answered for \d+\.\d s: its process is stopped \(SIGSTOP\)"
    )

    def thaw() -> None:
        found = re.search(stopped, log_text(job))
        assert found is not None
        os.kill(int(found.group(1)), signal.SIGCONT)

    when_said(job, "has not answered for", thaw)
    code, err = end(group)
    assert (code, last_end(job)) == (0, ("done", 1)), err
    assert re.search(stopped, err)
    assert re.search(
        r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 2 of 2 workers are ready · starting at step 1$", err, re.M
    )
    assert_exactly_once(job)
    rows = [(row["step"], row["world_size"], row["healthy"]) for row in job.run.points()]
    assert rows == [(4, 2, True), (8, 2, True), (10, 2, True)]
    assert job.final_digest() == unbroken.final_digest()
    assert job.losses() == unbroken.losses()


def test_ranks_of_two_machines_that_were_restarted_unequally_often_find_each_other(
    job: Job, unbroken: Job, tmp_path: Path
) -> None:
    # rank 1 dies in training, and once more before it meets rank 0, whose agent does not count that
    plan = job.faults().kill("applied", step=6, rank=1).kill("started", rank=1, after=0)
    meeting = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    meeting += ("--local-addr=127.0.0.1", "--rdzv-id=two-machines")
    agents = [start(job, tmp_path, 1, plan, restarts=2, meeting=meeting) for _ in range(2)]
    for code, err in map(end, agents):
        assert code == 0, err
    assert plan.struck() == [0, 1]
    assert last_end(job)[0] == "done"
    assert_exactly_once(job)
    rows = [(row["step"], row["weights_digest"]) for row in job.run.points() if row["on_lineage"]]
    assert rows == [(row["step"], row["weights_digest"]) for row in unbroken.run.points()]
    assert job.losses() == unbroken.losses()


def test_a_refused_start_ends_all_ranks_with_the_reason_and_writes_nothing(
    llama: Job, tmp_path: Path
) -> None:
    model = {**(llama.config().model.config or {}), "vocab_size": 10}
    code, err = end(start(llama, tmp_path, 2, model__config=model))
    assert code == 1, "torchrun's own code for a rank that ended with another than 0"
    assert "rank 0: ConfigError: model.config.vocab_size=10" in err
    assert "exitcode  : 2" in err
    assert not Path(llama.config().run.run_uri).exists()


def test_a_run_folder_deleted_while_it_trains_fails_the_run_and_is_not_begun_beside_its_rest(
    job: Job, tmp_path: Path
) -> None:
    # saves come while it is being deleted: what is written again is the rest that is left
    changes = {"train__max_steps": 100_000, "resume__every_steps": 2}
    folder = Path(job.config().run.run_uri)
    group = start(job, tmp_path, 1, **changes)
    watch = when_step(job, 6, lambda: shutil.rmtree(folder, ignore_errors=True))
    code, err = end(group)
    watch.join()
    assert code == 1, err
    assert "somebody deleted or replaced the run's folder while it trained" in err, err
    if RunStore(Storage(str(folder))).pieces():
        code, err = end(start(job, tmp_path, 1, **changes))
        assert code == 1
        assert "a new run beside them would mix two histories" in err, err
        assert not (folder / "run.json").exists()


def record(step: int) -> StepRecord:
    counts = dict.fromkeys(("consumed_samples", "consumed_tokens", "target_tokens"), 8 * step)
    floats = dict.fromkeys(("loss", "grad_norm", "lr", "step_s", "data_wait_s", "save_blocked_s"), 0.5)
    return StepRecord(attempt=1, generation=1, step=step, digest="0" * 16, **counts, **floats)


def cast(keeper: RankZeroRecorder, world_size: int, step: int) -> list[Future[bool]]:
    """The votes of all ranks for a save without tensors."""
    key, cursor = StateKey(attempt=1, generation=1, step=step), Cursor(consumed_samples=8 * step)
    return [
        keeper.vote(
            Vote(
                key=key,
                rank=rank,
                world_size=world_size,
                cursor=cursor,
                optimizer_steps=step,
                files=(),
                tensors=(),
                save_blocked_s=0.0,
                records=(),
            )
        )
        for rank in range(world_size)
    ]


@pytest.fixture
def told() -> list[str]:
    """What the keeper has said."""
    return []


@pytest.fixture
def keeper(job: Job, told: list[str]) -> RankZeroRecorder:
    """Of a run that has just been claimed; its group of 2 has begun."""
    config = job.config()
    folder = starting.run_folder(config)
    store = RunStore(Storage(str(folder)))
    spec = starting.prepare(config, folder, freeze=False)
    with starting.claimed(store, config, spec, watched=0) as (attempt, _):
        made = RankZeroRecorder(store, attempt, config, told.append)
    assert made.begin(2).attempt == 1
    return made


def test_votes_commit_a_point_only_when_the_journal_has_its_steps(
    job: Job, keeper: RankZeroRecorder, told: list[str]
) -> None:
    keeper.records([record(1)])
    assert [answer.result(LIMIT_S) for answer in cast(keeper, 2, 1)] == [True, True]
    # nobody has brought the record of step 2
    assert [answer.result(LIMIT_S) for answer in cast(keeper, 2, 3)] == [False, False]
    assert told == [
        "2 of 2 workers are ready · starting at step 1",
        "warning: the save of 00000003-a0001-g0001 was given up: "
        "the journal lacks step records before it, and no voter brought them",
    ]
    keeper.finished(StateKey(attempt=1, generation=1, step=1), "stopped")
    assert [point["name"] for point in job.run.points()] == ["00000001-a0001-g0001"]
    assert last_end(job) == ("stopped", 1)
    kinds = [event.kind for event in survey(RunStore(Storage(job.run.uri))).journal.events]
    assert kinds == ["attempt", "group formed", "point committed", "save given up", "end"]


def test_a_newer_launch_silences_the_keeper(job: Job, keeper: RankZeroRecorder) -> None:
    keeper.records([record(1)])
    store = RunStore(Storage(job.run.uri))
    run = store.read_run()
    assert run is not None
    store.claim(2, "another-launch", "resume", "another-host", run.id)
    for answer in cast(keeper, 2, 1):
        with pytest.raises(FencedError, match="attempt 2 of this run exists"):
            answer.result(LIMIT_S)
    with pytest.raises(FencedError):
        keeper.records([record(2)])
    with pytest.raises(FencedError):
        keeper.finished(StateKey(attempt=1, generation=1, step=1), "done")
    keeper.failed(FencedError("attempt 2 of this run exists"))
    assert store.read_end(1) is None
    assert not job.run.points(), "the newer launch did not inherit a point that came after its claim"
