"""Jobs of sharded groups, and the undisturbed runs with which those with kills are compared."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.records.membership import GenerationView
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.trainer.kills import END
from tests.trainer.launch import Launch
from tests.trainer.member import tiny_job

REPLICATE, SHARD, HSDP = "replicate", "shard", {"shard": 2, "replicate": 2}
Segments = tuple[tuple[int, int], ...]  # (world size, up to which step)


ADAPTERS = {"rank": 3, "alpha": 6.0, "dropout": 0.1, "target_modules": ["q_proj", "up_proj"]}


def job_of(parallel: Any, adapters: str = "", **changes: Any) -> TrainJob:
    """`adapters`: the folder of their base; empty: the job trains whole weights."""
    if adapters:
        lora = {**ADAPTERS, "modules_to_save": ["lm_head"]}
        changes = {**changes, "model__pretrained": adapters, "model__lora": lora}
    # a calm run may end after any step, which no warm-up may be longer than
    fixed = {"train__numerics": "fast", "train__warmup_steps": 1, "resume__memory_every_steps": 2}
    return tiny_job(train__parallel=parallel, **{**fixed, **changes})


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


def assert_as_if_nothing_happened(
    launch: Launch, parallel: Any, calm: Any, alone: list[float], tolerance: float = 1e-5, **changes: Any
) -> None:
    """The history is, bit by bit, that of calm runs of the same worlds; and nearly that of one process."""
    found = losses(launch)
    name = "hsdp" if parallel == HSDP else parallel
    expected, digest = calm(name, segments_of(launch.views), **changes)
    assert found == expected
    assert launch.last_point().state_digest == digest
    assert found == pytest.approx(alone, rel=tolerance)
