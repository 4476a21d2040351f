"""`python -m benchmarks.router_load --json`: how the tokens of a tiny MoE divide over its experts, with and
without the router's balancing loss.

Trains a Mixtral of 2 layers and 8 experts, 2 of them for each token, on the quickstart corpus by
`orchestrator train`, from the same weights on the same samples: once for each of `--coefficients`
(`router_aux_loss_coef`; 0: `output_router_logits: false`). Then it exports the last point and counts the
router's choices over `--eval-samples` samples of the stream that were not trained yet.

Figures of each run, by layer: `max_over_mean`, the share of the busiest expert to an equal share (1: equal,
4: two experts get all), `entropy` of the shares to that of equal ones, `unused` experts. `cross_entropy` is
the mean over the last tenth of the steps, without the balancing loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import orchestrator
from benchmarks.common import ROOT
from orchestrator.data.sample_corpus import build_sample_corpus

NUM_EXPERTS, PER_TOKEN, BATCH, SEQ_LEN = 8, 2, 8, 128


def main() -> None:
    """Prints the figures, with `--json` as one object in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--coefficients", type=float, nargs="+", default=[0.0, 0.001, 0.02])
    parser.add_argument("--eval-samples", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build_sample_corpus(Path(folder) / "corpus")
        found = {
            str(coefficient): measured(Path(folder), coefficient, arguments.steps, arguments.eval_samples)
            for coefficient in arguments.coefficients
        }
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))


def measured(folder: Path, coefficient: float, steps: int, num_samples: int) -> dict[str, Any]:
    """Returns the figures of one run in `folder`, which has the corpus."""
    config = _config(folder, coefficient, steps)
    (folder / "job.json").write_text(json.dumps(config))
    run, out = folder / "runs" / config["run"]["name"], folder / f"export-{coefficient}"
    for words in (["train", "job.json"], ["export", str(run), str(out)]):
        command = [sys.executable, "-m", "orchestrator.cli.commands", *words]
        subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr, env=_environment())  # noqa: S603
    table = orchestrator.open(str(run)).steps()
    losses = table["cross_entropy"] if "cross_entropy" in table else table["loss"]
    stream = orchestrator.open_stream(config)
    samples = itertools.islice(stream, steps * BATCH, steps * BATCH + num_samples)
    ids = torch.from_numpy(np.stack([sample.input_ids for sample in samples])).long()
    return {
        "cross_entropy": round(statistics.fmean(losses.tail(steps // 10)), 4),
        "layers": [shares_of(logits) for logits in _router_logits(out, ids)],
    }


def shares_of(router_logits: torch.Tensor) -> dict[str, Any]:
    """Returns the figures of one layer from `router_logits` (tokens, experts)."""
    chosen = router_logits.topk(PER_TOKEN, dim=-1).indices.flatten()
    counts = torch.bincount(chosen, minlength=NUM_EXPERTS).double()
    shares = counts / counts.sum()
    entropy = -float(torch.special.xlogy(shares, shares).sum()) / math.log(NUM_EXPERTS)
    return {
        "max_over_mean": round(float(shares.max()) * NUM_EXPERTS, 3),
        "entropy": round(entropy, 4),
        "unused": int((counts == 0).sum()),
    }


def _router_logits(folder: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(ids, output_router_logits=True).router_logits
    return [each.reshape(-1, NUM_EXPERTS) for each in found]


def _config(folder: Path, coefficient: float, steps: int) -> dict[str, Any]:
    return {
        "run": {"name": f"router-{coefficient}", "storage": str(folder / "runs")},
        "data": {
            "sources": [
                {"name": "stdlib", "path": str(folder / "corpus" / "*.jsonl"), "format": "jsonl"}
            ],
            "tokenizer": str(folder / "corpus" / "tokenizer"),
            "num_tokenizers": 1,
        },
        "pack": {"seq_len": SEQ_LEN},
        "model": {
            "config": {
                "model_type": "mixtral",
                "vocab_size": 8192,
                "hidden_size": 96,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "num_local_experts": NUM_EXPERTS,
                "num_experts_per_tok": PER_TOKEN,
                "max_position_embeddings": 512,
                "output_router_logits": coefficient > 0,
                "router_aux_loss_coef": coefficient,
            }
        },
        "train": {
            "global_batch_size": BATCH,
            "micro_batch_size": 4,
            "max_steps": steps,
            "lr": 2e-3,
            "warmup_steps": 20,
        },
        "cluster": {"num_workers": 1},
    }


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main()
