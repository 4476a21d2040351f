"""Models and states are pure functions of configuration and seed; what would make ranks differ is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError, ResourceError, TrainingError
from orchestrator.launch.capacity.resource_estimate import count_parameters
from orchestrator.trainer.model.build_model import build_model, own_gpu, seed_micro_batch
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.transformers_model import transformers_settings
from tests.raising import raises
from tests.trainer.architectures import GEMMA2
from tests.trainer.feed import VOCABULARY
from tests.trainer.losses import loss_sum
from tests.trainer.member import PoisonModel, tiny_job
from tests.trainer.states import begun_state

CPU = torch.device("cpu")
POISON_MODEL = "tests.trainer.member:PoisonModel"


def state_of(**changes) -> TrainState:
    job = tiny_job(**changes)
    return begun_state(job.model, job.train, CPU, invariant=True)


def step(state: TrainState) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.apply(0.1, num_units=1)


def running_mean() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
    )


class Remembering(torch.nn.Module):
    """Its forward pass remembers the batch's mean: `how` says in which way."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.table, self.how = torch.nn.Embedding(VOCABULARY, 8), how
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)
        self.again = torch.nn.Module()
        self.again.register_buffer("mean", self.mean)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.table(input_ids)
        mean = logits.detach().mean((0, 1))
        match self.how:
            case "in place":
                self.mean.copy_(mean)
            case "another tensor":
                self.mean = mean
            case "another tensor under its second name":
                self.again.mean = mean
            case "a new buffer":
                self.register_buffer("later", mean)
            case "no buffer":
                del self._buffers["mean"]
            case "another parameter":
                self.table.weight = torch.nn.Parameter(self.table.weight.detach() + 1)
            case "outside the state":
                self.scratch = mean
        return logits


def remembering_outside() -> torch.nn.Module:
    return Remembering("outside the state")


def no_module() -> int:
    return 3


def test_every_rank_of_a_machine_has_a_gpu_of_its_own_or_is_refused():
    assert [own_gpu(local_rank, 4) for local_rank in range(4)] == [0, 1, 2, 3]
    with raises(ResourceError, "machine.too_few_gpus", "LOCAL_RANK=4", "4 GPUs", "4 ranks"):
        own_gpu(4, 4)


def test_the_first_weights_depend_on_the_seed_and_nothing_else():
    first = state_of()
    torch.manual_seed(99)
    assert state_of().digest() == first.digest()
    assert state_of(train__seed=1).digest() != first.digest()


def test_a_state_goes_back_to_its_first_weights():
    state, first = state_of(), state_of().digest()
    step(state)
    assert state.digest() != first
    state.initialise()
    assert state.digest() == first
    assert state.optimizer_steps == 0


def test_the_digest_sees_every_item():
    state = state_of()
    seen = {state.digest()}
    for item in state.items():
        item.tensor.view(-1)[0] += 1
        seen.add(state.digest())
    assert len(seen) == len(state.items()) + 1


def test_biases_and_norms_do_not_decay():
    state = state_of(train__weight_decay=0.5, train__lr=0.1)
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.apply(0.1, num_units=1)
    for name, parameter in state.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter.ndim < 2), name


def test_a_pretrained_folder_and_a_factory_give_models(tmp_path):
    config = tiny_job().model
    model = build_model(config, "float32", 5, CPU, True)
    model.save_pretrained(tmp_path)
    again = build_model(ModelConfig(pretrained=str(tmp_path)), "bf16", 0, CPU, True)
    tokens = torch.arange(8)[None]
    model.eval(), again.eval()
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    made = build_model(ModelConfig(factory=POISON_MODEL), "pure_bf16", 0, CPU, True)
    assert isinstance(made, PoisonModel)
    assert made.table.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_a_pretrained_folder_that_lacks_tensors_is_refused_by_their_names(tmp_path, tied):
    shape = {**tiny_job().model.config, "tie_word_embeddings": tied}
    build_model(ModelConfig(config=shape), "float32", 5, CPU, True).save_pretrained(tmp_path)
    asked = ModelConfig(pretrained=str(tmp_path))
    build_model(asked, "float32", 0, CPU, True)  # a tied table stands there once, and is not missing
    held = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in held) is not tied
    lacking = [name for name in held if "mlp.up_proj" in name]
    for name in lacking:
        del held[name]
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    with raises(ConfigError, "weights.missing_tensors", f" {len(lacking)} of", *lacking):
        build_model(asked, "float32", 0, CPU, True)


def attention_of(
    config: dict[str, object], *, invariant: bool = True, device_type: str = "cpu"
) -> str | None:
    return transformers_settings(ModelConfig(**config), device_type, invariant)[1]


