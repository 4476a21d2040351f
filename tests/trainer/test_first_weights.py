"""`model.init_from`: the first weights are another's to the bit, the optimizer is fresh, and what does not
fit is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from orchestrator.checkpoint.export.export import export_point
from orchestrator.checkpoint.export.export_files import weights_identity, weights_sentence
from orchestrator.config.schema import JobConfig
from orchestrator.errors import ConfigError, ResumePointError
from orchestrator.trainer.dry_run.model_dry_run import try_model
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import MODEL
from tests.checkpoint.exports import CPU, FACTORY, LLAMA, SMALL, commit, job, state_of, store_at
from tests.checkpoint.files.samples import byte_of
from tests.raising import raises
from tests.trainer.states import begun_state

MIXTRAL = {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
TIED = {**LLAMA, "tie_word_embeddings": True}


pytestmark = pytest.mark.usefixtures("begun_warm")  # models are tried


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def started(config: JobConfig) -> TrainState:
    """A state as a member has it that begins a run."""
    return begun_state(config.model, config.train, CPU, invariant=True)


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {item.name: item.tensor for item in state.items() if item.group == MODEL}


def assert_starts_from(state: TrainState, other: TrainState) -> None:
    mine, theirs = weights(state), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert state.optimizer_steps == 0
    assert not any(item.tensor.any() for item in state.items() if item.group != MODEL)
    state.apply(0.01, num_units=1)
    assert state.optimizer_steps == 1


@pytest.mark.quick("experts")
@pytest.mark.parametrize(
    "model", [{"config": TIED}, {"config": MIXTRAL}, FACTORY], ids=["tied", "experts", "factory"]
)
def test_a_run_starts_from_a_point_or_an_export_of_it_to_the_bit(
    model: dict[str, Any], tmp_path: Path
) -> None:
    config, store = job(model), store_at(tmp_path / "run")
    trained = state_of(config)
    point = commit(store, config, trained, world_size=3)
    export_point(store, point.name, tmp_path / "out")
    for where in (tmp_path / "run" / "points" / point.name, tmp_path / "out"):
        new = job({**model, "init_from": str(where)}, seed=5)
        try_model(new)
        assert_starts_from(started(new), trained)
        assert point.commit.weights_digest in weights_sentence(str(where))
    assert weights_identity(str(tmp_path / "run" / "points" / point.name)) == point.commit.weights_digest


def test_shards_and_a_folder_that_transformers_made_serve_as_well(tmp_path: Path) -> None:
    config, store = job({"config": LLAMA}), store_at(tmp_path / "run")
    trained = state_of(config)
    export_point(store, commit(store, config, trained).name, tmp_path / "shards", shard_bytes=8000)
    trained.model.save_pretrained(tmp_path / "theirs")
    for where in ("shards", "theirs"):
        new = job({"config": LLAMA, "init_from": str(tmp_path / where)})
        try_model(new)
        assert_starts_from(started(new), trained)
    assert weights_sentence(str(tmp_path / "theirs")).endswith(f"1 file of weights in {tmp_path / 'theirs'}")


def test_a_pretrained_folder_may_give_the_architecture_alone(tmp_path: Path) -> None:
    config, store = job({"config": LLAMA}), store_at(tmp_path / "run")
    trained = state_of(config)
    trained.model.config.save_pretrained(tmp_path / "shape")
    point = commit(store, config, trained)
    where = str(tmp_path / "run" / "points" / point.name)
    new = job({"pretrained": str(tmp_path / "shape"), "init_from": where})
    try_model(new)
    assert_starts_from(started(new), trained)


@pytest.mark.parametrize("kind", ["points", "out"])
def test_weights_of_another_model_are_refused_with_every_name_and_both_shapes(
    kind: str, tmp_path: Path
) -> None:
    config, store = job({"config": LLAMA}), store_at(tmp_path / "run")
    point = commit(store, config, state_of(config))
    export_point(store, point.name, tmp_path / "out")
    where = tmp_path / "out" if kind == "out" else tmp_path / "run" / "points" / point.name
    other = job({"config": {**LLAMA, "num_hidden_layers": 1, "intermediate_size": 64, "attention_bias": True},
                 "init_from": str(where)})  # fmt: skip
    for refuse in (lambda: try_model(other), lambda: started(other)):
        values = (
            "missing: model.layers.0.self_attn.q_proj.bias [16]",
            "unexpected: model.layers.1.mlp.up_proj.weight [32, 16]",
            "mismatched: model.layers.0.mlp.up_proj.weight is [32, 16] there, [64, 16]",
        )
        with raises(ConfigError, "weights.other_model", *values) as refused:
            refuse()
        assert len(str(refused.value).splitlines()) == 1 + 4 + 9 + 3


def test_a_folder_without_weights_and_a_changed_file_are_refused(tmp_path: Path) -> None:
    config, store = job(FACTORY), store_at(tmp_path / "run")
    point = commit(store, config, state_of(config))
    export_point(store, point.name, tmp_path / "out")
    before = weights_identity(str(tmp_path / "out"))
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with raises(ConfigError, "weights.damaged_export", file.name, f"{len(data)} bytes", "EXPORT"):
        weights_identity(str(tmp_path / "out"))
    (tmp_path / "out" / "EXPORT").unlink()
    assert weights_identity(str(tmp_path / "out")) != before
    file.write_bytes(data[:-8])
    sizes = (f" {len(data) - 8} bytes", f" {len(data)};")
    with raises(ConfigError, "weights.file_size", file, *sizes):
        try_model(job({**FACTORY, "init_from": str(tmp_path / "out")}))
    for where in (tmp_path, tmp_path / "nowhere"):
        with raises(ConfigError, "weights.no_files", where, "model.safetensors"):
            weights_sentence(str(where))
    path = tmp_path / "run" / "points" / point.name / "state" / "00000-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[byte_of(path)] ^= 1
    path.write_bytes(data)
    with raises(ResumePointError, "point.damaged", "00000-of-00002.safetensors"):
        started(job({**FACTORY, "init_from": str(tmp_path / "run" / "points" / point.name)}))


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("model", [{"config": LLAMA}, {"config": MIXTRAL}, {"config": TIED}])
def test_a_member_that_needs_no_first_weights_draws_none(model: dict[str, Any], by_name: bool) -> None:
    config = job(model)
    state = TrainState(config.model, config.train, CPU, invariant=True, weights_by_name=by_name)
    after = torch.get_rng_state()
    torch.manual_seed(config.train.seed)
    assert torch.equal(torch.get_rng_state(), after), "the seed was set, and nothing drawn"
    state.initialise()
    if not by_name:
        expected = build_model(config.model, "float32", config.train.seed, CPU, True).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(state).items())
    norm = weights(state)["model.norm.weight"]
    assert torch.equal(norm, torch.ones_like(norm))
