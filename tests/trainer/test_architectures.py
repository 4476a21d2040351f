"""Tiny architectures of transformers are tried, built alike in every layout, and exported as they trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from orchestrator.checkpoint.export.export import export_point
from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError
from orchestrator.trainer.dry_run.model_dry_run import try_model
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.state.sharded_state import ShardedState
from orchestrator.trainer.weights.saved_form import main_dtype
from orchestrator.trainer.weights.state_tensors import own_tensors
from tests.checkpoint.exports import CPU, commit, job, state_of, store_at
from tests.raising import raises
from tests.trainer.architectures import POSITIONS, VOCABULARY, all_types, tiny

FEW = ["llama", "gpt2", "opt", "roberta", "mixtral", "glm4_moe", "ernie4_5_moe", "cwm", "mamba2"]

REFUSALS = ("model.not_causal", "model.padding_id", "model.router_loss", "model.export")


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(4, 28).reshape(2, 12)
    with torch.no_grad():
        return model.eval()(ids).logits  # type: ignore[no-any-return]


def own(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(own_tensors(model.state_dict(keep_vars=True)))


def examine(kind: str, folder: Path, precision: str) -> None:
    """Raises if one of the ways in which a model is made differs from another."""
    asked = job({"config": tiny(kind)}, precision=precision)
    facts = try_model(asked)
    assert facts.num_logits is not None, facts.note
    assert facts.num_logits >= VOCABULARY
    sharded = ShardedState(asked.model, asked.train, CPU, None)
    values, whole = sharded._first.values(sharded.base), build_model(asked.model, precision, 0, CPU, True)
    assert list(own(sharded.model)) == list(own(whole))
    assert all(torch.equal(values(name, None), tensor) for name, tensor in own(whole).items())
    # ---- the export, and what begins with it
    state, store = state_of(asked), store_at(folder / "run")
    export_point(store, commit(store, asked, state).name, folder / "out")
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out",
        dtype="auto",
        attn_implementation=state.model.config._attn_implementation,
    )
    opened.config.use_cache = False
    trained = own(state.model)
    assert all(torch.equal(tensor, trained[n].to(tensor.dtype)) for n, tensor in own(opened).items())
    if [t.dtype for t in opened.parameters()] == [t.dtype for t in state.model.parameters()]:
        # kernels round differently for tensors that lie elsewhere in memory
        bound = 1e-5 if precision == "float32" else 0.05
        torch.testing.assert_close(logits(opened), logits(state.model), atol=bound, rtol=bound)
    settings = transformers.AutoConfig.from_pretrained(folder / "out")
    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in trained.items()}
    assert str(settings.dtype).removeprefix("torch.") == main_dtype(shapes)
    assert {path.suffix for path in (folder / "out").iterdir()} == {".json", ".safetensors", ""}
    again = job({"pretrained": str(folder / "out")}, precision=precision)
    begun = build_model(again.model, precision, 0, CPU, True)
    skeleton = ShardedState(again.model, again.train, CPU, None).model
    types = {name: tensor.dtype for name, tensor in own(begun).items()}
    assert {name: tensor.dtype for name, tensor in own(skeleton).items()} == types
    assert all(torch.equal(tensor, trained[name].to(tensor.dtype)) for name, tensor in own(begun).items())


@pytest.mark.quick("pure_bf16-gpt2", "float32-mixtral")
@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("precision", ["float32", "pure_bf16"])
def test_a_model_is_the_same_however_it_is_made(kind: str, precision: str, tmp_path: Path) -> None:
    examine(kind, tmp_path, precision)


@pytest.mark.chaos
@pytest.mark.parametrize("precision", ["float32", "pure_bf16"])
def test_so_is_every_model_of_transformers_that_can_be_made_small(precision: str, tmp_path: Path) -> None:
    failed, examined = {}, 0
    for kind in all_types():
        try:
            asked = ModelConfig(config=tiny(kind))
            with torch.device("meta"):
                shape = build_model(asked, "float32", 0, torch.device("meta"), True)
            if sum(parameter.numel() for parameter in shape.parameters()) > 1 << 23:
                continue
            logits(build_model(asked, "float32", 0, CPU, True))
        except Exception:  # noqa: BLE001  these sizes do not fit the type
            continue
        examined += 1
        try:
            examine(kind, tmp_path / kind, precision)
        except ConfigError as error:
            if error.code not in REFUSALS:
                failed[kind] = f"ConfigError: {error}"[:200]
        except Exception as error:  # noqa: BLE001  all are named at once
            failed[kind] = f"{type(error).__name__}: {error}"[:200]
    assert not failed, failed
    assert examined > 70


def test_a_model_whose_export_nobody_could_open_is_refused() -> None:
    with raises(ConfigError, "model.export"):
        try_model(job({"config": tiny("emu3")}))


@pytest.mark.quick("roberta")
@pytest.mark.parametrize("kind", ["gpt2", "opt", "roberta", "ctrl"])
def test_learned_positions_that_are_too_few_by_default_are_refused(kind: str) -> None:
    shape = {key: value for key, value in tiny(kind).items() if key not in POSITIONS.split()}
    default = getattr(transformers.AutoConfig.for_model(kind), "max_position_embeddings", None) or 256
    asked = job({"config": shape})
    longer = asked.model_copy(update={"pack": asked.pack.model_copy(update={"seq_len": default + 1})})
    with raises(ConfigError, "model.factory_output", f"pack.seq_len={default + 1}"):
        try_model(longer)
