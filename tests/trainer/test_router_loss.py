"""The training loss is the model's own, with a balancing loss of routers and a default padding id."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError
from orchestrator.trainer.dry_run.model_dry_run import try_model
from orchestrator.trainer.model.build_model import build_model, seed_micro_batch
from orchestrator.trainer.model.model_call import document_inputs, require_router_loss
from orchestrator.trainer.objective.objective import CausalLM, causal_lm_terms
from orchestrator.trainer.weights.state_tensors import MODEL
from tests.checkpoint.exports import job
from tests.trainer.architectures import all_types, small, tiny
from tests.trainer.feed import VOCABULARY
from tests.trainer.losses import loss_sum
from tests.trainer.member import tiny_job
from tests.trainer.sharded import alone, in_each_layout, on_ranks

CPU = torch.device("cpu")
BAMBA = {**tiny("bamba"), "z_loss_coefficient": 0.1}
FEW = ["mixtral", "jetmoe"]  # two names of the coefficient
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
IDS = torch.randint(4, 120, (2, 12), generator=torch.Generator().manual_seed(3))


def balanced(kind: str) -> ModelConfig:
    return ModelConfig(config={**tiny(kind), "output_router_logits": True})


def shifted(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], 1)


def compare(model: Any) -> None:
    """Raises if the loss is not the model's own, for whole samples and for padded ones."""
    for is_padding in (None, DOCUMENTS < 0):
        own = IDS if is_padding is None else IDS.masked_fill(is_padding, -100)
        labels = shifted(own)
        num = int((labels != -100).sum())
        seed_micro_batch(0, 0)
        found = loss_sum(model, IDS, labels, "float32", None, is_padding) / num
        mask = None if is_padding is None else ~is_padding
        seed_micro_batch(0, 0)
        asked = model(IDS, labels=own, attention_mask=mask)
        assert asked.aux_loss > 0
        # transformers masks attention to padding, too, which no target sees
        assert torch.allclose(found, asked.loss, atol=1e-5), (found, asked.loss)


@pytest.mark.parametrize("kind", FEW)
def test_the_loss_is_that_of_transformers_for_the_micro_batch(kind: str) -> None:
    assert try_model(job({"config": balanced(kind).config})).num_logits
    compare(build_model(balanced(kind), "float32", 0, CPU, True))


