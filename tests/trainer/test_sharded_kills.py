"""Members of sharded groups die anywhere: the others go on in their processes, from what is whole among them,
and the end is that of a run that was re-formed at the same steps and never disturbed, to the last bit.
"""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records import GenerationView, Source, StateKey
from orchestrator.trainer.job import TrainJob
from tests.trainer.launch import Launch
from tests.trainer.member import Members, Plan, members, run_to_end, tiny_job

SHARD, HSDP = "shard", {"shard": 2, "replicate": 2}
END = 8
Segments = tuple[tuple[int, int], ...]  # (world size, up to which step)


def job_of(parallel: Any, **changes: Any) -> TrainJob:
    return tiny_job(
        train__numerics="fast", train__parallel=parallel, **{"resume__memory_every_steps": 2, **changes}
    )


def losses(*launches: Launch) -> list[float]:
    """Of the history, by step: later generations have made some again."""
    found = {r.step: r.loss for launch in launches for _, r in sorted(launch.records.items())}
    assert sorted(found) == list(range(1, END + 1)), "every step is in the history, once"
    return [found[step] for step in sorted(found)]


def segments_of(views: list[GenerationView]) -> Segments:
    """Which world trained which steps of the history that the last generation stands on."""
    begun: list[tuple[int, int]] = []  # (first step - 1, world size)
    for view in views:
        begun = [(step, world) for step, world in begun if step < view.step]
        begun.append((view.step, view.world_size))
    ends = [*(step for step, _ in begun[1:]), END]
    return tuple((world, end) for (_, world), end in zip(begun, ends, strict=True))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Runs that nobody disturbs: each segment is a launch of its own that continues the point of the last."""

    @cache
    def run(parallel: str, segments: Segments) -> tuple[list[float], str]:
        folder, launches, point = tmp_path_factory.mktemp("calm"), list[Launch](), None
        for attempt, (world, end) in enumerate(segments, 1):
            job = job_of(SHARD if parallel == "shard" else HSDP, train__max_steps=end)
            launches.append(run_to_end(folder, world, attempt=attempt, point=point, job=job))
            point = launches[-1].last_point().key.point_name
        return losses(*launches), launches[-1].last_point().state_digest

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    return losses(run_to_end(tmp_path_factory.mktemp("alone"), 1, job=job_of("replicate")))


def assert_as_if_nothing_happened(launch: Launch, parallel: Any, calm: Any, alone: list[float]) -> None:
    """The history is, bit by bit, that of calm runs of the same worlds; and nearly that of one process."""
    found = losses(launch)
    name = "shard" if parallel == SHARD else "hsdp"
    expected, digest = calm(name, segments_of(launch.views))
    assert found == expected
    assert launch.last_point().state_digest == digest
    assert found == pytest.approx(alone, rel=1e-5)


def killed(group: Members) -> set[str]:
    return {name for name, process in group.processes.items() if process.exitcode == -signal.SIGKILL}


def run_with(
    folder: Path, names: str, plans: dict[str, Plan], parallel: Any = SHARD, **changes: Any
) -> tuple[Launch, set[str]]:
    """To the end, and who was killed on the way."""
    with members(folder, list(names), plans, job_of(parallel, **changes)) as group:
        group.finish()
        return group.launch, killed(group)


# ---- one rank
@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("gradient_done", 5),
        ("summary_received", 5),
        ("applied", 5),
        ("memory_staged", 2),
        ("neighbour_half_sent", 2),
        ("sealed", 2),
    ],
)
def test_fsdp2_without_a_rank_goes_on_from_a_memory_point(tmp_path, calm, alone, place, step):
    launch, dead = run_with(tmp_path, "abc", {"b": Plan(kill=(place, step))})
    assert dead == {"b"}
    first, second = launch.views
    assert (first.world_size, second.world_size) == (3, 2)
    assert second.point is None, "no file was needed"
    assert second.parent is not None
    # a memory point that was sealed, or is whole among those who are left
    assert second.parent.step in (0, 2, 4)
    if place == "sealed":
        assert second.parent == StateKey(attempt=1, generation=1, step=2)
    assert len(second.sources) == 3
    copies = {Source.STAGED, Source.NEIGHBOUR}
    assert any({s.source for s in of_one} <= copies for of_one in second.sources), "nobody trains that shard"
    assert_as_if_nothing_happened(launch, SHARD, calm, alone)


def test_hsdp_with_a_whole_replica_left_loses_no_step(tmp_path, calm, alone):
    launch, dead = run_with(tmp_path, "abcd", {"b": Plan(kill=("gradient_done", 5))}, HSDP)
    assert dead == {"b"}
    second = launch.views[1]
    assert (second.parent, second.world_size) == (StateKey(attempt=1, generation=1, step=4), 3)
    assert_as_if_nothing_happened(launch, HSDP, calm, alone)
