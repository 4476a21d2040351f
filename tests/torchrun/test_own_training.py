"""A user's own training under torchrun: objective with a frozen model, optimizer, averages, or adapters.

The bits are the same on another number of ranks, after a resume with another batch, in a replay and in an
evaluation of a point.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import orchestrator
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.storage.files import Storage
from tests.torchrun.ranks import Ranks

pytestmark = [pytest.mark.xdist_group("forked"), pytest.mark.timeout(1800)]

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "format2"
LIMIT_S = 600.0  # blocks are compiled in it
MODEL = {
    "model_type": "llama",
    "vocab_size": 304,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
OWN = {
    "own objective and Muon": [
        "train.objective=tests.trainer.objectives:nearer_to_reference",
        "model.frozen={reference: {pretrained: base}}",
        "train.optimizer=muon",
        "train.ema=0.9",
    ],
    "distillation and Adafactor": [
        "train.objective_args={teacher: wise, temperature: 2.0}",
        "model.frozen={wise: {pretrained: base}}",
        "train.optimizer=adafactor",
    ],
    "compiled blocks": ["train.compile=blocks"],
    "adapters": [
        "model.config=null",
        "model.pretrained=base",
        "model.lora={rank: 2, alpha: 4, dropout: 0.1}",
    ],
}
EVALUATION = ["data.holdout=0.2", "eval.every_steps=2", "eval.at_end=true", "eval.max_samples=5"]


def train(folder: Path, world_size: int, words: list[str]) -> None:
    logs = folder / f"logs-{len(list(folder.glob('logs-*')))}"
    logs.mkdir()
    ranks = Ranks(folder, logs, world_size, ["job.yaml", *EVALUATION, *words])
    try:
        assert ranks.end(LIMIT_S) == [0] * world_size, ranks.said()
    finally:
        ranks.kill()


def trained(folder: Path, sizes: tuple[int, int], words: list[str]) -> orchestrator.Run:
    """Four steps, and two with another batch."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("example"))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)).save_pretrained(folder / "base")
    train(folder, sizes[0], [*words, "train.max_steps=4"])
    train(folder, sizes[1], [*words, "train.max_steps=6", "train.global_batch_size=6"])
    return orchestrator.open(folder / "example")


def facts(run: orchestrator.Run) -> list[tuple[Any, ...]]:
    return [(r.step, r.digest, r.loss, r.grad_norm, json.dumps(r.metrics)) for r in run.records()]


@pytest.mark.chaos
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=() if name == "adapters" else pytest.mark.chaos)
        for name, words in OWN.items()
    ],
)
def test_bits_do_not_depend_on_ranks_and_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    alone = trained(tmp_path / "alone", (1, 1), words)
    run = trained(tmp_path / "two", (2, 3), words)
    monkeypatch.chdir(tmp_path / "two")
    assert facts(run) == facts(alone)
    events = read_journal(Storage(run.uri)).events
    computed = [dict(event.fields) for event in events if event.kind == EventKind.KERNELS]
    compiled = {"blocks": "compiled", "attention": "sdpa"}
    assert computed == ([compiled, compiled] if "train.compile=blocks" in words else [])
    digests = [each.list_points()[-1]["weights_digest"] for each in (run, alone)]
    assert digests[0] == digests[1]
    columns = ["part", "step", "loss", "targets", "samples"]
    assert run.evals()[columns].equals(alone.evals()[columns])
    last = run.evals().iloc[-1]
    (again,) = run.evaluate(run.list_points()[-1]["name"])
    assert (again.step, again.loss, again.targets) == (last.step, last.loss, last.targets)
    assert run.audit()["exactly_once"]
    third = run.records()[2]  # the points before it are deleted: the replay begins with the first weights
    replayed = run.replay(tokens=third.consumed_tokens)
    assert (replayed.steps_compared, replayed.first_difference) == (3, None)
