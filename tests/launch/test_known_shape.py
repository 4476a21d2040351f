"""The memory of a job that continues pretrained weights is judged by the folder's own configuration, and that
of a model that nobody knows by heart by what trying it finds, or an attempt has noted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.schema import JobConfig
from orchestrator.errors import ConfigError
from orchestrator.launch.capacity.capacity import KnownMachines, Workers, choose_parallel, memory_plan
from orchestrator.launch.capacity.placement_check import measured, with_known_shape
from orchestrator.launch.capacity.resource_estimate import model_size, needs_of
from orchestrator.planning.resume.resume_plan import ResumePlan, plan_resume
from orchestrator.planning.state.memory import ModelSize, ParallelChoice
from tests.launch.machines import LARGE, machines
from tests.planning.jobs import job
from tests.raising import raises

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


# ---- models whose size only a try tells
# about 7 billion parameters, of which two of eight experts are used at a time
EXPERTS = {**SEVEN_B, "model_type": "mixtral", "num_local_experts": 2, "num_hidden_layers": 22}
SCALED = """
import torch
class Scaled(torch.nn.Embedding):
    def __init__(self):
        super().__init__(1 << 20, 1 << 13)
        self.scale = torch.nn.Parameter(torch.ones(()))
    def forward(self, input_ids):
        return super().forward(input_ids) * self.scale
"""


def first_start(asked: JobConfig) -> ResumePlan:
    return plan_resume(asked, {}, None)


@pytest.mark.quick("True")
@pytest.mark.usefixtures("begun_warm")
@pytest.mark.parametrize("of_folder", [False, True])
def test_auto_divides_a_model_that_no_worker_can_hold_by_what_trying_it_found(
    tmp_path: Path, *, of_folder: bool
) -> None:
    model: dict[str, object] = {"config": EXPERTS}
    if of_folder:
        (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
        (tmp_path / "model.safetensors").write_bytes(b"")
        model = {"pretrained": str(tmp_path)}
    asked = job("model=" + json.dumps(model), "cluster.num_workers=4", "resume.memory_every_steps=null")
    sized, facts = measured(asked, first_start(asked), None)
    assert facts is not None
    size = model_size(sized.model.config or {})
    assert size == facts.size
    assert size.parameters > 7e9
    known = KnownMachines(machines=tuple(machines(4, 64)), source="here")
    notes, problems = memory_plan(sized, known)
    assert problems == []
    assert any(note.startswith("train.parallel=auto is shard: ") for note in notes)
    assert any(note.startswith("memory of a worker of 4 ") for note in notes)
    _, problems = memory_plan(sized, KnownMachines(machines=tuple(machines(4, 16)), source="here"))
    assert "GiB of memory are needed for 4 workers" in problems[0]


@pytest.mark.usefixtures("begun_warm")
def test_a_model_with_a_parameter_without_rows_is_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_models.py").write_text(SCALED)
    monkeypatch.syspath_prepend(tmp_path)
    asked = job("model={factory: 'large_models:Scaled'}", "resume.memory_every_steps=null")
    sized, _ = measured(asked, first_start(asked), None)
    found = choose_parallel(sized, Workers(num_workers=4), machines(4, 100))
    assert (found.num_shards, found.size.scalar) == (1, "scale")
    assert found.reason == "the model's parameter scale has the shape (), and no rows that could be divided"


NOTED = 3, ParallelChoice(num_shards=1, reason="", size=ModelSize(parameters=7 << 30, rest=7 << 30))


def test_the_model_of_a_point_is_judged_by_what_an_attempt_has_noted_and_not_tried_again() -> None:
    asked = job("model={factory: 'no_such_models:there'}")
    resumed = replace(first_start(asked), point="00000004-a0003-g0001")
    sized, facts = measured(asked, resumed, NOTED)
    assert facts is None
    assert model_size(sized.model.config or {}) == NOTED[1].size
    assert model_size(with_known_shape(asked, NOTED).model.config or {}) == NOTED[1].size, "a page does so"


@pytest.mark.usefixtures("begun_warm")
def test_where_nothing_was_noted_it_is_tried_and_a_point_needs_no_model_that_can_be() -> None:
    asked = job("model={factory: 'no_such_models:there'}")
    resumed = replace(first_start(asked), point="00000004-a0003-g0001")
    assert measured(asked, resumed, None) == (asked, None)
    with raises(ConfigError, "model.factory_not_callable", "no_such_models"):
        measured(asked, first_start(asked), NOTED)


def test_a_size_that_is_known_by_heart_is_not_replaced() -> None:
    asked = job("model=" + json.dumps({"config": SEVEN_B}))
    assert measured(asked, first_start(asked), NOTED) == (asked, None)
