"""Weights that are made later, in any order, have the bits of a model that is built at once, and leave the
generator where that leaves it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from orchestrator.trainer.state.lazy_init import defer

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
