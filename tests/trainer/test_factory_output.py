"""A model is examined before a run claims anything: its state, and a forward pass of one sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestrator.config.sections import ModelConfig, TrainConfig
from orchestrator.errors import ConfigError
from orchestrator.trainer.model.build_model import build_model, cast_state
from orchestrator.trainer.model.factory_output import (
    CODE,
    BeyondTableError,
    UnknownValueError,
    require_state,
    try_forward,
    without_weights,
)
from orchestrator.trainer.state.sharded_state import ShardedState
from tests.raising import raises

CPU, SEQ_LEN, VOCAB = torch.device("cpu"), 16, 40


class Counting(nn.Module):
    """Has state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}


class Small(nn.Module):
    """Learned positions, rotary tables outside the state; `how` says what is odd about it."""

    def __init__(self, how: str = "", positions: int = SEQ_LEN) -> None:
        super().__init__()
        self.how = how
        self.table, self.places = nn.Embedding(VOCAB, 8), nn.Embedding(positions, 8)
        self.head = nn.Linear(8, VOCAB)
        angles = torch.arange(8) * 0.001 + 1
        self.register_buffer("inv_freq", angles, persistent=False)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(8), angles), persistent=False)
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64))
        self.again = nn.Module()
        self.again.register_buffer("scale", self.scale)
        self.change()

    def change(self) -> None:
        match self.how:
            case "unsigned":
                self.register_buffer("odd", torch.zeros(2, dtype=torch.uint16))
            case "complex":
                self.odd = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
            case "sparse":
                self.register_buffer("odd", torch.zeros(2, 2, device="cpu").to_sparse())
            case "lazy":
                self.odd = nn.LazyLinear(2)
            case "no tensor":
                self.odd = Counting()
            case "tied by memory":
                self.head.weight = nn.Parameter(self.table.weight.data)
            case "tied in part":
                self.head.weight = nn.Parameter(self.table.weight.detach()[4:])
            case "tied":
                self.head.weight = self.table.weight
            case "set data":
                self.head.weight.data = torch.from_numpy(np.ones((VOCAB, 8), "float32"))
            case "set data of another shape":
                self.head.bias.data = torch.cat([self.head.bias.data, torch.zeros(0)])

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        states = self.table(input_ids) + self.places(places)
        if self.how == "branch" and states.sum() > 0:
            states = states + 1
        if self.how == "raises by value" and states.sum().item() != float("inf"):
            raise ValueError("no")
        if self.how == "needs CUDA" and states.sum().item() != float("inf"):
            raise RuntimeError("this kernel needs CUDA")
        logits = self.head(states)
        odd = {
            "tuple": lambda: (logits,),
            "dict": lambda: {"logits": logits},
            "last logits": lambda: logits[:, -1:],
            "last logits without a dimension": lambda: logits[:, -1],
            "flat": lambda: logits.flatten(0, 1),
            "one more": lambda: torch.cat([logits, logits[:, :1]], 1),
            "ids": lambda: logits.argmax(-1, keepdim=True),
            "detached": logits.detach,
            "none": lambda: None,
            "object": lambda: SimpleNamespace(logits=logits),
            "object without": lambda: SimpleNamespace(scores=logits),
        }
        return odd.get(self.how, lambda: logits)()


class Needing(Small):
    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids * mask)


class KeywordOnly(Small):
    def forward(self, *, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 8)


def examined(kind: type[nn.Module] = Small, *args: Any, small: bool = True) -> Any:
    with torch.device("meta"):
        model = kind(*args)
    require_state(model, "model.factory=x:y")
    return try_forward(model, "model.factory=x:y", SEQ_LEN, False, lambda: kind(*args) if small else None)


def code_of(refused: pytest.ExceptionInfo[ConfigError]) -> tuple[str | None, int]:
    assert str(refused.value).startswith("model.factory=x:y"), "it is named"
    return refused.value.code, refused.value.exit_code


