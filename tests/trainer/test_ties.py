"""Which weights are tied follows from their files, in every layout and in the export, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from orchestrator.checkpoint.export.export import export_point
from orchestrator.config.sections import ModelConfig
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.state.sharded_state import ShardedState
from orchestrator.trainer.weights.state_tensors import own_tensors
from orchestrator.trainer.weights.ties import untie
from orchestrator.trainer.weights.transformers_model import shape_only, transformers_settings
from tests.checkpoint.exports import CPU, LLAMA, SMALL, commit, job, logits, state_of, store_at
from tests.trainer.states import begun_state

TIED: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
    },
    "experts": {
        "model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    "a head with a bias that is tied, too": {
        "model_type": "roberta", "is_decoder": True, "vocab_size": 40, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 66,
    },
    "a decoder of two halves": {
        "model_type": "bart", "vocab_size": 40, "d_model": 16, "decoder_layers": 1, "encoder_layers": 1,
        "decoder_attention_heads": 2, "encoder_attention_heads": 2, "decoder_ffn_dim": 32,
        "encoder_ffn_dim": 32, "max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def own(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(own_tensors(model.state_dict(keep_vars=True)))


def folder_of(shape: dict[str, Any], folder: Path, how: str) -> str:
    """A folder that says that words are tied, and holds also the tensors that are tied to others: with the
    same values, or with values of their own.
    """
    model: Any = build_model(ModelConfig(config=shape), "float32", 5, CPU, True)
    names = list(model.all_tied_weights_keys)
    assert names, "the model is tied"
    untie(model, names)
    with torch.no_grad():
        for name in names if how == "their own" else ():
            model.get_parameter(name).add_(0.5)
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    return str(folder)


def opened(folder: str | Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False)


@pytest.mark.quick(
    "experts-pretrained-their own",
    "llama-init_from-the same",
    "gpt2-init_from-their own",
    "a decoder of two halves-pretrained-their own",
    "a head with a bias that is tied, too-pretrained-the same",
)
@pytest.mark.parametrize("how", ["their own", "the same"])
@pytest.mark.parametrize("field", ["pretrained", "init_from"])
@pytest.mark.parametrize("name", TIED)
def test_every_layout_trains_the_tensors_that_transformers_opens(
    name: str, field: str, how: str, tmp_path: Path
) -> None:
    where = folder_of(TIED[name], tmp_path, how)
    config = {"pretrained": where} if field == "pretrained" else {"config": TIED[name], "init_from": where}
    asked = job(config)
    theirs = own(opened(where))
    whole = begun_state(asked.model, asked.train, CPU, invariant=True)
    whole.initialise()
    assert list(own(whole.model)) == list(theirs)
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in own(whole.model).items())
    sharded = ShardedState(asked.model, asked.train, CPU, None)
    assert list(own(sharded.model)) == list(theirs)
    with torch.device("meta"):
        tried = shape_only(asked.model, *transformers_settings(asked.model, "cpu", True))
    assert list(own(tried)) == list(theirs)


@pytest.mark.quick("llama-their own", "gpt2-the same", "a decoder of two halves-their own")
@pytest.mark.parametrize("how", ["their own", "the same"])
@pytest.mark.parametrize("name", TIED)
def test_an_export_is_what_was_trained_and_a_run_can_begin_with_it(
    name: str, how: str, tmp_path: Path
) -> None:
    where = folder_of(TIED[name], tmp_path / "given", how)
    config, store = job({"pretrained": where}), store_at(tmp_path / "run")
    state = state_of(config)
    point = commit(store, config, state)
    export_point(store, point.name, tmp_path / "out")
    model = opened(tmp_path / "out")
    assert list(own(model)) == list(own(state.model))
    assert all(torch.equal(tensor, own(model)[key]) for key, tensor in own(state.model).items())
    assert torch.allclose(logits(model), logits(state.model), atol=1e-6)
    flag = json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert flag == (how == "the same")
    for first in (tmp_path / "out", tmp_path / "run" / "points" / point.name):
        again = job({"config": TIED[name], "init_from": str(first)})
        begun = begun_state(again.model, again.train, CPU, invariant=True)
        begun.initialise()
        assert all(torch.equal(tensor, own(begun.model)[key]) for key, tensor in own(state.model).items())
        assert list(own(ShardedState(again.model, again.train, CPU, None).model)) == list(own(state.model))
