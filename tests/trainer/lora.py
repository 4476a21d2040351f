"""Base models and jobs that train adapters beside them, and the same training as peft's users write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from orchestrator.planning.schedule import learning_rate
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import MODEL
from tests.trainer.feed import VOCABULARY, token_at
from tests.trainer.member import tiny_job
from tests.trainer.weight_folders import saved

CPU = torch.device("cpu")
SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LORA: dict[str, Any] = {"rank": 3, "alpha": 6.0, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def base_in(folder: Path, shape: dict[str, Any] = SHAPE, **how: Any) -> str:
    """A folder with a model of random weights."""
    return saved(folder, shape, **how)


def lora_job(base: str, lora: dict[str, Any] | None = None, **changes: Any) -> TrainJob:
    """A job that trains adapters beside the model in a folder."""
    return tiny_job(model__pretrained=base, model__lora={**LORA, **(lora or {})}, **changes)


def weights_of(state: TrainState) -> dict[str, torch.Tensor]:
    """What the points of a state hold of the model."""
    return {item.name: item.tensor for item in state.items() if item.group == MODEL}


def peft_model(base: str, job: TrainJob) -> Any:
    """The model as one makes it with peft alone."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = job.model.lora
    assert lora is not None
    targets = lora.target_modules
    torch.manual_seed(job.train.seed)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, settings)


def peft_loop(base: str, job: TrainJob, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains with peft, torch's AdamW and plain PyTorch on the tokens of `FormulaFeed`: the losses, and what
    peft would save.
    """
    model = peft_model(base, job).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": job.train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job.train.lr, betas=job.train.betas, eps=job.train.eps)
    losses, size = [], job.train.global_batch_size * job.seq_len
    for step in range(steps):
        tokens = token_at(np.arange(step * size, (step + 1) * size + 1)).astype(np.int64)
        ids = torch.from_numpy(tokens[:-1].copy()).view(-1, job.seq_len)
        labels = torch.from_numpy(tokens[1:].copy()).view(-1, job.seq_len)
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, job.train.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.train, job.budgets, (step + 1) * size)
        optimizer.step()
        losses.append(loss.item())
    return losses, peft.get_peft_model_state_dict(model, save_embedding_layers=False)
