"""Adapters (`model.lora`): trained as peft trains them, saved alone, and opened by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from orchestrator.checkpoint.export.export import adapter_name, export_point
from orchestrator.checkpoint.points.store import CommittedFiles, RunStore
from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError, RefusedError, StorageError
from orchestrator.trainer.dry_run.model_dry_run import try_model
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.optimizer.optimizers import settings_of
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import load
from tests.checkpoint.exports import FACTORY, LLAMA, commit, job, logits, state_of, store_at
from tests.raising import raises
from tests.trainer.launch import Launch
from tests.trainer.lora import CPU, LORA, base_in, lora_job, peft_loop, peft_model, weights_of
from tests.trainer.member import members, run_to_end
from tests.trainer.sharded import alone, in_each_layout, on_ranks
from tests.trainer.weight_folders import GPT2, MIXTRAL, TIED, saved

pytestmark = [pytest.mark.xdist_group("forked"), pytest.mark.usefixtures("begun_warm")]

KINDS: dict[str, dict[str, Any]] = {
    "named": {},
    "peft's default": {"target_modules": None},
    "all linear layers": {"target_modules": "all-linear", "use_rslora": True},
    "an expression": {"target_modules": r".*layers\.1\..*\.(q|k)_proj"},
    "with embeddings and a head": {
        "target_modules": ["o_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("all linear layers", "with embeddings and a head")
def test_losses_and_weights_are_those_of_pefts_own_loop(kind: str, tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    asked = lora_job(base, KINDS[kind])
    run = run_to_end(tmp_path / "run", 2, job=asked)
    losses, weights = peft_loop(base, asked, asked.train.max_steps or 0)
    records = sorted(run.records.values(), key=lambda record: record.step)
    assert [record.loss for record in records] == pytest.approx(losses, abs=1e-6)
    state = TrainState(asked.model, asked.train, CPU, invariant=True)
    store = RunStore(run.storage)
    load(state.items(), store.point_names()[-1], CommittedFiles(run.storage))
    found = {adapter_name(name): tensor for name, tensor in weights_of(state).items()}
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=0)
    assert store.verify_point(store.point_names()[-1]) == []


@pytest.mark.chaos
def test_dropout_gives_the_same_bits_on_any_number_of_members(tmp_path: Path) -> None:
    asked = lora_job(base_in(tmp_path / "base"), {"dropout": 0.3, "target_modules": "all-linear"})
    digests = {run_to_end(tmp_path / str(size), size, job=asked).last_point().state_digest for size in (1, 3)}
    assert len(digests) == 1
    without = lora_job(base_in(tmp_path / "base2"), {"target_modules": "all-linear"})
    assert run_to_end(tmp_path / "without", 1, job=without).last_point().state_digest not in digests


# replicate, FSDP2, HSDP; later ones after earlier ones in the same processes
LAYOUTS = [(2, 1), (1, None), (3, None), (3, None), (4, 2), (4, None), (3, 2), (2, None)]


@pytest.mark.parametrize("kind", ["all linear layers", "with embeddings and a head"])
@pytest.mark.chaos
def test_every_layout_trains_what_one_process_trains(kind: str, tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    asked = lora_job(base, KINDS[kind], train__numerics="fast", train__micro_batch_size=5)
    expected = alone(asked, 4)
    by_rank = on_ranks(4, in_each_layout, asked, LAYOUTS, 4)
    assert set(by_rank[0]) == set(LAYOUTS)
    for layout in LAYOUTS:
        found = next(other[layout] for other in by_rank if layout in other and other[layout].state)
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.state.keys() == expected.state.keys()
        for name, tensor in expected.state.items():
            torch.testing.assert_close(found.state[name], tensor, atol=1e-4, rtol=0)


def trained(base: str, lora: dict[str, Any], **train: Any) -> tuple[Any, TrainState]:
    config = job({"pretrained": base, "lora": {**LORA, **lora}}, **train)
    return config, state_of(config, steps=2)


@pytest.mark.parametrize("precision", ["float32", "pure_bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("all linear layers-float32", "with embeddings and a head-pure_bf16", "named-float32")
def test_peft_opens_an_export_and_the_merged_model_gives_the_same_logits(
    kind: str, precision: str, tmp_path: Path
) -> None:
    base, store = saved(tmp_path / "base", LLAMA), store_at(tmp_path / "run")
    config, state = trained(base, KINDS[kind], precision=precision)
    point = commit(store, config, state)
    exported = export_point(store, point.name, tmp_path / "adapters")
    names = {entry.path for entry in exported.files}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not names & {"model.safetensors", "config.json"}
    dtype = torch.bfloat16 if precision == "pure_bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    opened = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapters"), autocast_adapter_dtype=False)
    assert torch.equal(logits(opened), logits(state.model))
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(base, dtype=dtype)), logits(opened))
    whole = export_point(store, point.name, tmp_path / "whole", merged=True)
    assert whole.merged
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=dtype)
    expected = opened.merge_and_unload()
    assert torch.equal(logits(merged), logits(expected))
    assert not torch.equal(logits(merged), logits(AutoModelForCausalLM.from_pretrained(base, dtype=dtype)))


def test_points_hold_adapters_and_their_optimizer_alone(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", LLAMA)
    config, state = trained(base, {}, ema=0.5)
    names = {item.name for item in state.items()} - {"steps"}
    assert all(".lora_" in name for name in names)
    facts = try_model(config)
    assert facts.size is not None
    num_adapters = sum(tensor.numel() for tensor in weights_of(state).values())
    whole = build_model(ModelConfig(config=LLAMA), "float32", 0, CPU, True)
    num_base = sum(p.numel() for p in whole.parameters())
    assert (facts.size.parameters, facts.size.frozen, facts.size.fixed) == (
        num_adapters + num_base,
        num_base,
        num_base,
    )
    store = store_at(tmp_path / "run")
    point = commit(store, config, state)
    again = TrainState(config.model, config.train, CPU, invariant=True)
    load(again.items(), point.name, CommittedFiles(store.storage))
    again.filled()
    assert again.digest() == state.digest()
    assert torch.equal(logits(again.model), logits(state.model))
    export_point(store, point.name, tmp_path / "averages", averaged=True)
    averages = load_file(tmp_path / "averages" / "adapter_model.safetensors")
    saved_now = {adapter_name(name): tensor for name, tensor in weights_of(state).items()}
    assert averages.keys() == saved_now.keys()
    assert any(not torch.equal(averages[name], tensor) for name, tensor in saved_now.items())


def test_adapters_begin_as_pefts_from_the_seed_alone(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    asked = lora_job(base, {"target_modules": "all-linear"}, train__seed=3)
    state = TrainState(asked.model, asked.train, CPU, invariant=True)
    theirs = peft.get_peft_model_state_dict(peft_model(base, asked), save_embedding_layers=False)
    ours = {adapter_name(name): tensor for name, tensor in weights_of(state).items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first = state.digest()
    state.apply(0.1, num_units=0)
    state.initialise()
    assert state.digest() == first


def test_a_base_of_init_from_and_of_a_factory_are_adapted_too(tmp_path: Path) -> None:
    config = job({"config": LLAMA})
    base_state, store = state_of(config, steps=1), store_at(tmp_path / "base")
    point = commit(store, config, base_state)
    where = str(tmp_path / "base" / "points" / point.name)
    adapted = job({"config": LLAMA, "init_from": where, "lora": LORA})
    try_model(adapted)
    state = TrainState(adapted.model, adapted.train, CPU, invariant=True)
    assert torch.equal(logits(state.model), logits(base_state.model))  # adapters begin with no effect
    config, made = job(FACTORY), FACTORY
    base_state, store = state_of(config, steps=1), store_at(tmp_path / "made")
    point = commit(store, config, base_state)
    where = str(tmp_path / "made" / "points" / point.name)
    names = [name for name, each in base_state.model.named_modules() if isinstance(each, torch.nn.Linear)]
    adapted = job({**made, "init_from": where, "lora": {**LORA, "target_modules": names}})
    try_model(adapted)
    state = state_of(adapted, steps=1)
    assert not torch.equal(logits(state.model), logits(base_state.model))
    own = store_at(tmp_path / "adapted")
    export_point(own, commit(own, adapted, state).name, tmp_path / "out", merged=True)
    plain = build_model(ModelConfig(**made), "float32", 0, CPU, True)
    plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    torch.testing.assert_close(logits(plain), logits(state.model))
    export_point(own, point.name, tmp_path / "adapters")
    for alone_there in (tmp_path / "adapted" / "points" / point.name, tmp_path / "adapters"):
        other = job({"config": LLAMA, "init_from": str(alone_there), "lora": LORA})
        for refuse in (try_model, lambda each: TrainState(each.model, each.train, CPU, invariant=True)):
            with raises(ConfigError, "weights.adapters_alone", alone_there, "--merged"):
                refuse(other)


@pytest.mark.parametrize(
    ("shape", "lora", "code", "values"),
    [
        (
            LLAMA,
            {"target_modules": ["q_prj", "no_such"]},
            "lora.refused",
            ["q_prj", "did you mean q_proj?", "no_such", "down_proj, gate_proj, k_proj, lm_head, o_proj"],
        ),
        (LLAMA, {"target_modules": r"no\.such"}, "lora.refused", [r"no\.such"]),
        (LLAMA, {"target_modules": "("}, "lora.refused", ["no regular expression"]),
        (LLAMA, {"modules_to_save": ["no_head"]}, "lora.refused", ["modules_to_save", "no_head", "lm_head"]),
        (TIED, {"target_modules": ["embed_tokens"]}, "lora.refused", ["embed_tokens", "lm_head.weight"]),
        (TIED, {"modules_to_save": ["lm_head"]}, "lora.refused", ["lm_head", "model.embed_tokens.weight"]),
        (LLAMA, {"target_modules": ["input_layernorm"]}, "lora.refused", ["peft refuses"]),
        (MIXTRAL, {"target_modules": ["experts"]}, "lora.refused", ["MixtralExperts"]),
    ],
)
def test_what_peft_or_points_cannot_carry_out_is_refused_by_name(
    shape: dict[str, Any], lora: dict[str, Any], code: str, values: list[str], tmp_path: Path
) -> None:
    config = job({"pretrained": saved(tmp_path / "base", shape), "lora": {**LORA, **lora}})
    for refuse in (
        lambda: try_model(config),
        lambda: TrainState(config.model, config.train, CPU, invariant=True),
    ):
        with raises(ConfigError, code, *values):
            refuse()


def test_a_module_that_is_missing_is_answered_with_names_of_linear_layers_alone(tmp_path: Path) -> None:
    for name, shape, ends in (
        ("llama", LLAMA, "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
        ("gpt2", GPT2, "c_attn, c_fc, c_proj, lm_head"),  # of transformers' own kind of linear layer
    ):
        lora = {**LORA, "target_modules": ["no"]}
        config = job({"pretrained": saved(tmp_path / name, shape), "lora": lora})
        with raises(ConfigError, "lora.refused", f"end with {ends}") as refused:
            try_model(config)
        assert "norm" not in str(refused.value)


def test_a_folder_of_adapters_is_refused_as_a_model_with_the_name_of_its_base(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", LLAMA)
    config = job({"pretrained": base, "lora": LORA})
    store = store_at(tmp_path / "run")
    export_point(store, commit(store, config, state_of(config, steps=1)).name, tmp_path / "out")
    values = [f"model.pretrained={tmp_path / 'out'}", "adapters", base, "--merged"]
    for model in ({"pretrained": str(tmp_path / "out")}, {"pretrained": str(tmp_path / "out"), "lora": LORA}):
        for refuse in (try_model, lambda each: TrainState(each.model, each.train, CPU, invariant=True)):
            with raises(ConfigError, "weights.adapters_alone", *values):
                refuse(job(model))


def test_a_base_that_is_random_or_quantized_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "config.conflict", "model.lora", "model.pretrained"):
        job({"config": LLAMA, "lora": LORA})
    base = Path(saved(tmp_path / "base", LLAMA))
    settings = (base / "config.json").read_text()
    quantized = '{"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}, '
    (base / "config.json").write_text(settings.replace("{", quantized, 1))
    with raises(ConfigError, "lora.quantized_base", base, "bitsandbytes"):
        try_model(job({"pretrained": str(base), "lora": LORA}))


def test_architectures_with_other_layers_and_router_losses_are_adapted(tmp_path: Path) -> None:
    kinds = ((GPT2, ["c_attn"]), (MIXTRAL, ["q_proj"]), (TIED, ["q_proj"]))
    for number, (shape, targets) in enumerate(kinds):
        base, store = saved(tmp_path / f"base{number}", shape), store_at(tmp_path / f"run{number}")
        config, state = trained(base, {"target_modules": targets})
        try_model(config)
        export_point(store, commit(store, config, state).name, tmp_path / f"out{number}", merged=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"out{number}")
        torch.testing.assert_close(logits(merged), logits(state.model))


def test_muon_trains_adapters_as_matrices(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", LLAMA)
    config, state = trained(base, {"modules_to_save": ["lm_head"]}, optimizer="muon")
    kinds = {name: setting.kind.name for name, setting in settings_of(state.model, config.train).items()}
    assert {kind for name, kind in kinds.items() if ".lora_" in name} == {"muon"}
    assert kinds["lm_head.modules_to_save.default.weight"] == "adamw"


def test_whole_weights_have_no_adapters_to_merge(tmp_path: Path) -> None:
    config, store = job({"config": LLAMA}), store_at(tmp_path / "run")
    point = commit(store, config, state_of(config, steps=1))
    with raises(RefusedError, "export.no_adapters", point.name):
        export_point(store, point.name, tmp_path / "out", merged=True)


# ----------------------------------------------------------------------------------- the base's identity
def changed(base: Path) -> None:
    """Writes other weights under the same names."""
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, base / "model.safetensors", {"format": "pt"})


def continued(launch: Launch, attempt: int, job: TrainJob, **settings: Any) -> dict[str, str]:
    """Starts another attempt of three members from the newest point; their errors."""
    names, store = [f"{attempt}-{number}" for number in range(3)], RunStore(launch.storage)
    settings |= {"attempt": attempt, "point": store.point_names()[-1]}
    with members(Path(launch.storage.root), names, job=job, **settings) as group:
        group.join_all()
        return group.launch.errors


@pytest.mark.quick("shard")
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_points_record_the_base_and_another_one_is_refused_with_both_digests(
    parallel: str, tmp_path: Path
) -> None:
    base, sharded = base_in(tmp_path / "base"), {"sharded": parallel == "shard"}
    asked = lora_job(base, train__parallel=parallel, train__max_steps=4)
    launch = run_to_end(tmp_path / "run", 2, job=asked, **sharded)
    point = RunStore(launch.storage).point_names()[-1]
    recorded = CommittedFiles(launch.storage).manifest(point).fixed
    whole = lora_job(base, {"target_modules": "all-linear"})
    state = TrainState(whole.model, whole.train, CPU, invariant=True)
    assert recorded == {"model.pretrained": state.fixed_digests()["model.pretrained"]}
    longer = lora_job(base, train__parallel=parallel, train__max_steps=6)
    assert continued(launch, 2, longer, **sharded) == {}
    changed(Path(base))
    errors = continued(launch, 3, lora_job(base, train__parallel=parallel), **sharded)
    assert len(errors) == 3
    assert all(recorded["model.pretrained"] in error for error in errors.values())
    assert all("model.pretrained" in error for error in errors.values())


@pytest.mark.quick("replicate")
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_base_that_is_away_is_unreachable_and_its_points_are_whole(parallel: str, tmp_path: Path) -> None:
    base, sharded = Path(base_in(tmp_path / "base")), {"sharded": parallel == "shard"}
    asked = lora_job(str(base), train__parallel=parallel, train__max_steps=4)
    launch = run_to_end(tmp_path / "run", 2, job=asked, **sharded)
    store = RunStore(launch.storage)
    base.rename(tmp_path / "away")
    for name in store.point_names():
        assert store.verify_point(name) == []
    with raises(StorageError, "weights.unreachable", base):
        build_model(asked.model, "float32", 0, CPU, True)
    errors = continued(launch, 2, lora_job(str(base), train__parallel=parallel), **sharded)
    assert len(errors) == 3
    assert all(error.startswith("StorageError") and str(base) in error for error in errors.values())
    (tmp_path / "away").rename(base)
    longer = lora_job(str(base), train__parallel=parallel, train__max_steps=6)
    assert continued(launch, 3, longer, **sharded) == {}
