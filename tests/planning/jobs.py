"""A small job's configuration for the plan's tests; its files need not exist."""

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig


def job(*overrides: str) -> JobConfig:
    """Batch 16, seq_len 256, 300 steps, cosine with 10 steps of warm-up, with `section.field=value` words
    on top.
    """
    mapping = {
        "run": {"name": "small"},
        "data": {
            "sources": [{"name": "stdlib", "path": "corpus/*.jsonl", "format": "jsonl"}],
            "tokenizer": "./corpus/tokenizer",
        },
        "pack": {"seq_len": 256},
        "model": {"config": {"model_type": "llama", "hidden_size": 64}},
        "train": {
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "max_steps": 300,
            "lr": 1e-3,
            "schedule": "cosine",
            "warmup_steps": 10,
        },
    }
    return parse_config(mapping, overrides)
