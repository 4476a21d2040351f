"""Model FLOPs utilisation: products of the model that the formula gives, cards by name, and no guesses."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from orchestrator.trainer.model.model_flops import Utilisation, forward_flops, peak_flops

LLAMA = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
SEQ_LEN = 128
# of each position: the layers' matrices and the head, and for attention scores and values over all positions
PER_TOKEN = 2 * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 1000 * 64) + 2 * (2 * 2 * SEQ_LEN * 64)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_products_of_a_model_are_those_of_its_matrices_and_its_attention(device: str) -> None:
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LLAMA).train()
    versions = [parameter._version for parameter in model.parameters()]
    assert forward_flops(model, SEQ_LEN) == SEQ_LEN * PER_TOKEN
    assert [parameter._version for parameter in model.parameters()] == versions
    assert {parameter.device.type for parameter in model.parameters()} == {device}


def test_the_utilisation_is_the_share_of_all_cards_peak() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    cuda = torch.device("cuda")
    found = Utilisation.of(model, SEQ_LEN, "bf16", cuda, lambda device: "NVIDIA A100-SXM4-80GB")
    assert found.of_step(10_000, 0.5, 2) == pytest.approx(10_000 * 3 * PER_TOKEN / (0.5 * 2 * 312e12))
    assert found.of_step(10_000, 0.0, 2) is None


class ReadsValues(nn.Module):
    """A model whose path depends on the values of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.weight[input_ids] @ self.weight if self.weight.sum() > 0 else self.weight[input_ids]


def test_what_is_not_known_has_no_utilisation() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA)
    assert forward_flops(ReadsValues(), 8) is None
    unknown = Utilisation.of(model, SEQ_LEN, "bf16", torch.device("cuda"), lambda device: "NVIDIA L40")
    assert unknown.of_step(10_000, 0.5, 2) is None
    assert Utilisation.of(model, SEQ_LEN, "bf16", torch.device("cpu")).of_step(10_000, 0.5, 2) is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "pure_bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-PCIE-40GB", "float32", 19.5e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA RTX A4000", "bf16", None),
        ("NVIDIA GeForce RTX 3060", "bf16", None),
    ],
)
def test_a_card_is_known_by_whole_words_of_its_name(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak
