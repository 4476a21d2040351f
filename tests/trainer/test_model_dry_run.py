"""What no start can work with is said by building the model without its weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from orchestrator.config.field_rules import nested
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError
from orchestrator.planning.resume.resume_plan import plan_resume
from orchestrator.planning.state.memory import ModelSize
from orchestrator.trainer.dry_run.model_dry_run import (
    ModelFacts,
    require_model,
    require_vocabulary,
    try_model,
)
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.weights.transformers_model import require_known_keys
from tests.conftest import python_is
from tests.planning.jobs import job
from tests.raising import raises
from tests.trainer.architectures import GEMMA2, tiny
from tests.trainer.feed import VOCABULARY
from tests.trainer.member import tiny_job

LLAMA = tiny_job().model.config


def with_model(**model: Any) -> JobConfig:
    return job("model=" + json.dumps(model), "pack.seq_len=8")


# It asks for values, which the meta device has not.
FACTORY = """
import torch
def read_by_itself(too_much=False):
    model = torch.nn.Sequential(torch.nn.Embedding(9, 2), torch.nn.Linear(2, 9))
    model[0].weight.tolist()
    if too_much:
        torch.empty(1 << 40)
    return model
"""


# It has a parameter without dimensions.
SCALED = """
import torch
class Scaled(torch.nn.Embedding):
    def __init__(self):
        super().__init__(99, 99)
        self.scale = torch.nn.Parameter(torch.ones(()))
    def forward(self, input_ids):
        return super().forward(input_ids) * self.scale
"""


TABLES = """
import torch
class Tables(torch.nn.Module):
    def __init__(self, logits=100):
        super().__init__()
        self.ids, self.places = torch.nn.Embedding(99, 8), torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, logits, bias=False)
    def forward(self, input_ids):
        return self.head(self.ids(input_ids) + self.places(torch.arange(input_ids.shape[1])))
def silent(logits=100):
    return Tables(logits)
def says():
    model = Tables()
    model.get_input_embeddings = lambda: model.ids
    return model
"""


@pytest.mark.parametrize("config", [LLAMA, GEMMA2, {**LLAMA, "num_hidden_layers": 100, "hidden_size": 65536}])
def test_a_model_that_can_be_built_is_tried_without_its_weights(config):
    facts = try_model(with_model(config=config))
    assert replace(facts, size=None) == ModelFacts(num_embeddings=VOCABULARY, num_logits=VOCABULARY)


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False}


@pytest.mark.parametrize("config", [LLAMA, GEMMA2, MIXTRAL])
def test_it_is_measured_without_its_weights(config):
    asked = with_model(config=config)
    size = try_model(asked).size
    model = build_model(asked.model, "float32", 0, torch.device("cpu"), True)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    assert size is not None
    assert size.parameters == sum(p.numel() for p in model.parameters()) == size.rest + sum(blocks)
    assert (size.block, size.num_blocks) == (max(blocks), len(blocks))
    assert (size.hidden, size.vocab, size.frozen, size.scalar) == (
        model.config.hidden_size,
        VOCABULARY,
        0,
        "",
    )


def test_so_is_a_model_that_nests_its_language_model():
    size = try_model(with_model(config=tiny("gemma3"))).size
    assert size is not None
    assert (size.hidden, size.num_blocks) == (64, 2)


# Three equal blocks, and a table that is not trained.
FROZEN = """
import torch
class Frozen(torch.nn.Module):
    def __init__(self, scale=False):
        super().__init__()
        self.table = torch.nn.Embedding(99, 8).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        if scale:
            self.scale = torch.nn.Parameter(torch.ones(()))
    def forward(self, input_ids):
        states = self.table(input_ids)
        for block in self.blocks:
            states = block(states)
        return states @ self.table.weight.T
