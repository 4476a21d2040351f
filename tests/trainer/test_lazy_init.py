"""Weights that are made later, in any order, have the bits of a model that is built at once, and leave the
generator where that leaves it. With a seed they depend on their names alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from orchestrator.trainer.state import lazy_init
from orchestrator.trainer.state.lazy_init import DeferredModel, defer

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
ARCHITECTURES = {
    **{
        kind: SMALL
        for kind in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "olmo2",
            "gpt_neox",
            "phi3",
            "granite",
            "smollm3",
        )
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64},
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def assert_made_later_alike(build: Callable[[], nn.Module]) -> nn.Module:
    """Compares all; the deferred module."""
    torch.manual_seed(5)
    expected = build()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    later = defer(build)
    assert torch.equal(torch.get_rng_state(), after)
    named = list(later.model.named_parameters(remove_duplicate=False))
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    assert [name for name, _ in named] == list(wanted)
    for name, parameter in reversed(named):  # not in the order in which they were drawn
        made = later.make(parameter)
        assert torch.equal(made, wanted[name]), name
        assert (made.dtype, made.stride()) == (wanted[name].dtype, wanted[name].stride())
        assert parameter.requires_grad == wanted[name].requires_grad
        made.zero_()
        assert torch.equal(later.make(parameter), wanted[name]), "each time anew"
    for (name, buffer), (_, other) in zip(later.model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert torch.equal(torch.get_rng_state(), after), "making a weight draws nothing from the generator"
    return later.model


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_of_transformers_architectures_are_made_alike(kind, dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    model = assert_made_later_alike(lambda: AutoModelForCausalLM.from_config(settings, dtype=dtype))
    matrices = [name for name, p in model.named_parameters() if p.numel() > 128 and not p.is_meta]
    assert not matrices, "whatever is large is made later"


class Expressions(nn.Module):
    """What a factory may do beside drawing into empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.by_expression = nn.Parameter(torch.randn(7, 5) * 0.02)
        self.of_another = nn.Linear(5, 7)
        nn.init.orthogonal_(self.of_another.weight)
        with torch.no_grad():
            self.of_another.bias.copy_(torch.arange(7.0) / self.of_another.weight.norm())
            self.by_expression += self.of_another.weight
        self.own_generator = nn.Parameter(torch.empty(6, 4).normal_(generator=generator))
        self.cut = nn.Embedding(9, 4, padding_idx=2)
        with torch.no_grad():
            self.cut.weight[3:5] *= 2
            self.cut.weight.view(-1)[::7].clamp_(-0.1, 0.1)
        self.twin = copy.deepcopy(self.cut)
        nn.init.trunc_normal_(self.cut.weight)
        self.coarse = nn.Linear(4, 6, dtype=torch.float64).to(torch.bfloat16)
        self.transposed = nn.Parameter(self.coarse.weight.detach().t())
        self.frozen = nn.Parameter(torch.empty(3).uniform_(), requires_grad=False)
        self.drawn_by_value = nn.Parameter(torch.full((2,), float(torch.empty(1).uniform_())))
        self.register_buffer("table", torch.empty(4).uniform_())
        self.register_buffer("later", torch.empty(4).exponential_(), persistent=False)


def test_whatever_a_factory_does_its_weights_are_made_alike():
    model = assert_made_later_alike(Expressions)
    assert not model.by_expression.is_meta
    assert model.twin.weight.is_meta
    assert model.coarse.weight.is_meta


def test_weights_that_are_tied_stay_one_parameter():
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
        model[1].weight = model[0].weight
        return model

    model = assert_made_later_alike(tied)
    assert model[0].weight is model[1].weight


def test_nested_modules_that_were_copied_are_made_alike():
    assert_made_later_alike(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        )
    )


def test_what_lies_whole_in_memory_is_counted():
    def scaled() -> nn.Module:
        module = nn.Linear(4, 4)
        module.scale = nn.Parameter(torch.ones(8))
        return module

    assert defer(scaled).held_bytes == 8 * 4


def test_values_that_were_written_to_a_weight_lie_in_memory_too():
    def orthogonal() -> nn.Module:
        module = nn.Linear(4, 4, bias=False)
        nn.init.orthogonal_(module.weight)
        return module

    assert defer(orthogonal).held_bytes == 4 * 4 * 4


def resized() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(4).resize_(8))
    return module


def several_at_once() -> nn.Module:
    module = nn.Linear(4, 4)
    with torch.no_grad():
        torch._foreach_mul_([module.weight, module.bias], 2.0)
    return module


