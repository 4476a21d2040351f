"""The objectives in examples/, trained by two ranks, against loops in plain PyTorch that share no code with
the package: their own tokenization, loss and optimizer, a row at a time and without padding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, logsigmoid, silu
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import orchestrator
from orchestrator.config.loading import load_config
from tests.conftest import TOKENIZER_VOCAB
from tests.data.preferences import pairs
from tests.torchrun.ranks import Ranks

pytestmark = [pytest.mark.xdist_group("forked"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
STEPS, BATCH, LR, DECAY, EPS = 5, 6, 3e-3, 0.1, 1e-4
PAIRS = pairs(STEPS * BATCH)
LLAMA = {
    "model_type": "llama",
    "vocab_size": TOKENIZER_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the data and the model that the examples name."""
    monkeypatch.chdir(tmp_path)
    for name in ("sft", "base"):
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(name)
        for file in (corpus / "tokenizer").iterdir():
            Path(name, file.name).write_bytes(file.read_bytes())
    for name, records in (("pairs", PAIRS), ("texts", [{"text": text_of(pair)} for pair in PAIRS * 2])):
        Path(name).mkdir()
        Path(name, "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def text_of(pair: dict[str, Any]) -> str:
    return str(pair["prompt"] + pair["chosen"])


def trained(
    folder: Path, name: str, seq_len: int, *words: str
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Trains an example as it is, but small: losses, the last weights, and the run."""
    small = [
        *(f"pack.seq_len={seq_len}", "data.shuffle=none", f"train.global_batch_size={BATCH}"),
        *("train.micro_batch_size=2", f"train.max_steps={STEPS}", f"train.lr={LR}", f"train.eps={EPS}"),
        *(f"train.weight_decay={DECAY}", "train.max_grad_norm=null", f"run.storage={folder}"),
        *("data.num_tokenizers=1", "cluster.num_workers=2", "resume.every_steps=2", *words),
    ]
    job = str(ROOT / "examples" / f"{name}.yaml")
    (folder / "logs").mkdir()
    group = Ranks(folder, folder / "logs", 2, [job, *small])
    try:
        assert group.end(LIMIT_S) == [0, 0], group.said()
    finally:
        group.kill()
    run = orchestrator.open(load_config(job, small).run.run_uri)
    run.export(folder / "exported")
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    weights = {}
    for file in (folder / "exported").glob("*.safetensors"):
        weights |= load_file(file)
    return [float(record.loss or 0) for record in run.records()], weights, run


def reference(model: nn.Module, loss_of_step: Callable[[int], Tensor]) -> list[float]:
    """Trains the model with torch's AdamW; returns the losses."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]  # noqa: PLR2004
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of_step(step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def require_equal(model: nn.Module, weights: dict[str, Tensor], atol: float = 1e-6) -> None:
    named = dict(model.named_parameters())
    assert named.keys() <= weights.keys()
    for name, parameter in named.items():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=atol, msg=name)


def encoder() -> tuple[Callable[[str], list[int]], int]:
    """The ids of a text, and that of the token which ends it."""
    tokenizer = Tokenizer.from_file("sft/tokenizer.json")
    end = tokenizer.token_to_id("<|endoftext|>")
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, end


def rows(step: int) -> Iterator[tuple[tuple[list[int], int], tuple[list[int], int]]]:
    """(tokens, number of tokens of the prompt) of the chosen and the rejected row of each pair of a step."""
    ids, end = encoder()
    for pair in PAIRS[step * BATCH : (step + 1) * BATCH]:
        given = ids(pair["prompt"])
        yield tuple(([*given, *ids(pair[name]), end], len(given)) for name in ("chosen", "rejected"))  # type: ignore[misc]


def log_prob(model: Any, row: tuple[list[int], int]) -> Tensor:
    tokens, given = torch.tensor(row[0]), row[1]
    logs = log_softmax(model(tokens[None, :-1]).logits[0], dim=-1)
    return sum(logs[at - 1, tokens[at]] for at in range(given, len(tokens)))  # type: ignore[return-value]


@pytest.mark.chaos
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_dpo_is_that_of_a_plain_loop(folder: Path, parallel: str) -> None:
    words = () if parallel == "replicate" else ("train.parallel=shard", "train.numerics=fast")
    losses, weights, run = trained(folder, "dpo", 48, *words)
    model, frozen = (AutoModelForCausalLM.from_pretrained("sft", dtype=torch.float32) for _ in range(2))
    rewards: list[list[float]] = []

    def loss_of_step(step: int) -> Tensor:
        found = []
        for pair in rows(step):
            with torch.no_grad():
                before = [log_prob(frozen, row) for row in pair]
            ratios = [log_prob(model, row) - old for row, old in zip(pair, before, strict=True)]
            found.append(-logsigmoid(0.1 * (ratios[0] - ratios[1])))
            rewards.append([0.1 * float(ratio.detach()) for ratio in ratios])
        return torch.stack(found).mean()

    assert reference(model, loss_of_step) == pytest.approx(losses, abs=1e-6)
    assert losses[0] == pytest.approx(0.6931472)
    assert losses[-1] < losses[0] - 0.1
    require_equal(model, weights)
    for step, record in enumerate(run.records()):
        here = rewards[step * BATCH : (step + 1) * BATCH]
        assert record.metrics["chosen_reward"] == pytest.approx(sum(c for c, _ in here) / BATCH, abs=1e-6)
        assert record.metrics["rejected_reward"] == pytest.approx(sum(r for _, r in here) / BATCH, abs=1e-6)
        assert record.metrics["accuracy"] == pytest.approx(sum(c > r for c, r in here) / BATCH)


class Rewards(nn.Module):
    """The reward model of the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = AutoModel.from_pretrained("sft", dtype=torch.float32)
        self.score = nn.Linear(LLAMA["hidden_size"], 1, bias=False)  # type: ignore[arg-type]

    def forward(self, tokens: list[int]) -> Tensor:
        hidden = self.backbone(torch.tensor([tokens])).last_hidden_state
        return self.score(hidden[0, -1])[0]


@pytest.mark.chaos
def test_the_reward_model_is_that_of_a_plain_loop(folder: Path) -> None:
    losses, weights, run = trained(folder, "reward_model", 48)
    torch.manual_seed(0)
    from examples.reward_model import reward_model

    first = reward_model(pretrained="sft").score.weight.detach()
    model = Rewards()
    model.score.weight.data.copy_(first)
    wins: list[bool] = []

    def loss_of_step(step: int) -> Tensor:
        found = []
        for chosen, rejected in rows(step):
            margin = model(chosen[0][:-1]) - model(rejected[0][:-1])
            wins.append(float(margin.detach()) > 0)
            found.append(-logsigmoid(margin))
        return torch.stack(found).mean()

    assert reference(model, loss_of_step) == pytest.approx(losses, abs=1e-6)
    assert losses[-1] < losses[0]
    require_equal(model, weights)
    for step, record in enumerate(run.records()):
        assert record.metrics["accuracy"] == pytest.approx(sum(wins[step * BATCH :][:BATCH]) / BATCH)


class Ahead(nn.Module):
    """The model with further heads of the reference."""

    def __init__(self, num_ahead: int) -> None:
        super().__init__()
        self.base = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
        size = LLAMA["hidden_size"]
        self.ahead = nn.ModuleList(nn.Linear(size, size) for _ in range(num_ahead))  # type: ignore[arg-type]
        for parameter in self.ahead.parameters():
            parameter.data.zero_()

    def forward(self, tokens: list[int]) -> list[Tensor]:
        hidden = self.base.model(torch.tensor([tokens])).last_hidden_state[0]
        states = [hidden, *(hidden + silu(block(hidden)) for block in self.ahead)]
        return [self.base.lm_head(state) for state in states]


@pytest.mark.chaos
def test_multi_token_prediction_is_that_of_a_plain_loop(folder: Path) -> None:
    seq_len = 16
    losses, weights, run = trained(folder, "multi_token", seq_len)
    ids, end = encoder()
    stream: list[tuple[int, int]] = []  # token, number of its document
    for number, pair in enumerate(PAIRS * 2):
        stream += [(token, number) for token in [*ids(text_of(pair)), end]]
    model, further = Ahead(2), list[float]()

    def loss_of_step(step: int) -> Tensor:
        parts, counts = [torch.zeros(()) for _ in range(3)], [0, 0, 0]
        for sample in range(step * BATCH, (step + 1) * BATCH):
            begin = sample * seq_len
            logits = model([token for token, _ in stream[begin : begin + seq_len]])
            for head in range(3):
                for at in range(seq_len - head):
                    # the token after the one at `at + head`, which lies in the document of `at`
                    if stream[begin + at + head][1] == stream[begin + at][1]:
                        target = torch.tensor(stream[begin + at + head + 1][0])
                        parts[head] = parts[head] + cross_entropy(logits[head][at], target)
                        counts[head] += 1
        further.append(float(parts[2].detach()) / counts[2])
        return (parts[0] + 0.3 * (parts[1] + parts[2])) / counts[0]

    assert reference(model, loss_of_step) == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0]
    require_equal(model, weights)
    assert [record.metrics["ahead_3"] for record in run.records()] == pytest.approx(further, rel=1e-6)