def test_a_factorys_model_that_nests_the_router_has_the_loss_of_transformers() -> None:
    settings = transformers.CONFIG_MAPPING["qwen3_vl_moe"]()
    text = small(settings.text_config) | {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    vision = small(settings.vision_config) | {"out_hidden_size": 64}
    model = transformers.Qwen3VLMoeForConditionalGeneration(
        type(settings)(text_config=text, vision_config=vision)
    )
    compare(model.train())


@pytest.mark.chaos
def test_so_it_is_for_every_type_with_a_router() -> None:
    failed, examined = {}, []
    for kind in all_types():
        try:
            if not hasattr(transformers.CONFIG_MAPPING[kind](), "output_router_logits"):
                continue
            with torch.device("meta"):
                shape = build_model(balanced(kind), "float32", 0, torch.device("meta"), True)
            size = sum(parameter.numel() for parameter in shape.parameters())
            asked = job({"config": balanced(kind).config})
        except Exception:  # noqa: BLE001  these sizes do not fit the type
            continue
        if size > 1 << 25:
            continue
        try:
            try_model(asked)
            compare(build_model(balanced(kind), "float32", 0, CPU, True))
            examined.append(kind)
        except ConfigError as error:
            if error.code not in ("model.router_loss", "model.factory_output"):
                failed[kind] = str(error)
        except Exception as error:  # noqa: BLE001  all are named at once
            failed[kind] = f"{type(error).__name__}: {error}"[:200]
    assert not failed, failed
    assert len(examined) >= 10, examined


def test_within_documents_the_balancing_loss_is_of_all_real_tokens() -> None:
    model: Any = build_model(balanced("mixtral"), "float32", 0, CPU, True)
    labels = shifted(IDS.masked_fill(DOCUMENTS < 0, -100))
    terms = causal_lm_terms(model, IDS, labels, "float32", DOCUMENTS, DOCUMENTS < 0)
    found = terms.loss_sum
    model.config.output_router_logits = False
    rows = model(IDS, **document_inputs(model, DOCUMENTS), output_router_logits=False)
    cross_entropy = nn.functional.cross_entropy(rows.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    logits: list[Tensor] = []
    hooks = [
        each.register_forward_hook(lambda module, args, out: logits.append(out[0]))
        for name, each in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    model(IDS, **document_inputs(model, DOCUMENTS))
    for hook in hooks:
        hook.remove()
    real = (DOCUMENTS >= 0).flatten()
    probabilities = torch.cat([each[real].softmax(-1) for each in logits])
    chosen = nn.functional.one_hot(probabilities.topk(2).indices, 4).float().mean(0).sum(0)
    balancing = 4 * (chosen * probabilities.mean(0)).sum() * model.config.router_aux_loss_coef
    num = int((labels != -100).sum())
    assert torch.allclose(found, cross_entropy + num * balancing, atol=1e-4)
    parts = {name: float(mean.sum) / float(mean.count) for name, mean in terms.metrics.items()}
    assert parts["cross_entropy"] == pytest.approx(float(cross_entropy.detach()) / num, rel=1e-5)
    assert parts["router_loss"] == pytest.approx(float(balancing.detach()), rel=1e-4)
    objective = CausalLM(0, "float32", by_document=True, num_positions=0)
    objective.prepare(model)
    assert objective.metric_names == (), "the configuration does not ask for the router's loss any more"
    model.config.output_router_logits = True
    objective.prepare(model)
    assert objective.metric_names == ("cross_entropy", "router_loss")


def test_padding_alone_has_no_loss() -> None:
    model = build_model(balanced("mixtral"), "float32", 0, CPU, True)
    everywhere = torch.ones_like(IDS, dtype=torch.bool)
    loss = loss_sum(model, IDS, torch.full_like(IDS, -100), "float32", None, everywhere)
    torch.autograd.backward(loss)
    assert float(loss.detach()) == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


class WithoutCoefficient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor) -> MoeCausalLMOutputWithPast:
        logits = self.table(input_ids)
        return MoeCausalLMOutputWithPast(logits=logits, aux_loss=logits.mean())


class WithoutLoss(WithoutCoefficient):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=True)

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.table(input_ids)


@pytest.mark.parametrize(
    "made",
    [
        WithoutCoefficient,
        WithoutLoss,
        lambda: build_model(ModelConfig(config=BAMBA), "float32", 0, CPU, True),
    ],
    ids=["no coefficient", "no loss", "another term"],
)
def test_a_loss_that_would_be_left_out_is_refused(made: Callable[[], nn.Module]) -> None:
    model = made()
    with pytest.raises(ConfigError) as refused:
        require_router_loss(model, model(IDS % VOCABULARY), "the model")
    assert refused.value.code == "model.router_loss"


@pytest.mark.chaos
def test_a_real_token_with_the_padding_id_is_trained_and_alike_in_every_layout() -> None:
    shape = {**tiny("mixtral"), "vocab_size": VOCABULARY, "pad_token_id": 7, "output_router_logits": True}
    asked = tiny_job(train__numerics="fast", train__micro_batch_size=4, model__config=shape)
    expected = alone(asked, 2)
    first = build_model(asked.model, "float32", asked.train.seed, CPU, False)
    name = "model.embed_tokens.weight"
    assert not dict(first.named_parameters())[name][7].any()
    assert expected.state[MODEL, name][7].any(), "a row that begins with zeros has moved"
    layouts = [(2, 1), (2, None)]
    by_rank = on_ranks(2, in_each_layout, asked, layouts, 2)
    for layout in layouts:
        found = by_rank[0][layout]
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.norms == pytest.approx(expected.norms, rel=1e-4)
        whole = next(each[layout].state for each in by_rank if each[layout].state)
        for key, tensor in expected.state.items():
            assert torch.allclose(whole[key].double(), tensor.double(), atol=1e-4), key