@pytest.mark.parametrize("build", [resized, several_at_once])
def test_what_cannot_be_noted_is_refused(build):
    with pytest.raises(NotImplementedError, match=r"whose values are not made yet|on a tensor whose values"):
        defer(build)


# ---------------------------------------------------------------------------------------- weights by name
def of_architecture(kind: str, **changes: int) -> Callable[[], nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(kind, **{**ARCHITECTURES[kind], **changes})
    return lambda: AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


def values_of(later: DeferredModel) -> dict[str, torch.Tensor]:
    return {name: later.make(parameter) for name, parameter in later.model.named_parameters()}


@pytest.mark.quick("gpt2", "mixtral", "llama", "qwen3", "gemma2", "granite")
@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_weights_by_name_depend_on_seed_and_name_alone_and_are_spread_as_the_models_own(kind):
    before = torch.get_rng_state()
    found = values_of(defer(of_architecture(kind), seed=3))
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from torch's generator"
    torch.manual_seed(8)
    again = values_of(defer(of_architecture(kind), seed=3))
    other = values_of(defer(of_architecture(kind), seed=4))
    expected = dict(of_architecture(kind)().named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted = expected[name].detach()
        assert torch.equal(value, again[name])
        if wanted.std() == 0:  # of a norm or a bias
            assert torch.equal(value, wanted)
            continue
        assert not torch.equal(value, other[name])
        enough = wanted.numel() > 500
        assert not enough or value.std() == pytest.approx(float(wanted.std()), rel=0.2), name
        assert not enough or value.mean() == pytest.approx(0, abs=0.2 * float(wanted.std())), name
    deeper = values_of(defer(of_architecture(kind, **_one_layer_more(kind)), seed=3))
    assert len(deeper) > len(found)
    scaled = "c_proj" if kind == "gpt2" else "nothing"  # by the number of its layers
    assert all(torch.equal(deeper[name], value) for name, value in found.items() if scaled not in name)


def _one_layer_more(kind: str) -> dict[str, int]:
    return {"n_layer" if kind == "gpt2" else "num_hidden_layers": 3}


def test_any_part_of_a_weight_by_name_can_be_drawn_alone(monkeypatch):
    def scaled() -> nn.Module:
        module = nn.Linear(30, 41, bias=False)
        with torch.no_grad():
            module.weight.uniform_(-0.9, 0.9).erfinv_().mul_(0.5).clamp_(-0.4, 0.4)
        return module

    whole = defer(scaled, seed=1)
    for piece in (1 << 20, 100, 7):
        monkeypatch.setattr(lazy_init, "_PIECE", piece)
        weight = whole.model.weight
        value = whole.make(weight).view(-1)
        for rows in (range(0), range(1), range(5, 17), range(40, 41), range(41)):
            elements = range(rows.start * 30, rows.stop * 30)
            part = whole.make(weight, elements).view(-1)[elements.start : elements.stop]
            assert torch.equal(part, value[elements.start : elements.stop])
        assert 0.3 < value.abs().max() <= 0.4


def test_a_part_of_what_is_made_of_the_whole_is_right_too():
    def normed() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            module.weight.normal_()
            module.weight.copy_(module.weight.cumsum(0))
        return module

    with pytest.raises(NotImplementedError):
        defer(normed, seed=1)

    def turned() -> nn.Module:
        module = nn.Module()
        module.first = nn.Parameter(torch.empty(6, 4).normal_())
        module.second = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            module.second.copy_(module.first.view(4, 6).t())
        return module

    later = defer(turned, seed=1)
    first, second = later.make(later.model.first), later.make(later.model.second)
    assert torch.equal(second, first.view(4, 6).t())
    assert torch.equal(later.make(later.model.second, range(4))[:1], second[:1])


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3).normal_(generator=torch.Generator().manual_seed(1)))


class Rare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3).exponential_())


@pytest.mark.parametrize("build", [OwnGenerator, Rare, Expressions])
def test_other_draws_are_not_made_by_name(build):
    with pytest.raises(NotImplementedError):
        defer(build, seed=1)


def test_values_that_exist_and_are_random_are_known():
    class Buffered(nn.Module):
        def __init__(self, drawn: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3).normal_())
            self.register_buffer("table", torch.empty(4).uniform_() if drawn else torch.empty(4).fill_(2))

    class Expressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

    assert defer(lambda: Buffered(True), seed=1).holds_random_values
    assert not defer(lambda: Buffered(False), seed=1).holds_random_values
    assert defer(Expressed, seed=1).holds_random_values
