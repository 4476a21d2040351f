"""Attention within documents, tested on logits: a packed document's are those of the document alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from orchestrator.config.loading import parse_config
from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError
from orchestrator.planning.batches import next_range
from orchestrator.records.cursor import Cursor
from orchestrator.trainer.dry_run.model_dry_run import try_model
from orchestrator.trainer.gradient.invariant import Gradient, InvariantGradient
from orchestrator.trainer.gradient.parallel import FastGradient
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.model.model_call import (
    attend_within_documents,
    document_inputs,
    document_mask,
    document_positions,
    flex_problem,
    require_document_attention,
)
from orchestrator.trainer.objective.micro_batches import StepPlace, cut
from orchestrator.trainer.objective.objective import CausalLM
from orchestrator.trainer.weights.transformers_model import FLEX, wants_flex
from tests.devices import CPU, CUDA, GPU
from tests.raising import raises
from tests.trainer.architectures import tiny
from tests.trainer.feed import VOCABULARY, FormulaFeed
from tests.trainer.losses import loss_sum

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 3}
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 3}
LLAMA4 = {**tiny("llama4_text"), "attention_chunk_size": 3, "vocab_size": VOCABULARY}
LINEAR = tiny("qwen3_next")


def nested(kind: str) -> dict[str, Any]:
    """With windows of three tokens in the configuration of its language model."""
    shape = tiny(kind)
    text = {**shape["text_config"], "sliding_window": 3, "vocab_size": VOCABULARY}
    return {**shape, "text_config": text}


DOCUMENTS = torch.tensor(
    [[0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1, -1], [0] * 12, [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]]
)
TOKENS = torch.arange(36).view(3, 12) * 7 % VOCABULARY


class InputIdsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.table(input_ids)
        return logits


class MeanOfDocument(InputIdsOnly):
    """Each logit is that of the mean over the document so far."""

    def forward(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        if document_ids is None:
            document_ids = torch.zeros_like(input_ids)
        sees = (document_mask(document_ids, torch.float32)[:, 0] == 0).float()
        logits: Tensor = sees / sees.sum(-1, keepdim=True) @ self.table(input_ids)
        return logits


def model_of(config: dict[str, Any], attention: str = "sdpa", precision: str = "float32") -> nn.Module:
    wanted = ModelConfig(config=config, attn_implementation=attention)
    return build_model(wanted, precision, 3, CPU, invariant=False).eval()


def with_flex(config: dict[str, Any], attention: str = "sdpa") -> nn.Module:
    """A model that a CPU computes forward only, and without compiling it (`logits_of`)."""
    model: Any = model_of(config, attention)
    assert flex_problem(model) is None
    model.set_attn_implementation(FLEX)
    return model


def logits_of(model: nn.Module, tokens: Tensor, documents: Tensor | None) -> Tensor:
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        for known in ("flex_attention called without torch.compile", "_compile flag on create_block_mask"):
            warnings.filterwarnings("ignore", message=known)
        found = model(tokens, **({} if documents is None else document_inputs(model, documents)))
    return found if isinstance(found, Tensor) else found.logits


def parts() -> list[tuple[int, slice]]:
    """(sample, positions) of every document."""
    return [
        (row, slice(int(at.min()), int(at.max()) + 1))
        for row, ids in enumerate(DOCUMENTS)
        for number in range(int(ids.max()) + 1)
        if len(at := (ids == number).nonzero())
    ]


MODELS = [
    pytest.param(lambda: model_of(LLAMA, "sdpa"), id="llama-sdpa"),
    pytest.param(lambda: model_of(LLAMA, "eager"), id="llama-eager"),
    pytest.param(lambda: model_of(GPT2, "sdpa"), id="gpt2-sdpa"),
    pytest.param(lambda: model_of(GPT2, "eager"), id="gpt2-eager"),
    pytest.param(lambda: model_of(MISTRAL), id="mistral-window"),
    pytest.param(lambda: model_of(MISTRAL, "eager"), id="mistral-window-eager"),
    pytest.param(lambda: model_of(GEMMA, "eager"), id="gemma2-windows"),
    pytest.param(lambda: model_of(LLAMA4), id="llama4-chunks"),
    pytest.param(lambda: model_of(nested("gemma3")), id="gemma3-nested-windows"),
    pytest.param(lambda: model_of(nested("gemma4_unified"), "eager"), id="gemma4_unified-nested-windows"),
    pytest.param(MeanOfDocument, id="factory"),
    pytest.param(lambda: with_flex(LLAMA), id="llama-flex"),
    pytest.param(lambda: with_flex(MISTRAL), id="mistral-window-flex"),
    pytest.param(lambda: with_flex(GEMMA, "eager"), id="gemma2-windows-flex"),
    pytest.param(lambda: with_flex(LLAMA4), id="llama4-chunks-flex"),
    pytest.param(lambda: with_flex(nested("gemma3")), id="gemma3-nested-windows-flex"),
]


@pytest.mark.quick(
    "llama-sdpa",
    "gpt2-eager",
    "mistral-window",
    "gemma2-windows",
    "llama4-chunks",
    "gemma3-nested-windows",
    "factory",
    "llama-flex",
    "gemma2-windows-flex",
    "llama4-chunks-flex",
)
@pytest.mark.parametrize("made", MODELS)
def test_the_logits_of_a_packed_document_are_those_of_the_document_alone(made) -> None:
    model = made()
    require_document_attention(model)
    packed, whole = logits_of(model, TOKENS, DOCUMENTS), logits_of(model, TOKENS, None)
    for row, at in parts():
        alone = logits_of(model, TOKENS[row : row + 1, at], None)[0]
        assert torch.allclose(packed[row, at], alone, atol=1e-5), (row, at)
        if at.start:
            assert not torch.allclose(whole[row, at], alone, atol=1e-3), "without a mask it is another"
    assert packed.isfinite().all(), "padding, too"


@pytest.mark.parametrize("made", MODELS)
def test_a_mask_that_is_off_by_one_is_seen_in_the_logits(made) -> None:
    model = made()
    shifted = DOCUMENTS.roll(1, dims=1)
    shifted[:, 0] = 0
    right, wrong = logits_of(model, TOKENS, DOCUMENTS), logits_of(model, TOKENS, shifted)
    assert not torch.allclose(right[0, 3], wrong[0, 3], atol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bf16", "pure_bf16"])
def test_what_stands_in_another_document_or_in_padding_moves_neither_loss_nor_gradient(
    precision: str,
) -> None:
    model = model_of(LLAMA, precision=precision)
    labels = TOKENS.roll(-1, dims=1).masked_fill(DOCUMENTS != 0, -100)  # of the first document alone

    def gradient(tokens: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss = loss_sum(model, tokens, labels, precision, DOCUMENTS)
        torch.autograd.backward(loss)
        assert loss.isfinite()
        return [loss.detach(), *(p.grad.clone() for n, p in model.named_parameters() if "layers.0" in n)]

    other = torch.where(DOCUMENTS == 0, TOKENS, (TOKENS + 1) % VOCABULARY)
    assert all(map(torch.equal, gradient(TOKENS), gradient(other)))


def test_a_samples_mask_is_the_same_beside_any_other_sample() -> None:
    model = model_of(LLAMA)
    together = logits_of(model, TOKENS, DOCUMENTS)
    for row in range(3):
        mine = slice(row, row + 1)
        mask = document_mask(DOCUMENTS, torch.float32)[mine]
        assert torch.equal(mask, document_mask(DOCUMENTS[mine], torch.float32))
        alone = logits_of(model, TOKENS[mine], DOCUMENTS[mine])
        assert torch.allclose(alone[0], together[row], atol=1e-6)


def test_positions_begin_anew_with_each_document() -> None:
    assert document_positions(DOCUMENTS).tolist() == [
        [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1, 2],
        list(range(12)),
        [0, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4],
    ]


class Counting(FormulaFeed):
    """Its samples hold documents of five tokens."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get(*args, **kwargs)
        found.document_ids[:] = [0, 0, 0, 0, 0, 1, 1, 1]
        return found


