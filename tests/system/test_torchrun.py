"""The same runs under plain torchrun, without Ray: real processes, kills and stops.

What only torchrun's agent does has a real torchrun: its exit code, its restarts, its signals. The other
groups are ranks without an agent (tests/torchrun/ranks.py), which begin in a tenth of the time.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.machine import descendants
from orchestrator.faults import FREEZE, FaultPlan
from orchestrator.storage.files import Storage
from tests.ports import free_ports
from tests.system.harness import Job, assert_exactly_once, log_text, when_said, when_step
from tests.system.new_data import (
    ANEW,
    assert_lists_were_followed,
    first_settings,
    second_settings,
)
from tests.torchrun.ranks import Ranks, ranks

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500), pytest.mark.xdist_group("forked")]
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0  # of one group, its restarts included


@pytest.fixture
def job(tiny_config: Any, tmp_path: Path) -> Job:
    """10 steps of 8 × 32 tokens, a point every 4."""
    always = {"resume.every_steps": 4, "data.num_epochs": 1, "monitor.digest_every_steps": 1}
    return Job(tiny_config(always), tmp_path)


def start(
    job: Job,
    folder: Path,
    world_size: int,
    faults: FaultPlan | None = None,
    restarts: int = 0,
    rendezvous: Sequence[str] = ("--standalone",),
    python: Sequence[str] = (),
    **changes: Any,
) -> Any:
    """`torchrun` as a process of its own, which starts a failed group again `restarts` times. `rendezvous`:
    its options for where the machines meet; `python`: what its ranks begin with.
    """
    path = folder / f"job-{len(list(folder.glob('job-*')))}.yaml"
    path.write_text(yaml.safe_dump(job.config(**changes).to_json()))
    program = [str(ROOT / "jobs" / "torchrun_train.py")]
    if faults is not None:
        program = [str(ROOT / "tests" / "system" / "torchrun_rank.py"), faults.to_json()]
    if python:
        program = ["--no-python", *python, *program]
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--max-restarts", str(restarts)]
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


def ended(group: Ranks) -> list[int]:
    """The exit codes of the ranks of a group that ends by itself."""
    codes = group.end(LIMIT_S)
    assert None not in codes, f"the group does not end:\n{group.said()}"
    return [code for code in codes if code is not None]


@pytest.fixture(scope="module")
def unbroken(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same run on one rank, which nothing befell."""
    folder = tmp_path_factory.mktemp("unbroken")
    alone = Job(tiny_config({"resume.every_steps": 4, "data.num_epochs": 1}), folder)
    with ranks(folder, 1, alone.config()) as group:
        assert ended(group) == [0], group.said()
    assert last_end(alone) == ("done", 1)
    return alone


# ---------------------------------------------------------------------------------------- under torchrun
@pytest.mark.chaos
def test_ranks_that_this_machine_cannot_hold_are_refused_before_anything_is_written(
    job: Job, tmp_path: Path
) -> None:
    shape = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 200}
    model = {**(job.config().model.config or {}), **shape}
    code, err = end(start(job, tmp_path, 2, model__config=model))
    assert code == 1, "torchrun's own code for a rank that ended with another than 0"
    assert "exitcode  : 2" in err
    assert re.search(r"^rank [01]: .*GiB of memory are needed for 2 workers \(", err, re.M)
    assert not Path(job.config().run.run_uri).exists()


