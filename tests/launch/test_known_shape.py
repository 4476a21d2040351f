"""The memory of a job that continues pretrained weights is judged by the folder's own configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.launch.capacity import KnownMachines, memory_plan
from orchestrator.launch.known_shape import with_known_shape
from orchestrator.launch.needs import needs_of
from tests.launch.test_capacity import LARGE, machines
from tests.planning.jobs import job

SEVEN_B = {"model_type": "llama", "num_attention_heads": 32, **LARGE}


def pretrained(folder: Path, *changes: str) -> list[str]:
    return [f"model={{pretrained: {folder}}}", *changes]


def test_pretrained_weights_need_what_the_same_configuration_needs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SEVEN_B, "torch_dtype": "bfloat16"}))
    of_config = job("model=" + json.dumps({"config": SEVEN_B}))
    assert needs_of(with_known_shape(job(*pretrained(tmp_path)))) == needs_of(of_config)
    assert with_known_shape(of_config) is of_config


def test_auto_divides_a_pretrained_model_that_a_worker_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    found = job(*pretrained(tmp_path, "cluster.num_workers=4", "resume.memory_every_steps=null"))
    notes, problems = memory_plan(with_known_shape(found), KnownMachines(machines=tuple(machines(4, 64))))
    assert problems == []
    assert any(note.startswith("train.parallel=auto is shard: ") for note in notes)


@pytest.mark.parametrize("content", [None, "no json", "[]"])
def test_what_cannot_be_read_is_left_to_whoever_builds_the_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    found = job(*pretrained(tmp_path))
    assert with_known_shape(found) is found
