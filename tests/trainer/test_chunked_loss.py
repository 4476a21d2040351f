"""The loss in chunks of positions: the same value and gradient as from whole logits, which never exist."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.trainer.objective.logit_loss import (
    Head,
    LossTerms,
    find_head,
    loss_of_hidden,
    loss_of_logits,
)
from orchestrator.trainer.objective.objective import causal_lm_terms
from tests.trainer.heads import VOCABULARY, Largest, Plain
from tests.trainer.launch import Launch, trained_steps
from tests.trainer.member import Plan, run_to_end, tiny_job

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
ALL_TERMS = LossTerms(z_loss=0.01, label_smoothing=0.1, logit_softcap=3.0)


@pytest.mark.quick(
    "bf16-True-of1-23",
    "float32-False-of0-100",
    "bf16-True-of1-22",
    "bf16-True-of1-5",
    "float32-True-of0-1",
)
@pytest.mark.parametrize("size", [1, 5, 22, 23, 100])
@pytest.mark.parametrize("of", [LossTerms(), ALL_TERMS])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["float32", "bf16"]
)
def test_value_and_gradient_are_those_of_whole_logits(
    size: int, of: LossTerms, bias: bool, precision: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(1)
    hidden, head = torch.randn(23, 16, requires_grad=True), nn.Linear(16, 50, bias=bias)
    targets = torch.randint(0, 50, (23,))
    targets[3:9] = -100
    cast = torch.autocast("cpu", precision) if precision is torch.bfloat16 else nullcontext()
    trained = [hidden, *head.parameters()]
    with cast:
        whole = loss_of_logits(head(hidden).mul(0.5).float(), targets, of)
    with cast:
        chunked = loss_of_hidden(hidden, head, lambda logits: logits.mul(0.5), targets, of, size)
    assert chunked.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    assert float(chunked.z_loss) == pytest.approx(float(whole.z_loss), rel=1e-6)
    torch.testing.assert_close(chunked.entropies, whole.entropies, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(whole.loss / 7, trained)
    for mine, theirs in zip(torch.autograd.grad(chunked.loss / 7, trained), expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def test_a_frozen_head_and_a_forward_pass_alone(small_chunks: int) -> None:
    hidden, head = torch.randn(9, 4, requires_grad=True), nn.Linear(4, 20)
    head.requires_grad_(False)
    targets = torch.arange(9)
    whole = loss_of_logits(head(hidden), targets, LossTerms())
    chunked = loss_of_hidden(hidden, head, lambda logits: logits, targets, LossTerms(), small_chunks)
    (theirs,), (mine,) = (torch.autograd.grad(each.loss, [hidden]) for each in (whole, chunked))
    torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        alone = loss_of_hidden(hidden, head, lambda logits: logits, targets, LossTerms(), small_chunks)
    assert not alone.loss.requires_grad
    assert alone.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)


# ------------------------------------------------------------------------------------------ heads of models
def transformer(kind: str, **more: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**SMALL, **more})
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config)
    return model.train()


@pytest.mark.quick(
    "granite-more3-True",
    "cohere-more4-False",
    "mixtral-more5-False",
    "gpt2-more1-True",
    "qwen3_moe-more6-False",
    "llama-more0-True",
    "gemma2-more2-False",
)
@pytest.mark.parametrize("by_document", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("gpt2", {"n_embd": 16, "n_head": 2, "n_layer": 2}),
        ("gemma2", {"head_dim": 8}),  # caps its logits
        ("granite", {"logits_scaling": 2.0}),
        ("cohere", {"logit_scale": 0.5}),
        ("mixtral", {"num_local_experts": 4, **EXPERTS}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, **EXPERTS}),
    ],
)
def test_the_loss_at_the_head_of_a_model_is_that_of_its_logits(
    kind: str, more: dict[str, Any], by_document: bool, small_chunks: int
) -> None:
    torch.manual_seed(2)
    model = transformer(kind, **more)
    head = find_head(model, 2 * 12, by_document)
    assert head is not None
    assert head.name == "lm_head"
    ids = torch.randint(0, VOCABULARY, (2, 12))
    labels = torch.where(ids % 5 == 0, -100, ids.roll(-1, 1))
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12]) if by_document else None

    def terms(head: Head | None) -> tuple[float, dict[str, float], list[Tensor], Tensor]:
        torch.manual_seed(3)
        found = causal_lm_terms(model, ids, labels, "float32", documents, of=ALL_TERMS, head=head)
        assert found.per_token is not None
        gradients = torch.autograd.grad(found.loss_sum / 20, list(model.parameters()), allow_unused=True)
        metrics = {name: float(mean.sum) for name, mean in found.metrics.items()}
        own = [each for each in gradients if each is not None]
        return found.loss_sum.item(), metrics, own, found.per_token

    (loss, metrics, gradients, per_token), whole = terms(head), terms(None)
    assert loss == pytest.approx(whole[0], rel=1e-6)
    assert metrics == pytest.approx(whole[1], rel=1e-5)
    for mine, theirs in zip(gradients, whole[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(per_token, whole[3], rtol=1e-5, atol=1e-6)
    assert "forward" not in vars(model.get_submodule("lm_head"))


@pytest.mark.parametrize(
    "use",
    [
        lambda outputs: outputs,
        lambda outputs: 30.0 * torch.tanh(outputs / 30.0),
        lambda outputs: outputs.float() * 0.5,
    ],
)
def test_a_factorys_head_is_found(use: Callable[[Tensor], Any], small_chunks: int) -> None:
    head = find_head(Plain(use), 12, by_document=False)
    assert head is not None
    assert head.name == "out"
    outputs = torch.randn(3, 4)
    torch.testing.assert_close(head.finish(outputs), use(outputs))


@pytest.mark.parametrize(
    "use",
    [
        lambda outputs: outputs.log_softmax(-1),
        lambda outputs: outputs + torch.ones(VOCABULARY),
        lambda outputs: outputs * torch.ones(VOCABULARY),
        lambda outputs: outputs - outputs.mean(),
        lambda outputs: outputs[..., :50],
        lambda outputs: outputs.to(torch.float32) if outputs.shape[-1] == VOCABULARY else None,
        lambda outputs: outputs.detach().clone().requires_grad_(),
        lambda outputs: torch.zeros(1, 2, VOCABULARY, requires_grad=True),
    ],
)
def test_a_model_that_uses_the_outputs_of_its_head_keeps_its_logits(
    use: Callable[[Tensor], Any], small_chunks: int
) -> None:
    assert find_head(Plain(use), 12, by_document=False) is None


def test_a_head_that_is_called_twice_or_not_linear_is_none(small_chunks: int) -> None:
    class Twice(Plain):
        def forward(self, input_ids: Tensor) -> Any:
            return self.out(self.embed(input_ids)) if super().forward(input_ids) is not None else None

    class Lora(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) + 1

    lora = Plain(lambda outputs: outputs)
    lora.out = Lora(8, VOCABULARY)
    assert find_head(Twice(lambda outputs: outputs), 12, by_document=False) is None
    assert find_head(lora, 12, by_document=False) is None


# -------------------------------------------------------------------------------------- memory and training
def test_logits_exist_for_one_chunk_only(small_chunks: int) -> None:
    model = Plain(lambda outputs: outputs)
    ids = torch.arange(60).view(1, 60)

    def largest(head: Head | None) -> int:
        with Largest() as seen:
            causal_lm_terms(model, ids, ids, "float32", head=head).loss_sum.backward()
        return seen.found

    assert largest(None) == 60 * VOCABULARY
    assert largest(find_head(model, 60, by_document=False)) == VOCABULARY * 8  # the weight and its gradient


def chunked(folder: Path, world_size: int, **changes: Any) -> Launch:
    plans = {f"m{rank}": Plan(chunk=3) for rank in range(world_size)}
    return run_to_end(folder, world_size, plans=plans, job=tiny_job(**changes))


@pytest.mark.chaos
def test_bits_are_the_same_on_any_number_of_members(tmp_path: Path) -> None:
    alone, group = (chunked(tmp_path / str(size), size) for size in (1, 3))
    whole = run_to_end(tmp_path / "whole", 1)
    assert group.last_point().state_digest == alone.last_point().state_digest
    assert trained_steps(group) == trained_steps(alone)
    assert alone.last_point().state_digest != whole.last_point().state_digest, "no chunk was computed"
    assert [row[1] for row in trained_steps(alone)] == pytest.approx(
        [row[1] for row in trained_steps(whole)], rel=1e-5
    )


@pytest.mark.parametrize(
    ("size", "parallel"),
    [(2, "replicate"), (2, "shard"), (4, {"shard": 2, "replicate": 2})],
    ids=["ddp", "fsdp2", "hsdp"],
)
@pytest.mark.quick("hsdp")
def test_ddp_fsdp2_and_hsdp_train_it_as_one_process_trains_whole_logits(
    tmp_path: Path, size: int, parallel: object
) -> None:
    group = chunked(tmp_path / "group", size, train__parallel=parallel, train__numerics="fast")
    whole = run_to_end(tmp_path / "whole", 1)
    assert [row[1] for row in trained_steps(group)] == pytest.approx(
        [row[1] for row in trained_steps(whole)], rel=1e-4
    )