@pytest.mark.chaos
def test_a_killed_group_continues_with_a_skip_on_another_world_batch_and_length(
    job: Job, tmp_path: Path
) -> None:
    # a rank writes its parts one after the other: the point of step 4 is decided when the last one is written
    plan = job.faults().kill("save_part_written", step=7, rank=0)
    with ranks(tmp_path, 3, job.config(train__max_steps=7), plan) as group:
        assert ended(group) == [-signal.SIGKILL, 1, 1]
        for rank in (1, 2):
            assert "the group of 3 ranks ended (rank 0 (pid " in group.said(rank)
    assert plan.struck() == [0]
    assert last_end(job) == ("failed", 1), "the coordinator outlives rank 0 until the end is written"
    assert [row["step"] for row in job.run.list_points()] == [4]

    # under torchrun two ranks, which leave out two of the point's steps of 8 × 32 tokens, then 6 × 16 from
    # the 1024 that it holds on, and a stop on request
    other = {"train__global_batch_size": 6, "pack__seq_len": 16, "train__max_steps": 100_000}
    other |= {"resume__skip_steps": 2}
    torchrun = start(job, tmp_path, 2, **other)

    def terminate_all() -> None:  # as Slurm and container runtimes do
        for pid in [torchrun.pid, *(each.pid for each in descendants([torchrun.pid]))]:
            os.kill(pid, signal.SIGTERM)

    watch = when_step(job, 14, terminate_all)
    _, err = end(torchrun)
    watch.join()
    assert "SIGTERM: saving and stopping" in err, err
    assert last_end(job) == ("stopped", 2), err
    stopped = job.run.list_points(verify=True)[-1]
    assert (stopped["attempt"], stopped["seq_len"], stopped["global_batch_size"]) == (2, 16, 6)
    assert (stopped["world_size"], stopped["healthy"]) == (2, True)
    assert stopped["consumed_tokens"] == job.run.records()[-1].consumed_tokens
    assert "skipped 16 samples (512 tokens) after" in err

    # one rank and the first shape again, with a budget that is no multiple of anything
    budget = stopped["consumed_tokens"] + 1500
    config = job.config(train__max_steps=None, train__max_tokens=budget)
    with ranks(tmp_path, 1, config) as group:
        assert ended(group) == [0], group.said()
    assert job.run.records()[-1].consumed_tokens == budget
    assert last_end(job) == ("done", 3)
    assert_exactly_once(job, left_out={32: (16, 512)})
    report = job.run.audit()
    assert report["attempts"] == 3
    left_out = [(row["attempt"], row["first_index"], row["samples"]) for row in report["skipped_samples"]]
    assert left_out == [(2, 32, 16)]

    # three ranks, two and one have trained these steps, with two shapes: one worker trains them again
    for record in Random(9).sample(job.run.records(), 5):
        again = job.run.replay(tokens=record.consumed_tokens)
        assert (again.step, again.first_difference) == (record.step, None), again
        # rank 0 of the first attempt was killed: the digests that it had not sent yet are lost with it
        assert again.equal or (again.equal is None and record.attempt == 1), again


@pytest.mark.chaos
def test_ranks_whose_coordinator_is_killed_keep_their_votes_and_the_next_start_commits_them(
    job: Job, unbroken: Job, tmp_path: Path
) -> None:
    plan = job.faults().kill("votes_complete", step=7)
    with ranks(tmp_path, 2, job.config(train__max_steps=7), plan) as group:
        assert ended(group) == [1, 1], group.said()
        said = [group.said(rank) for rank in (0, 1)]
        assert all("the connection to the coordinator has ended" in text for text in said), said
        assert "The vote for 00000007-a0001-g0001 is written" in said[0] + said[1]
    assert plan.struck() == [0]
    assert last_end(job) == ("no end", 1)
    assert [row["step"] for row in job.run.list_points()] == [4]
    with ranks(tmp_path, 2, job.config()) as group:
        assert ended(group) == [0, 0], group.said()
    assert "resumes from 00000007-a0001-g0001" in group.said()
    assert last_end(job) == ("done", 2)
    assert_exactly_once(job)
    assert job.final_digest() == unbroken.final_digest()


@pytest.mark.chaos
def test_ranks_that_find_the_newest_point_damaged_continue_the_older_one_within_the_same_start(
    job: Job, unbroken: Job, tmp_path: Path
) -> None:
    with ranks(tmp_path, 2, job.config(train__max_steps=8)) as group:
        assert ended(group) == [0, 0], group.said()
    folder = Path(job.run.uri, "points")
    older, newest = sorted(folder.iterdir())
    part = max((newest / "state").iterdir())
    content = bytearray(part.read_bytes())
    content[-1] ^= 1  # neither sizes nor headers show it
    part.write_bytes(bytes(content))

    # who names the damaged point gets no other one, however often the command is given
    for _ in range(2):
        with ranks(tmp_path, 2, job.config(resume__from=newest.name)) as group:
            assert ended(group)[0] == 2, group.said()
        assert part.name in group.said()
    (folder.parent / "quarantine" / f"{newest.name}.json").unlink()

    before = RunStore(Storage(job.run.uri)).claim_numbers()[-1]
    with ranks(tmp_path, 2, job.config()) as group:
        assert ended(group) == [0, 0], group.said()
    assert f"state/{part.name} holds" in group.said()
    assert last_end(job) == ("done", before + 2), "the attempt that loaded the point, and the next one"
    assert RunStore(Storage(job.run.uri)).quarantined() == {newest.name}
    assert [row["name"] for row in job.run.list_points() if row["on_lineage"]][0] == older.name
    assert_exactly_once(job)
    assert job.final_digest() == unbroken.final_digest()