def test_the_gradient_of_both_numerics_is_that_of_documents_alone() -> None:
    model = model_of(LLAMA)
    step = next_range(0, 0, 4, 8)
    assert step is not None
    batch = Counting().get(step, 0, 1, 2, Cursor())
    ids, labels = (torch.from_numpy(a).long() for a in (batch.input_ids, batch.labels))
    torch.autograd.backward(
        sum(loss_sum(model, ids[:, at], labels[:, at], "float32") for at in (slice(5), slice(5, 8))) / 32
    )
    alone = [p.grad.clone() for p in model.parameters()]
    micros, place = cut(batch, 2, 0, 1, CPU), StepPlace(step=1, consumed_tokens=0)
    for kind in (InvariantGradient, FastGradient):
        for within, same in ((True, True), (False, False)):
            gradient: Gradient = kind(model, CausalLM(0, "float32", within, 0))
            gradient.reduce(micros, len(micros), 32, place)
            close = [
                torch.allclose(p.grad, a, atol=1e-6) for p, a in zip(model.parameters(), alone, strict=True)
            ]
            assert all(close) == same


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (InputIdsOnly, "InputIdsOnly"),
        (lambda: model_of(LINEAR), "linear_attention"),
    ],
)
def test_a_model_that_cannot_attend_within_documents_is_refused(made, text: str) -> None:
    with raises(ConfigError, "model.document_attention", text, "pack.document_attention=false"):
        require_document_attention(made())


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda: model_of(LLAMA), None),
        (MeanOfDocument, "by itself"),
        (lambda: model_of(GPT2), "none for GPT2"),
        (lambda: model_of({**LLAMA, "attention_dropout": 0.1}), "attention_dropout=0.1"),
        (lambda: model_of(tiny("gpt_oss"), "eager"), "sinks"),
    ],
)
def test_flex_attention_is_used_where_it_computes_what_the_mask_does(made, problem: str | None) -> None:
    found = flex_problem(made())
    assert found is problem is None or problem in found


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({"config": LLAMA}, True),
        ({"config": LLAMA, "attn_implementation": "flex_attention"}, True),
        ({"config": LLAMA, "attn_implementation": "sdpa"}, False),
        ({"config": {**LLAMA, "attn_implementation": "sdpa"}}, False),
        ({"factory": "tests.trainer.test_document_attention:MeanOfDocument"}, False),
    ],
)
def test_flex_attention_is_chosen_only_if_no_other_is_configured(
    model: dict[str, Any], wanted: bool, tmp_path
) -> None:
    assert wants_flex(ModelConfig(**model)) == wanted
    if "config" in model:
        AutoConfig.for_model(**model["config"]).save_pretrained(tmp_path)
        beside = {name: value for name, value in model.items() if name != "config"}
        assert wants_flex(ModelConfig(pretrained=str(tmp_path), **beside)) == (
            beside.get("attn_implementation") != "sdpa"
        )