"""


@pytest.mark.usefixtures("begun_warm")
def test_a_factorys_model_is_measured_with_what_it_does_not_train(tmp_path, monkeypatch):
    (tmp_path / "frozen_models.py").write_text(FROZEN)
    monkeypatch.syspath_prepend(tmp_path)
    size = ModelSize(parameters=99 * 8 + 3 * 72, frozen=99 * 8, block=72, rest=99 * 8, num_blocks=3)
    assert try_model(with_model(factory="frozen_models:Frozen")).size == size
    scaled = with_model(factory="frozen_models:Frozen", factory_args={"scale": True})
    assert try_model(scaled).size == replace(size, parameters=size.parameters + 1, rest=793, scalar="scale")


@pytest.mark.usefixtures("begun_warm")
def test_a_model_without_a_parameter_that_is_trained_is_refused(tmp_path, monkeypatch):
    source = FROZEN.replace("for _ in range(3))", "for _ in range(3)).requires_grad_(False)")
    (tmp_path / "all_frozen.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    asked = with_model(factory="all_frozen:Frozen")
    with raises(ConfigError, "model.nothing_trainable", "model.factory=all_frozen:Frozen"):
        require_model(asked, plan_resume(asked, {}, None), 99)


def test_a_process_without_torch_stays_without_it(warm):
    program = (
        "import json, sys; sys.executable = sys.argv.pop(1); "
        "from orchestrator.config.loading import parse_config; "
        "from orchestrator.trainer.dry_run.model_dry_run import try_model; "
        "print(try_model(parse_config(json.load(sys.stdin))).num_embeddings, "
        "[m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    given = json.dumps(with_model(config=LLAMA).to_json())
    command = [sys.executable, "-c", program, warm]
    ended = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == f"{VOCABULARY} []"


@pytest.mark.parametrize(
    ("model", "code", "value"),
    [
        ({"config": {"model_type": "no-such-model"}}, "model.unknown_type", "no-such-model"),
        ({"config": {"model_type": "vit"}}, "model.not_language_model", "type vit"),
        ({"config": {**LLAMA, "hidden_size": 15}}, "model.not_built", "hidden size (15)"),
        (
            {"config": GEMMA2, "attn_implementation": "sdpa"},
            "model.not_built",
            "scaled_dot_product_attention",
        ),
        ({"pretrained": "/nowhere"}, "weights.no_folder", "model.pretrained=/nowhere"),
        ({"factory": "torch.nn:absent"}, "model.factory_not_callable", "torch.nn:absent"),
        (
            {"factory": "torch.nn:Linear", "factory_args": {"x": 1}},
            "model.factory_not_callable",
            "factory_args",
        ),
        ({"factory": "builtins:int"}, "model.factory_output", "builtins:int returned int"),
    ],
)
def test_what_gives_no_model_is_refused(model, code, value, warm):
    with python_is(warm), raises(ConfigError, code, value):
        try_model(with_model(**model))


def test_the_refusal_of_a_configuration_is_one_plain_sentence():
    reason = "The hidden size (97) is not a multiple of the number of attention heads (2)"
    with raises(ConfigError, "model.not_built", f"language model: {reason}; ") as refused:
        try_model(with_model(config={**LLAMA, "hidden_size": 97}))
    assert "\n" not in str(refused.value)


def named_in(line: str) -> list[str]:
    """The keys of `model.config` in a line of a message."""
    return re.findall(r"model\.config\.([\w.]*\w)", line)


@pytest.mark.parametrize(
    ("config", "kind", "keys"),
    [
        ({**LLAMA, "hidden_sise": 64}, "llama", ["hidden_sise", "hidden_size"]),
        ({**LLAMA, "zzzz": 1}, "llama", ["zzzz"]),
        ({**LLAMA, "n_embd": 64}, "llama", ["n_embd"]),
        ({"model_type": "gpt2", "hidden_sise": 64}, "gpt2", ["hidden_sise", "hidden_size"]),
        ({"model_type": "gpt2", "rope_theta": 1e4}, "gpt2", ["rope_theta"]),
        (
            {"model_type": "gemma3", "hidden_size": 64},
            "gemma3",
            ["hidden_size", "text_config.hidden_size", "vision_config.hidden_size"],
        ),
        (
            {"model_type": "gemma3", "text_config": {"hidden_sise": 64}},
            "gemma3_text",
            ["text_config.hidden_sise", "text_config.hidden_size"],
        ),
    ],
)
def test_a_key_that_no_model_would_read_is_refused_and_a_similar_one_named(config, kind, keys, warm):
    with python_is(warm), raises(ConfigError, "model.config_keys", f" {kind},") as refused:
        try_model(with_model(config=config))
    _, line = str(refused.value).splitlines()
    assert named_in(line) == keys


def test_a_key_that_transformers_computes_itself_is_refused_in_plain_words():
    with raises(ConfigError, "model.not_built", "leave layer_types out") as refused:
        try_model(with_model(config={"model_type": "mamba2", "layer_types": ["linear_attention"]}))
    assert "setter" not in str(refused.value)


def test_all_keys_that_no_model_would_read_are_named_at_once():
    with raises(ConfigError, "model.config_keys", "2 problems") as refused:
        try_model(with_model(config={**LLAMA, "hidden_sise": 64, "layers": 2}))
    _, *lines = str(refused.value).splitlines()
    assert [named_in(line) for line in lines] == [
        ["hidden_sise", "hidden_size"],
        ["layers", "num_hidden_layers"],
    ]


@pytest.mark.quick(
    "llama rope_scaling rope_theta",
    "gpt2 n_embd n_head n_layer",
)
@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {**LLAMA, "torch_dtype": "float32", "architectures": ["LlamaForCausalLM"], "_name_or_path": "x"},
        {**LLAMA, "transformers_version": "4.40.0", "num_labels": 3, "output_attentions": False},
        {**LLAMA, "gradient_checkpointing": True, "use_cache": False, "max_length": 20, "num_beams": 1},
        {**LLAMA, "model_type": "qwen2", "head_dim": 16},  # read by the model, declared nowhere
        {"model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY},
        {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 10000},
        {**LLAMA, "model_type": "gemma3_text", "sliding_window_pattern": 6},
        {"model_type": "modernbert-decoder", "global_attn_every_n_layers": 3},
        {"model_type": "gemma3", "eos_token_id": 1, "text_config": {"hidden_size": 64, "head_dim": 16}},
    ],
    ids=lambda config: f"{config['model_type']} {' '.join(sorted(config.keys() - LLAMA.keys()))}",
)
def test_keys_that_a_class_translates_or_its_model_asks_for_are_known(config):
    assert try_model(with_model(config=config)).num_embeddings


@pytest.mark.parametrize("kind", ["llama", "gemma3n", "gpt2", "qwen3_moe", "mixtral", "mamba2", "opt"])
def test_what_a_class_says_of_itself_it_knows(kind):
    settings = AutoConfig.for_model(kind)
    require_known_keys(settings.to_dict(), AutoConfig.for_model(**settings.to_dict()), "float32")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_type_that_the_weights_do_not_get_is_refused(key):
    def settings(shape):
        return AutoConfig.for_model(**shape)

    for dtype, weights in (("float16", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        for shape in (
            {**LLAMA, key: dtype},
            {"model_type": "gemma3", "text_config": {"hidden_size": 64, key: dtype}},
        ):
            values = (f"{key} is {dtype}", weights, "train.precision")
            with raises(ConfigError, "model.config_keys", *values):
                require_known_keys(shape, settings(shape), weights)
    same = {**LLAMA, key: "bfloat16"}
    require_known_keys(same, settings(same), "bfloat16")


def test_a_start_refuses_a_type_that_precision_does_not_give():
    with raises(ConfigError, "model.config_keys", "float16", "train.precision"):
        try_model(with_model(config={**LLAMA, "dtype": "float16"}))


def test_a_pretrained_folder_is_tried_with_its_own_configuration_and_must_hold_safetensors(tmp_path):
    build_model(ModelConfig(config=GEMMA2), "float32", 0, torch.device("cpu"), True).save_pretrained(tmp_path)
    asked = with_model(pretrained=str(tmp_path))
    assert try_model(asked).num_embeddings == VOCABULARY
    (tmp_path / "model.safetensors").unlink()
    with raises(ConfigError, "weights.no_files", tmp_path):
        try_model(asked)


def test_a_factory_is_called_where_the_driver_would_find_it_and_what_cannot_be_tried_is_said(
    tmp_path, monkeypatch, warm
):
    (tmp_path / "our_models.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    with python_is(warm):
        assert try_model(with_model(factory="torch.nn:Identity")) == ModelFacts(size=ModelSize())
        built = try_model(with_model(factory="our_models:read_by_itself"))
        large = try_model(with_model(factory="our_models:read_by_itself", factory_args={"too_much": True}))
    assert (built.num_logits, built.note) == (9, ""), "it is small, so it was built with its weights"
    assert (large.size, large.num_logits) == (None, None)
    assert "model.factory=our_models:read_by_itself does not work on torch's meta device" in large.note


@pytest.mark.usefixtures("begun_warm")
def test_the_vocabulary_of_a_factorys_model_is_looked_at_where_that_says_it(tmp_path, monkeypatch):
    (tmp_path / "small_models.py").write_text(TABLES)
    monkeypatch.syspath_prepend(tmp_path)
    says = with_model(factory="small_models:says")
    size = ModelSize(parameters=215 * 8, rest=215 * 8)
    assert try_model(says) == ModelFacts(num_embeddings=99, num_logits=100, size=size)
    fresh = plan_resume(says, {}, None)
    assert require_model(says, fresh, 99) == ()
    with raises(ConfigError, "model.vocabulary", "model.factory=small_models:says embeds 99", 100):
        require_model(says, fresh, 100)
    silent = with_model(factory="small_models:silent")
    assert try_model(silent) == ModelFacts(largest_table=99, num_logits=100, size=size)
    assert require_model(silent, fresh, 99) == ()
    (note,) = require_model(silent, fresh, 100)
    assert "the largest torch.nn.Embedding of model.factory=small_models:silent has 99 rows" in note
    fewer = with_model(factory="small_models:silent", factory_args={"logits": 98})
    with raises(ConfigError, "model.vocabulary", "98 ids", 99):
        require_model(fewer, fresh, 99)


@pytest.mark.usefixtures("begun_warm")
def test_a_parameter_without_rows_is_refused_where_the_state_is_to_be_sharded(tmp_path, monkeypatch):
    (tmp_path / "scaled_models.py").write_text(SCALED)
    monkeypatch.syspath_prepend(tmp_path)
    scaled = with_model(factory="scaled_models:Scaled")
    fresh = plan_resume(scaled, {}, None)
    assert require_model(scaled, fresh, 99) == ()
    for parallel in ("shard", {"shard": 2, "replicate": 1}):
        sharded = parse_config(nested({**scaled.flat(), "train.parallel": parallel}))
        values = ("parameter scale", "()", "(1,)", "train.parallel=replicate")
        with raises(ConfigError, "model.scalar_parameter", *values):
            require_model(sharded, fresh, 99)


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_numbers():
    asked = with_model(pretrained="somewhere")
    require_vocabulary(ModelFacts(num_embeddings=100), asked, 100)
    require_vocabulary(ModelFacts(), asked, 100)
    with raises(ConfigError, "model.vocabulary", "model.pretrained=somewhere embeds 99", 100):
        require_vocabulary(ModelFacts(num_embeddings=99), asked, 100)


def test_only_the_built_in_objective_needs_a_logit_for_each_id():
    asked = with_model(factory="rewards:head")
    one = ModelFacts(largest_table=100, num_logits=1)
    with raises(ConfigError, "model.vocabulary", "gives logits of 1 ids", 100):
        require_vocabulary(one, asked, 100)
    plug_in = parse_config(nested({**asked.flat(), "train.objective": "rewards:loss"}))
    require_vocabulary(one, plug_in, 100)


def test_a_trial_says_which_optimizer_trains_which_parameters_and_what_it_keeps():
    asked = parse_config(
        nested(
            {
                **with_model(config=LLAMA).flat(),
                "train.optimizer": "muon",
                "train.param_groups": [{"match": "norm", "weight_decay": 0.5}],
            }
        )
    )
    state, *notes = require_model(asked, plan_resume(asked, {}, None), VOCABULARY)
    matrices, rest = 2 * (4 * 16 * 16 + 3 * 16 * 32), VOCABULARY * 16 + 5 * 16
    assert f"keep {4 * (matrices + 2 * rest):,} bytes of state for {matrices + rest:,} trained" in state
    text = "\n".join(notes)
    assert "adamw trains 6 parameters (model.embed_tokens.weight," in text
    assert "muon trains 14 parameters" in text
    assert "train.param_groups.0 (match=norm, weight_decay=0.5) matches 5 parameters" in text
    assert "no entry matches 15 parameters" in text


@pytest.mark.usefixtures("begun_warm")
def test_a_plug_in_optimizer_is_tried_where_the_driver_would_find_it(tmp_path, monkeypatch):
    (tmp_path / "own_optimizers.py").write_text(
        "import torch\n"
        "class Own(torch.optim.SGD):\n"
        "    pass\n"
        "def hiding(params, lr):\n"
        "    raise ValueError('not today')\n"
        "class Large(Own):\n"
        "    def step(self):\n"
        "        if self.param_groups[0]['params'][0].norm().item() >= 0:\n"
        "            torch.empty(1 << 40)\n"
        "def on_gpus(params, lr):\n"
        "    raise RuntimeError('expected a CUDA device')\n"
    )
    monkeypatch.chdir(tmp_path)
    flat = {**with_model(config=LLAMA).flat(), "train.optimizer": "own_optimizers:Own"}
    asked = parse_config(nested({**flat, "train.optimizer_args": {"momentum": 0.9}}))
    facts = try_model(asked)
    (note,) = facts.optimizer
    assert "own_optimizers:Own keeps" in note
    refused = parse_config(nested({**flat, "train.optimizer": "own_optimizers:hiding"}))
    with raises(ConfigError, "optimizer.fails", "own_optimizers:hiding", "not today"):
        try_model(refused)
    for name in ("Large", "on_gpus"):
        here = parse_config(nested({**flat, "train.optimizer": f"own_optimizers:{name}"}))
        (note,) = try_model(here).optimizer
        assert f"own_optimizers:{name} fails" in note
        assert "the workers try it" in note