@pytest.mark.chaos
def test_torchrun_restarts_ranks_of_two_machines_and_no_sample_is_trained_twice(
    job: Job, unbroken: Job, tmp_path: Path, warm: str
) -> None:
    # rank 1 dies in training, and once more before it meets rank 0, whose agent does not count that
    plan = job.faults().kill("applied", step=6, rank=1).kill("started", rank=1, after=0)
    rendezvous = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}")
    rendezvous += ("--local-addr=127.0.0.1", "--rdzv-id=two-machines")
    forked = (warm, "-X", "forked")
    agents = [start(job, tmp_path, 1, plan, 2, rendezvous, forked) for _ in range(2)]
    for code, err in map(end, agents):
        assert code == 0, err
    assert plan.struck() == [0, 1]
    store = RunStore(Storage(job.run.uri))
    ends = [store.read_end(number) for number in store.claim_numbers()]
    # the restart need not watch whether the first attempt still lives: it says that it has ended
    assert [each and each.outcome for each in ends] == ["failed", "done"]
    assert_exactly_once(job)
    assert job.final_digest() == unbroken.final_digest()
    assert job.losses() == unbroken.losses()


@pytest.mark.chaos
def test_a_restart_and_a_refresh_are_carried_out_once_although_torchrun_begins_the_ranks_again(
    job: Job, tmp_path: Path, warm: str
) -> None:
    first = first_settings(tmp_path / "data")
    with ranks(tmp_path, 2, job.config(**first)) as group:
        assert ended(group) == [0, 0], group.said()
    second = second_settings(tmp_path / "data", first)
    plan = job.faults().kill("commit_sent", step=4)  # behind a point, in the new lists
    code, err = end(start(job, tmp_path, 2, plan, 1, python=(warm, "-X", "forked"), **second))
    assert code == 0, err
    assert plan.struck() == [0]
    assert last_end(job) == ("done", 3)
    assert "source b begins anew with its 2 files as they are now (1 file before), as epoch 1" in err
    assert ANEW in err
    assert_lists_were_followed(job)


# ---------------------------------------------------------------------------------------- without an agent
def test_two_ranks_train_the_same_bits_as_one_and_a_frozen_one_is_named_while_the_other_waits(
    job: Job, unbroken: Job, tmp_path: Path
) -> None:
    plan = job.faults().add(FREEZE, "step_begin", step=6, rank=1)
    stopped = (
        r"worker 1 \(\S+, pid (\d+)\) has not answered for \d+\.\d s: its process is stopped \(SIGSTOP\)"
    )

    def thaw() -> None:
        found = re.search(stopped, log_text(job))
        assert found is not None
        os.kill(int(found.group(1)), signal.SIGCONT)

    with ranks(tmp_path, 2, job.config(), plan) as group:
        when_said(job, "its process is stopped", thaw)
        assert ended(group) == [0, 0], group.said()
        said = group.said()
    assert last_end(job) == ("done", 1)
    assert re.search(stopped, said)
    assert re.search(
        r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 2 of 2 workers are ready · starting at step 1$", said, re.M
    )
    assert_exactly_once(job)
    rows = [(row["step"], row["world_size"], row["healthy"]) for row in job.run.list_points(verify=True)]
    # another one between these begins when the first is decided
    assert (rows[0], rows[-1]) == ((4, 2, True), (10, 2, True))
    assert all(row[1:] == (2, True) for row in rows)
    assert job.final_digest() == unbroken.final_digest()
    assert job.losses() == unbroken.losses()


def test_a_refused_start_ends_all_ranks_with_the_reason_and_writes_nothing(job: Job, tmp_path: Path) -> None:
    model = {**(job.config().model.config or {}), "vocab_size": 10}
    reason = "model.config.vocab_size=10"
    with ranks(tmp_path, 2, job.config(model__config=model)) as group:
        assert ended(group) == [2, 1]
        assert f"rank 0: {reason}" in group.said(0)
        assert f"rank 1: rank 0 failed: {reason}" in group.said(1)
    assert not Path(job.config().run.run_uri).exists()


def test_a_run_folder_deleted_while_it_trains_fails_the_run_and_is_not_begun_beside_its_rest(
    job: Job, tmp_path: Path
) -> None:
    # saves come while it is being deleted: what is written again is the rest that is left
    config = job.config(train__max_steps=100_000, resume__every_steps=2)
    folder = Path(config.run.run_uri)
    with ranks(tmp_path, 1, config) as group:
        watch = when_step(job, 6, lambda: shutil.rmtree(folder, ignore_errors=True))
        assert ended(group) == [1], group.said()
        watch.join()
        assert "the run's folder was deleted, moved or replaced while it trained" in group.said()
    if RunStore(Storage(str(folder))).pieces():
        with ranks(tmp_path, 1, config) as group:
            assert ended(group) == [2]
            assert "a new run beside them would mix two histories" in group.said()
        assert not (folder / "run.json").exists()