@GPU
@pytest.mark.parametrize("config", [LLAMA, MISTRAL, GEMMA], ids=["llama", "mistral", "gemma2"])
def test_on_a_gpu_flex_attention_has_the_gradient_of_the_mask(config: dict[str, Any]) -> None:
    wanted, gradients = ModelConfig(config={**config, "hidden_size": 64, "head_dim": 32}), []
    for invariant in (True, False):
        model: Any = build_model(wanted, "float32", 3, CUDA, invariant)
        attend_within_documents(model, wanted, CUDA, invariant)
        assert model.config._attn_implementation == ("eager" if invariant else FLEX)
        tokens, documents = TOKENS.to(CUDA), DOCUMENTS.to(CUDA)
        labels = tokens.roll(-1, dims=1).masked_fill(documents < 0, -100)
        torch.autograd.backward(loss_sum(model, tokens, labels, "float32", documents))
        gradients.append([parameter.grad for parameter in model.parameters()])
    for masked, flex in zip(*gradients, strict=True):
        assert torch.allclose(masked, flex, atol=1e-4 * float(masked.abs().max()))


@pytest.mark.usefixtures("begun_warm")
def test_a_start_refuses_such_a_model_before_anything_runs(tiny_config) -> None:
    factory = {"config": None, "factory": "tests.trainer.test_document_attention:InputIdsOnly"}
    for pack, refused in (
        ({"mode": "bestfit"}, True),
        ({"mode": "bestfit", "document_attention": False}, False),
    ):
        mapping = tiny_config({f"pack.{name}": value for name, value in pack.items()})
        job = parse_config({**mapping, "model": factory})
        if not refused:
            try_model(job)
            continue
        with raises(ConfigError, "model.document_attention", "InputIdsOnly"):
            try_model(job)