# ---- the state
@pytest.mark.parametrize(
    "how", ["unsigned", "complex", "sparse", "lazy", "no tensor", "tied by memory", "tied in part"]
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_state_that_no_point_can_hold_is_refused_with_and_without_weights(how: str, device: str) -> None:
    with torch.device(device):
        model = Small(how)
    with pytest.raises(ConfigError) as refused:
        require_state(model, "model.factory=x:y")
    assert code_of(refused) == (CODE, 2)


@pytest.mark.parametrize("how", ["", "tied"])
def test_what_is_tied_by_one_parameter_and_complex_outside_the_state_is_held(how: str) -> None:
    require_state(Small(how), "model.factory=x:y")
    flat = torch.zeros(6)
    model = nn.Module()
    model.one, model.other = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
    require_state(model, "slices of one tensor do not overlap")


def test_a_worker_refuses_it_too() -> None:
    asked = ModelConfig(factory="tests.trainer.test_factory_output:Small", factory_args={"how": "unsigned"})
    with pytest.raises(ConfigError) as refused:
        build_model(asked, "float32", 0, CPU, True)
    assert refused.value.code == CODE


# ---- types
def types_of(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.dtype for name, tensor in tensors}


def test_a_cast_keeps_complex_tensors_and_what_is_not_in_the_state() -> None:
    model, before = Small("tied"), Small()
    cast_state(model, torch.bfloat16)
    types = types_of(model)
    assert types.pop("inv_freq") == torch.float32
    assert types.pop("freqs_cis") == torch.complex64
    assert set(types.values()) == {torch.bfloat16}
    assert torch.equal(model.freqs_cis, before.freqs_cis)
    assert torch.equal(model.inv_freq, before.inv_freq)
    assert model.again.scale is model.scale
    assert model.head.weight is model.table.weight


@pytest.mark.parametrize("precision", ["float32", "pure_bf16"])
@pytest.mark.parametrize("how", ["", "tied", "set data", "set data of another shape"])
def test_every_layout_builds_the_same_types_values_and_tables(precision: str, how: str) -> None:
    asked = ModelConfig(factory="tests.trainer.test_factory_output:Small", factory_args={"how": how})
    train = TrainConfig.model_validate(
        {"global_batch_size": 1, "micro_batch_size": 1, "max_steps": 1, "lr": 0.1, "precision": precision}
    )
    whole = build_model(asked, precision, train.seed, CPU, True)
    sharded = ShardedState(asked, train, CPU, None)
    assert types_of(sharded.model) == types_of(whole)
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, sharded.model.get_buffer(name)), name
    values = sharded._first.values(sharded.base)
    for name, parameter in whole.named_parameters():
        assert torch.equal(values(name, None), parameter), name


# ---- the forward pass
@pytest.mark.parametrize("how", ["", "object", "branch"])
def test_what_training_can_call_is_known_with_the_number_of_its_logits(how: str) -> None:
    found = examined(Small, how)
    assert (found.vocab, found.note) == (VOCAB, "")


@pytest.mark.parametrize(
    "how",
    [
        "tuple",
        "dict",
        "last logits",
        "last logits without a dimension",
        "flat",
        "one more",
        "ids",
        "detached",
        "none",
        "object without",
        "raises by value",
    ],
)
def test_what_training_cannot_use_is_refused(how: str) -> None:
    with pytest.raises(ConfigError) as refused:
        examined(Small, how)
    assert code_of(refused) == (CODE, 2)


@pytest.mark.parametrize("kind", [Needing, KeywordOnly, Without])
def test_a_forward_pass_that_training_cannot_call_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ConfigError) as refused:
        examined(kind)
    assert code_of(refused) == (CODE, 2)


@pytest.mark.parametrize("positions", [1, SEQ_LEN - 1])
@pytest.mark.parametrize("how", ["", "branch"])
def test_samples_longer_than_the_learned_positions_are_refused_with_their_number(
    positions: int, how: str
) -> None:
    with raises(ConfigError, CODE, f" {positions} tokens", f"pack.seq_len={SEQ_LEN}") as refused:
        examined(Small, how, positions, small=False)
    assert code_of(refused) == (CODE, 2)


def test_what_cannot_be_tried_here_is_reported_and_not_refused() -> None:
    large = examined(Small, "branch", small=False)
    assert large.vocab is None
    assert "too large" in large.note
    other = examined(Small, "needs CUDA")
    assert other.vocab is None
    assert "needs CUDA" in other.note


# ---- operations without weights
def test_known_indices_are_compared_with_the_rows_of_what_has_no_values() -> None:
    table, places = torch.empty(5, 2, device="meta"), torch.arange(6)
    with without_weights():
        assert table[places[:5]].shape == (5, 2)
        assert nn.functional.embedding(places[None, :5], table).is_meta
        for look_up in (
            lambda: table[places],
            lambda: table[:, places[1:3]],
            lambda: nn.functional.embedding(places, table),
            lambda: table.index_select(0, places),
            lambda: table.gather(0, places[:, None] * torch.ones(1, 2, dtype=torch.int64)),
            lambda: table[torch.arange(6, device="meta").to(table.device)],
            lambda: table[-places - 1],
        ):
            with pytest.raises(BeyondTableError):
                look_up()


def test_values_of_small_masks_are_known_and_those_of_large_ones_take_no_memory() -> None:
    with without_weights():
        mask = torch.ones(1, 8, device="meta")
        assert bool(mask.all())
        large = torch.ones(1 << 20, 1 << 20, dtype=torch.bool).tril()
        assert large.is_meta
        with pytest.raises(UnknownValueError):
            bool(torch.empty(3, device="meta").sum() > 0)
        with pytest.raises(UnknownValueError):
            torch.zeros(3).add_(torch.empty(3, device="meta"))


def test_random_numbers_of_a_trial_are_not_missing_afterwards() -> None:
    before = torch.get_rng_state()
    with without_weights():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
