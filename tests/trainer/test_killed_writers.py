"""The processes beside members that write their parts are killed in a save, and members while theirs write:
the save is given up or whole, training goes on, and neither processes nor shared memory are left.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.processes import ended
from tests.trainer.kills import killed, part_writers
from tests.trainer.launch import Launch
from tests.trainer.member import Members, Plan, members, run_to_end, tiny_job

pytestmark = pytest.mark.xdist_group("forked")

REPLICATE, SHARD = "replicate", "shard"
SECOND = "00000004-a0001-g0001"
END = 6
LARGE = {"hidden_size": 256, "intermediate_size": 1024}  # half of it is for a process to write


def job_of(parallel: str) -> TrainJob:
    job = tiny_job(
        train__numerics="fast",
        train__parallel=parallel,
        train__max_steps=END,
        resume__every_steps=2,
        resume__memory_every_steps=1,
    )
    return dataclasses.replace(job, model=job.model.model_copy(update={"config": job.model.config | LARGE}))


def losses(launch: Launch) -> list[float]:
    found = {record.step: record.loss for _, record in sorted(launch.records.items())}
    return [found[step] for step in range(1, END + 1)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    """Two members whom nobody disturbs."""
    return {
        parallel: run_to_end(tmp_path_factory.mktemp(parallel), 2, job=job_of(parallel))
        for parallel in (REPLICATE, SHARD)
    }


def buffers(pid: int) -> set[int]:
    """The shared memory that a process has for what it stages (inodes)."""
    links = (entry for entry in Path(f"/proc/{pid}/fd").iterdir())
    return {link.stat().st_ino for link in links if "orchestrator-staging" in os.readlink(link)}


def mapped(inodes: set[int]) -> Iterator[str]:
    """Who has a part of it still: processes that have it open, or in their memory."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if buffers(int(process.name)) & inodes:
                yield f"{process.name} has it open"
            lines = (process / "maps").read_text().splitlines()
        except (OSError, ValueError):
            continue  # it ended, or is another user's
        if any("orchestrator-staging" in line and int(line.split()[4]) in inodes for line in lines):
            yield f"{process.name} has it mapped"


def stopped_in_the_second_save(group: Members) -> int:
    """The writer of a, which stands still and has its part of the second save to write."""
    launch = group.launch
    launch.wait_for(lambda: launch.held("a") is not None and bool(launch.points))
    (writer,) = part_writers(group.processes["a"].pid or 0)
    os.kill(writer, signal.SIGSTOP)
    launch.release("a")
    launch.wait_for(lambda: len(launch._votes.get(SECOND, ())) == 1)  # b's, so that it was begun
    return writer


def assert_sound(group: Members, writer: int, memory: set[int]) -> None:
    launch = group.launch
    names = list(launch.points)
    assert SECOND not in names
    assert names[-1].startswith(f"{END:08d}-")
    store = RunStore(launch.storage)
    assert [store.verify_point(name) for name in names] == [[] for _ in names]
    left = launch.storage.list("points")
    assert left == names, "nothing is left of the save that was given up"
    assert has_ended(writer)
    assert list(mapped(memory)) == []


@pytest.mark.chaos
@pytest.mark.parametrize("parallel", [REPLICATE, SHARD])
def test_a_writer_that_is_killed_costs_the_save_and_no_step(
    tmp_path: Path, calm: dict[str, Launch], parallel: str
) -> None:
    plans = {"a": Plan(hold=("step_begin", 4))}
    with members(tmp_path, ["a", "b"], plans, job_of(parallel)) as group:
        writer = stopped_in_the_second_save(group)
        memory = buffers(group.processes["a"].pid or 0)
        os.kill(writer, signal.SIGKILL)
        group.finish()
        assert killed(group) == set()
        launch = group.launch
        assert any("was killed by signal 9" in text for text in launch.status().warnings)
    assert memory, "it was seen"
    assert len(launch.views) == 1
    assert_sound(group, writer, memory)
    assert losses(launch) == losses(calm[parallel])
    assert launch.last_point().state_digest == calm[parallel].last_point().state_digest


@pytest.mark.chaos
@pytest.mark.parametrize("parallel", [REPLICATE, SHARD])
def test_a_member_that_is_killed_while_its_writer_writes_takes_it_along(
    tmp_path: Path, calm: dict[str, Launch], parallel: str
) -> None:
    plans = {"a": Plan(hold=("step_begin", 4))}
    with members(tmp_path, ["a", "b"], plans, job_of(parallel)) as group:
        writer = stopped_in_the_second_save(group)
        handle = os.pidfd_open(writer)
        memory = buffers(group.processes["a"].pid or 0)
        group.processes["a"].kill()
        group.finish()
        assert killed(group) == {"a"}
        launch = group.launch
    assert ended(handle), "the writer outlives its member"
    assert [view.world_size for view in launch.views] == [2, 1]
    assert launch.views[1].point is None, "memory was enough"
    assert_sound(group, writer, memory)
    assert losses(launch) == pytest.approx(losses(calm[parallel]), rel=1e-5)


def has_ended(pid: int) -> bool:
    """Perhaps nobody has asked how yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