def test_an_architecture_without_sdpa_is_built_and_read_back_with_what_it_has(tmp_path):
    model = build_model(ModelConfig(config=GEMMA2), "float32", 0, CPU, True)
    model.save_pretrained(tmp_path)
    again = build_model(ModelConfig(pretrained=str(tmp_path)), "float32", 1, CPU, True)
    assert model.config._attn_implementation == again.config._attn_implementation == "eager"
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_attention_is_what_is_asked_for_or_what_the_architecture_and_the_numerics_allow():
    llama = tiny_job().model.config
    assert attention_of({"config": llama}) == "sdpa"
    assert attention_of({"config": llama}, device_type="cuda") == "eager"
    assert attention_of({"config": llama}, device_type="cuda", invariant=False) == "sdpa"
    assert attention_of({"config": llama, "attn_implementation": "eager"}) == "eager"
    assert attention_of({"config": GEMMA2}) is None
    with raises(ConfigError, "model.not_built", "model.config=", "scaled_dot_product_attention"):
        build_model(ModelConfig(config=GEMMA2, attn_implementation="sdpa"), "float32", 0, CPU, True)


@pytest.mark.parametrize(
    ("config", "code", "values"),
    [
        ({"config": {"model_type": "vit"}}, "model.not_language_model", ["type vit"]),
        (
            {"factory": "tests.trainer.member:absent"},
            "model.factory_not_callable",
            ["tests.trainer.member:absent"],
        ),
        ({"factory": POISON_MODEL, "factory_args": {"x": 1}}, "model.factory_not_callable", ["factory_args"]),
        ({"factory": "tests.trainer.test_model:no_module"}, "model.factory_output", ["no_module", "int;"]),
        ({"pretrained": "/nowhere"}, "weights.no_folder", ["model.pretrained=/nowhere"]),
        (
            {"config": {"model_type": "no-such-model"}},
            "model.unknown_type",
            ["model_type 'no-such-model'"],
        ),
        ({"config": {"model_type": "lama"}}, "model.unknown_type", ["model_type 'lama'", "llama"]),
        ({"config": {"model_type": "llama", "hidden_size": "wide"}}, "model.not_built", ["hidden_size"]),
    ],
)
def test_what_gives_no_model_is_a_config_error(config, code, values):
    with raises(ConfigError, code, *values):
        build_model(ModelConfig(**config), "float32", 0, CPU, True)


def test_the_loss_is_a_sum_over_targets_and_zero_without_any():
    model = PoisonModel()
    tokens = torch.arange(16).reshape(2, 8)
    labels = (tokens + 1).masked_fill(tokens % 2 == 0, -100)
    parts = [loss_sum(model, tokens[i : i + 1], labels[i : i + 1], "float32") for i in range(2)]
    assert loss_sum(model, tokens, labels, "float32").item() == pytest.approx(
        sum(part.item() for part in parts)
    )
    assert loss_sum(model, tokens, torch.full_like(tokens, -100), "float32").item() == 0.0


def test_dropout_is_a_function_of_seed_and_first_sample():
    def mask(seed: int, sample: int) -> list[float]:
        seed_micro_batch(seed, sample)
        return torch.rand(4).tolist()

    assert mask(0, 7) == mask(0, 7)
    assert len({tuple(mask(seed, sample)) for seed in range(3) for sample in range(3)}) == 9


def test_a_model_whose_forward_pass_changes_a_buffer_is_refused():
    state = state_of(model__factory="tests.trainer.test_model:running_mean")
    state.model[1](torch.randn(4, 8))
    with raises(TrainingError, "model.changes_state", "'1.num_batches_tracked'"):
        step(state)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("in place", "mean"),
        ("another tensor", "mean"),
        ("another tensor under its second name", "again.mean"),
        ("a new buffer", "later"),
        ("no buffer", "mean"),
        ("another parameter", "table.weight"),
    ],
)
def test_a_forward_pass_that_changes_the_state_in_any_way_is_refused_by_name(how, name):
    changes = {"model__factory": "tests.trainer.test_model:Remembering"}
    state = state_of(**changes)
    state.model.how = "not at all"
    state.model(torch.arange(8)[None])
    step(state)
    state.model.how = how
    state.model(torch.arange(8)[None])
    with raises(TrainingError, "model.changes_state", f"'{name}'"):
        step(state)
    assert state.optimizer_steps == 1


def test_a_buffer_that_is_no_part_of_the_state_may_change():
    state = state_of(model__factory="tests.trainer.test_model:remembering_outside")
    state.model(torch.arange(8)[None])
    step(state)
    assert state.optimizer_steps == 1


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"num_key_value_heads": 2, "tie_word_embeddings": False, "head_dim": 16},
    ],
    ids=["little", "tied", "untied"],
)
@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "granite", "smollm3"],
)
def test_the_count_that_a_start_goes_by_is_that_of_the_model_but_for_its_norms_and_biases(
    kind: str, said: dict[str, int]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "model_type": kind,
        "hidden_size": 64,
        "vocab_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "intermediate_size": 96,
        "pad_token_id": 0,
        **said,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert count_parameters(shape) == sum(p.numel() for p in model.parameters() if p.ndim > 1)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"n_embd": 96, "n_layer": 3, "vocab_size": 100, "n_positions": 32, "n_inner": 96},
        {"hidden_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 7},
        {"tie_word_embeddings": False},
    ],
    ids=["nothing", "its own names", "the usual names", "untied"],
)
def test_the_count_of_a_gpt2_is_that_of_the_model_but_for_its_norms_and_biases(said: dict[str, int]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"model_type": "gpt2", **said}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert count_parameters(shape) == sum(p.numel() for p in model.parameters() if p.ndim > 1)
