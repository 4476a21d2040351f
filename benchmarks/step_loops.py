"""The models of `benchmarks.step`, and hand-written loops that train them: `python -m benchmarks.step_loops`.

A loop has no feed, no saves and no checks. It trains random tokens with the same model, batch, optimizer and
clipping as the product.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.step_turns import GPU, Turns

_CHUNK = 4096 if GPU else 256  # positions whose logits exist at one time


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama, and a batch for it."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    seq_len: int
    samples: int
    micro_batch_size: int

    @property
    def model(self) -> dict[str, Any]:
        """The job's `model.config`."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": max(1024, self.seq_len),
            "tie_word_embeddings": False,
        }


SIZES = {
    "tiny": Size(
        hidden=64,
        inner=128,
        layers=2,
        heads=2,
        kv_heads=2,
        vocabulary=8192,
        seq_len=64,
        samples=4,
        micro_batch_size=2,
    ),
    "mini": Size(
        hidden=256,
        inner=704,
        layers=4,
        heads=4,
        kv_heads=4,
        vocabulary=8192,
        seq_len=256,
        samples=8,
        micro_batch_size=4,
    ),
    "375m": Size(
        hidden=1024,
        inner=2816,
        layers=24,
        heads=16,
        kv_heads=16,
        vocabulary=32768,
        seq_len=2048,
        samples=32,
        micro_batch_size=8,
    ),
    "1b": Size(
        hidden=2048,
        inner=5632,
        layers=22,
        heads=32,
        kv_heads=4,
        vocabulary=32768,
        seq_len=2048,
        samples=16,
        micro_batch_size=4,
    ),
}
SIZES["1b-8k"] = replace(SIZES["1b"], seq_len=8192, samples=4, micro_batch_size=1)
# what each loop does beside plain eager PyTorch
LOOPS: dict[str, frozenset[str]] = {
    "eager": frozenset(),
    "compiled": frozenset({"compile"}),
    "compiled, chunks": frozenset({"compile", "chunks"}),
}
GPU_LOOPS: dict[str, frozenset[str]] = {
    "compiled, chunks, whole batch": frozenset({"compile", "chunks", "whole batch"}),
    "liger, chunks": frozenset({"liger", "chunks"}),
    "liger, chunks, whole batch": frozenset({"liger", "chunks", "whole batch"}),
}


def main() -> None:
    """Trains until the benchmark ends. Arguments: a `Size` as JSON, and the name of a loop."""
    turns = Turns()
    size = Size(**json.loads(sys.argv[1]))
    does = {**LOOPS, **GPU_LOOPS}[sys.argv[2]]
    step = make_step(size, does)
    while True:
        step()
        turns.after_step()


def make_step(size: Size, does: frozenset[str]) -> Callable[[], Tensor]:
    """Builds the model and the optimizer. Returns a function that makes a step and returns its loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if GPU else "cpu")
    shape = dict(size.model)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    if "liger" in does:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    model.train()
    if "compile" in does:
        for block in model.model.layers:
            block.forward = torch.compile(block.forward)
    loss_of = _chunked_loss(model, "liger" in does) if "chunks" in does else _whole_loss(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    micro = size.samples if "whole batch" in does else size.micro_batch_size

    def step() -> Tensor:
        ids = torch.randint(0, size.vocabulary, (size.samples, size.seq_len + 1)).to(device)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for first in range(0, size.samples, micro):
            rows = ids[first : first + micro]
            with torch.autocast(device.type, torch.bfloat16, enabled=GPU):
                loss = loss_of(rows[:, :-1], rows[:, 1:].reshape(-1))
            (loss / (size.samples * size.seq_len)).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def _whole_loss(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(ids).logits
        with torch.autocast(ids.device.type, enabled=False):
            return functional.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum")

    return loss_of


def _chunked_loss(model: Any, liger: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of chunks of positions, whose logits are computed again in the backward pass."""
    of_liger: Any = None
    if liger:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        of_liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def of_chunk(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")

    if GPU:
        of_chunk = torch.compile(of_chunk)

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        hidden, weight = model.model(ids).last_hidden_state.flatten(0, 1), model.lm_head.weight
        if GPU:
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        if of_liger is not None:
            return of_liger(weight, hidden, labels)  # type: ignore[no-any-return]
        losses = [
            checkpoint(
                of_chunk,
                hidden[first : first + _CHUNK],
                weight,
                labels[first : first + _CHUNK],
                use_reentrant=False,
            )
            for first in range(0, len(hidden), _CHUNK)
        ]
        return torch.stack(losses).sum()

    return loss_of


if __name__ == "__main__":
    main()
