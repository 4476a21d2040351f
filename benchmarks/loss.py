"""`python -m benchmarks.loss --json`: what the built-in objective costs beside a hand-written loss.

One step's forward and backward pass of a model of the given shape, in one process. `plain` calls the model
and `cross_entropy` of its logits. `objective` is the built-in objective with whole logits, `chunked` with
logits of one chunk at a time. The three alternate; each ratio is the median over rounds, to `plain` of the
same round. `largest` is the largest number of elements of a tensor in one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from orchestrator.trainer.objective.logit_loss import find_head
from orchestrator.trainer.objective.objective import causal_lm_terms


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.found = max([self.found, *sizes])
        return result


def main() -> None:
    """Prints the figures, with `--json` as one object in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    found = measure(
        arguments.vocabulary, arguments.samples, arguments.seq_len, arguments.rounds, arguments.device
    )
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))


def measure(vocabulary: int, samples: int, seq_len: int, rounds: int, device: str) -> dict[str, Any]:
    """Returns seconds per step, ratios to `plain` and largest tensors."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=seq_len,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device).train()
    ids = torch.randint(0, vocabulary, (samples, seq_len), device=device)
    head = find_head(model, samples * seq_len, by_document=False)
    assert head is not None, "the model has a linear head, and its logits more than one chunk"

    def plain() -> torch.Tensor:
        logits = model(ids).logits.float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum")

    losses = {
        "plain": plain,
        "objective": lambda: causal_lm_terms(model, ids, ids, "float32").loss_sum,
        "chunked": lambda: causal_lm_terms(model, ids, ids, "float32", head=head).loss_sum,
    }
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for number in range(rounds + 1):
        for name, loss in losses.items():
            model.zero_grad()
            _wait(device)
            began = time.perf_counter()
            (loss() / ids.numel()).backward()
            _wait(device)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    largest = {}
    for name, loss in losses.items():
        with _Largest() as seen:
            loss().backward()
        largest[name] = seen.found
    return {
        "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "ratios": {
            name: round(statistics.median(a / b for a, b in zip(values, seconds["plain"], strict=True)), 3)
            for name, values in seconds.items()
        },
        "largest": largest,
        "samples": seconds,
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
