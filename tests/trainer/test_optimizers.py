"""Optimizers give the bits of torch's own, whole and in shards, and points that any layout loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from orchestrator.checkpoint.points.store import CommittedFiles, RunStore
from orchestrator.errors import ConfigError, ResumePointError, TrainingError
from orchestrator.history import sentences
from orchestrator.planning.state.state_layout import layout_of
from orchestrator.storage.files import Storage
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.optimizer.optimizer_rows import owners_of
from orchestrator.trainer.optimizer.optimizers import group_notes, muon_matrices, settings_of
from orchestrator.trainer.state.sharded_state import ShardedState
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import Continues, Item, load
from tests.raising import raises
from tests.trainer.member import members, tiny_job
from tests.trainer.optimizers import Momentum
from tests.trainer.saved_states import KEY, commit_state
from tests.trainer.sharded import (
    CPU,
    Odd,
    Trained,
    alone,
    formed,
    gathered,
    in_each_layout,
    on_ranks,
    view_of,
)
from tests.trainer.states import begun_state

pytestmark = pytest.mark.xdist_group("forked")

LR = 0.01
ODD = {"model__factory": "tests.trainer.sharded:Odd"}
JOBS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"train__optimizer": "sgd", "train__weight_decay": 0.01},
    "sgd with momentum": {
        "train__optimizer": "sgd",
        "train__optimizer_args": {"momentum": 0.9, "nesterov": True},
    },
    "sgd with dampening": {
        "train__optimizer": "sgd",
        "train__optimizer_args": {"momentum": 0.9, "dampening": 0.5},
    },
    "lion": {"train__optimizer": "lion", "train__optimizer_args": {"betas": [0.8, 0.95]}},
    "muon": {"train__optimizer": "muon"},
    "muon as its author wrote it": {
        "train__optimizer": "muon",
        "train__optimizer_args": {"adjust_lr_fn": "original", "nesterov": False, "ns_steps": 3},
    },
    "adafactor": {"train__optimizer": "adafactor", "train__optimizer_args": {"d": 1.5}},
}


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The gradient of a whole parameter in a step."""
    seed = sum(map(ord, name)) + 1000 * step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def set_gradient(item: Item, step: int) -> None:
    """Gives the rows of a parameter those of its gradient."""
    rows = gradient(item.name, item.whole.shape, step)
    rows = rows[item.first_row : item.first_row + len(item.tensor)] if item.whole.shape else rows
    item.tensor.grad = rows.clone().to(item.tensor.dtype)


def stepped(job: TrainJob, steps: int = 3, state: TrainState | None = None) -> TrainState:
    """A whole state after steps with known gradients."""
    state = state or begun_state(job.model, job.train, CPU, invariant=True)
    first = state.optimizer_steps
    for step in range(first, first + steps):
        for item in state._rows.trained.values():
            set_gradient(item, step)
        state.apply(LR, num_units=1)
    return state


# ----------------------------------------------------------------------------------- torch's own, to the bit
def torchs_own(name: str, parameters: dict[str, nn.Parameter], body: set[str]) -> Iterator[Any]:
    """torch's optimizers as one would write them without us."""
    matrices = [p for n, p in parameters.items() if p.ndim >= 2 and n not in body]
    rest = [p for n, p in parameters.items() if p.ndim < 2]
    whole = [p for n, p in parameters.items() if n in body]
    if name.startswith("muon"):
        arguments = {"adjust_lr_fn": "match_rms_adamw"}
        if name != "muon":
            arguments = {"adjust_lr_fn": "original", "nesterov": False, "ns_steps": 3}
        yield torch.optim.Muon(whole, lr=LR, weight_decay=0.1, **arguments)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if name == "sgd":
        groups[0]["weight_decay"] = 0.01
        yield torch.optim.SGD(groups, lr=LR)
    elif name == "sgd with momentum":
        yield torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True)
    elif name == "sgd with dampening":
        yield torch.optim.SGD(groups, lr=LR, momentum=0.9, dampening=0.5)
    elif name == "adafactor":
        yield torch.optim.Adafactor(groups, lr=LR, d=1.5, foreach=False)
    else:
        yield torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


@pytest.mark.parametrize("name", [name for name in JOBS if name != "lion"])
def test_the_bits_are_those_of_torchs_own_optimizer(name: str) -> None:
    job = tiny_job(**JOBS[name])
    found = stepped(job)
    model = begun_state(job.model, job.train, CPU, invariant=True).model
    parameters = dict(model.named_parameters())
    body = {n for n in parameters if "layers" in n and parameters[n].ndim == 2} if "muon" in name else set()
    optimizers = list(torchs_own(name, parameters, body))
    for step in range(3):
        for own, parameter in parameters.items():
            parameter.grad = gradient(own, tuple(parameter.shape), step)
        for optimizer in optimizers:
            optimizer.step()
    ours = dict(found.model.named_parameters())
    assert ours.keys() == parameters.keys()
    for own, parameter in parameters.items():
        assert torch.equal(ours[own], parameter), own


def test_lion_is_the_algorithm_of_its_paper() -> None:
    found = stepped(tiny_job(**JOBS["lion"]))
    weights = dict(stepped(tiny_job(**JOBS["lion"]), 0).model.named_parameters())
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(3):
        for name, weight in weights.items():
            g, m, decay = gradient(name, tuple(weight.shape), step), momenta[name], 0.1 * (weight.ndim >= 2)
            update = torch.sign(0.8 * m + 0.2 * g) + decay * weight.detach()
            weights[name] = weight.detach() - LR * update
            momenta[name] = 0.95 * m + 0.05 * g
    for name, weight in found.model.named_parameters():
        torch.testing.assert_close(weight.detach(), weights[name], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------- in shards
def steps_in_shards(
    rank: int, store: TCPStore, job: TrainJob, layouts: list[tuple[int, int | None]]
) -> dict[Any, Any]:
    """The whole state after three steps with known gradients, in each layout."""
    found = {}
    for generation, (world_size, num_shards) in enumerate(layouts, 1):
        if rank >= world_size:
            continue
        state = ShardedState(job.model, job.train, CPU, num_shards)
        with formed(store, view_of(rank, world_size, generation)) as group, state.within():
            state.form(group)
            state.initialise()
            state.formed()
            for step in range(3):
                for item in state._rows.trained.values():
                    set_gradient(item, step)
                state.prepare(LR)
                state.apply(LR, num_units=1)
            found[world_size, num_shards] = gathered(state, group)
    return found


@pytest.mark.quick("lion-odd", "muon-llama", "sgd with momentum-odd", "adafactor-odd")
@pytest.mark.parametrize("model", [{}, ODD], ids=["llama", "odd"])
@pytest.mark.parametrize("name", ["sgd with momentum", "lion", "muon", "adafactor"])
def test_shards_step_to_the_bits_of_one_process(name: str, model: dict[str, str]) -> None:
    job = tiny_job(**JOBS[name], **model)
    whole = stepped(job)
    expected = {(item.group, item.name): item.tensor for item in whole.items()}
    moments = whole.optimizer_state().get("exp_avg", {})
    by_adamw = {prefix + own for own in moments for prefix in ("", "exp_avg.", "exp_avg_sq.")}
    layouts: list[tuple[int, int | None]] = [(1, None), (4, None), (3, None), (4, 2)]
    (found, *_) = on_ranks(4, steps_in_shards, job, layouts)
    assert set(found) == set(layouts)
    for layout, state in found.items():
        assert list(state) == list(expected), "the same tensors in the same order"
        for own, tensor in expected.items():
            if own[1] in by_adamw:  # torch's fused AdamW rounds ends of a row otherwise than its middle
                torch.testing.assert_close(state[own], tensor, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(state[own], tensor), (layout, own)


@pytest.mark.chaos
def test_shards_average_and_step_bfloat16_to_the_bits_of_one_process() -> None:
    layouts: list[tuple[int, int | None]] = [(3, None), (4, 2)]
    for name in ("muon", "lion"):
        groups = [{"match": ".", "optimizer": "lion"}] if name == "lion" else []
        job = tiny_job(
            **ODD, **JOBS[name], train__ema=0.75, train__precision="pure_bf16", train__param_groups=groups
        )
        whole = stepped(job)
        expected = {(item.group, item.name): item.tensor for item in whole.items()}
        by_adamw = {*whole.optimizer_state().get("exp_avg", {})} if name == "muon" else set()
        (found, *_) = on_ranks(4, steps_in_shards, job, layouts)
        for layout, state in found.items():
            assert list(state) == list(expected)
            for own, tensor in expected.items():
                if own[1].removeprefix("exp_avg.").removeprefix("exp_avg_sq.") not in by_adamw:
                    assert torch.equal(state[own], tensor), (name, layout, own)


@pytest.mark.quick("muon")
@pytest.mark.parametrize("name", ["sgd with momentum", "lion", "muon", "adafactor"])
def test_every_layout_trains_what_one_process_trains(name: str) -> None:
    job = tiny_job(train__numerics="fast", train__micro_batch_size=5, **JOBS[name])
    expected = alone(job, 4)
    layouts: list[tuple[int, int | None]] = [(3, None), (4, 1), (4, 2), (2, None)]
    by_rank: list[dict[Any, Trained]] = on_ranks(4, in_each_layout, job, layouts, 4)
    for layout, found in by_rank[0].items():
        assert found.losses == pytest.approx(expected.losses, rel=1e-3), layout


def test_owners_are_balanced_by_cost_and_own_every_parameter_once() -> None:
    shapes = [(64, 64)] * 5 + [(128, 64), (64,), (3, 16, 16)]
    owned = owners_of(shapes, 3)
    assert sorted(number for each in owned for number in each) == list(range(len(shapes)))
    cost = {(64, 64): 64**3, (128, 64): 128 * 64 * 64, (64,): 64, (3, 16, 16): 3 * 16**3}
    loads = [sum(cost[shapes[number]] for number in each) for each in owned]
    assert max(loads) <= 4 / 3 * max(*cost.values(), sum(loads) / 3)
    assert owners_of([], 2) == [[], []]


@pytest.mark.quick("adafactor", "muon", "adamw", "lion", "sgd with momentum")
# ---------------------------------------------------------------------------------------------------- points
@pytest.mark.parametrize("name", [*JOBS])
def test_a_point_continues_the_optimizer_to_the_bit(tmp_path: Path, name: str) -> None:
    job = tiny_job(**JOBS[name])
    state = stepped(job, 2)
    commit_state(RunStore(Storage(str(tmp_path))), KEY, layout_of(1, 1), [state.items()], optimizer_steps=2)
    other = stepped(job, 5)
    load(other.items(), KEY.point_name, CommittedFiles(Storage(str(tmp_path))))
    other.filled()
    assert other.optimizer_steps == 2
    assert stepped(job, 2, other).digest() == stepped(job, 4).digest()


def test_another_optimizer_is_refused_unless_its_state_begins_anew(tmp_path: Path) -> None:
    before = stepped(tiny_job())
    commit_state(RunStore(Storage(str(tmp_path))), KEY, layout_of(1, 1), [before.items()], optimizer_steps=3)
    files = CommittedFiles(Storage(str(tmp_path)))
    for name in ("sgd", "sgd with momentum", "lion", "muon", "adafactor"):
        job = tiny_job(**JOBS[name])
        state = stepped(job, 1)
        with raises(ResumePointError, "point.other_optimizer", KEY.point_name, "exp_avg", "resume.optimizer"):
            load(state.items(), KEY.point_name, files)
        load(state.items(), KEY.point_name, files, Continues(reset_optimizer=True))
        state.filled()
        assert state.optimizer_steps == 0
        theirs = {item.name: item.tensor for item in before.items() if item.group == "model"}
        for item in state.items():
            expected = theirs[item.name] if item.group == "model" else torch.zeros_like(item.tensor)
            assert torch.equal(item.tensor, expected), (name, item.name)


# ------------------------------------------------------------------------------------------ averaged weights
def averages_of(state: TrainState) -> dict[str, Tensor]:
    return {item.name: item.tensor for item in state.items() if item.group == "ema"}


@pytest.mark.parametrize("precision", ["float32", "pure_bf16"])
def test_averages_of_trained_weights_decay_by_step_in_float32(precision: str) -> None:
    job = tiny_job(**ODD, train__ema=0.75, train__precision=precision)
    state = stepped(job, 0)
    weights = state._rows.trained
    assert "frozen" not in weights
    expected = {name: item.tensor.detach().float().clone() for name, item in weights.items()}
    for _ in range(3):
        stepped(job, 1, state)
        expected = {n: 0.75 * expected[n] + 0.25 * weights[n].tensor.detach().float() for n in expected}
    found = averages_of(state)
    assert found.keys() == expected.keys()
    for name, average in found.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-7)
    state.apply(LR, num_units=0)
    assert all(torch.equal(found[name], average) for name, average in averages_of(state).items())


def test_averages_that_are_set_later_begin_with_the_weights_and_may_be_left_out(tmp_path: Path) -> None:
    files = CommittedFiles(Storage(str(tmp_path)))
    plain, averaged = tiny_job(), tiny_job(train__ema=0.5)
    before = stepped(plain)
    commit_state(RunStore(Storage(str(tmp_path))), KEY, layout_of(1, 1), [before.items()], optimizer_steps=3)
    state = stepped(averaged, 1)
    load(state.items(), KEY.point_name, files)
    state.filled()
    weights = {name: item.tensor for name, item in state._rows.trained.items()}
    assert all(torch.equal(average, weights[name]) for name, average in averages_of(state).items())
    assert state.optimizer_steps == 3
    later = dataclasses.replace(KEY, step=2)
    commit_state(RunStore(Storage(str(tmp_path))), later, layout_of(1, 1), [state.items()], optimizer_steps=3)
    without = stepped(plain, 1)
    load(without.items(), later.point_name, files)
    without.filled()
    assert without.digest() == before.digest()


# ------------------------------------------------------------------------------------------- which has which
def test_muon_trains_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    job = tiny_job(train__optimizer="muon")
    state = begun_state(job.model, job.train, CPU, invariant=True)
    settings = settings_of(state.model, job.train)
    chosen = {name for name, setting in settings.items() if setting.kind.name == "muon"}
    assert chosen == {n for n, p in state.model.named_parameters() if p.ndim == 2 and "layers" in n}
    assert {s.kind.name for n, s in settings.items() if n not in chosen} == {"adamw"}
    notes = "\n".join(group_notes(state.model, job.train))
    assert "muon trains 14 parameters" in notes
    assert "adamw trains 6 parameters" in notes


def test_muon_leaves_out_embeddings_heads_and_frozen_weights_of_any_model() -> None:
    model = Odd()
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in muon_matrices(model)} == {
        f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in (0, 2)
    }
    flat = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    assert [id(p) for p in muon_matrices(flat)] == [id(flat[1].weight)]


def test_entries_of_param_groups_set_rate_decay_and_optimizer_by_name() -> None:
    groups = [
        {"match": "norm", "weight_decay": 0.5},
        {"match": r"layers\.0\..*proj", "lr_scale": 0.5, "optimizer": "sgd"},
        {"match": "lm_head", "lr_scale": 2.0},
    ]
    job = tiny_job(train__param_groups=groups)
    model = build_model(job.model, "float32", 0, CPU, invariant=True)
    settings = settings_of(model, job.train)
    norm = settings["model.layers.0.input_layernorm.weight"]
    assert (norm.kind.name, norm.lr_scale, norm.weight_decay) == ("adamw", 1.0, 0.5)
    inner = settings["model.layers.0.mlp.up_proj.weight"]
    assert (inner.kind.name, inner.lr_scale, inner.weight_decay) == ("sgd", 0.5, 0.1)
    tied = settings["model.embed_tokens.weight"]
    assert tied.lr_scale == 2.0, "an entry may name any of the names of tied weights"
    notes = group_notes(model, job.train)
    assert any("train.param_groups.2 (match=lm_head, lr_scale=2.0) matches 1 parameter" in n for n in notes)
    assert any("no entry matches 7 parameters" in note for note in notes), notes


def test_a_parameter_has_the_learning_rate_and_decay_of_its_entry() -> None:
    groups = [{"match": "up_proj", "lr_scale": 0.25, "weight_decay": 0.0}]
    plain, scaled = stepped(tiny_job(), 1), stepped(tiny_job(train__param_groups=groups), 1)
    before = dict(stepped(tiny_job(), 0).model.named_parameters())
    for (name, one), two in zip(plain.model.named_parameters(), scaled.model.parameters(), strict=True):
        if "up_proj" not in name:
            assert torch.equal(one, two), name
            continue
        moved = 0.25 * (one - before[name] * (1 - LR * 0.1))
        torch.testing.assert_close(two.detach(), (before[name] + moved).detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("groups", "code", "values"),
    [
        ([{"match": "no_such"}], "optimizer.no_match", ["no_such", "embed_tokens"]),
        ([{"match": "norm"}, {"match": "layers"}], "optimizer.two_matches", ["'norm'", "'layers'"]),
        ([{"match": "norm", "optimizer": "muon"}], "optimizer.shape", ["(16,)", "layernorm"]),
    ],
)
def test_entries_that_cannot_be_carried_out_are_refused(
    groups: list[Any], code: str, values: list[str]
) -> None:
    job = tiny_job(train__param_groups=groups)
    with raises(ConfigError, code, *values):
        begun_state(job.model, job.train, CPU, invariant=True)


def test_an_entry_that_matches_frozen_parameters_alone_matches_none() -> None:
    job = tiny_job(**ODD, train__param_groups=[{"match": "frozen"}])
    with raises(ConfigError, "optimizer.no_match", "frozen"):
        begun_state(job.model, job.train, CPU, invariant=True)


# ----------------------------------------------------------------------------------------------- plug-ins
OF_TESTS = "tests.trainer.optimizers:"
PLUG_INS = ["Momentum", "RowsMomentum", "Normed"]


def plugged(name: str, **changes: Any) -> TrainJob:
    return tiny_job(train__optimizer=OF_TESTS + name, **changes)


@pytest.mark.parametrize("name", PLUG_INS)
def test_a_point_continues_a_plug_in_to_the_bit(tmp_path: Path, name: str) -> None:
    job = plugged(name)
    state = stepped(job, 2)
    commit_state(RunStore(Storage(str(tmp_path))), KEY, layout_of(1, 1), [state.items()], optimizer_steps=2)
    other = stepped(job, 5)
    load(other.items(), KEY.point_name, CommittedFiles(Storage(str(tmp_path))))
    other.filled()
    assert stepped(job, 2, other).digest() == stepped(job, 4).digest()


def test_a_plug_in_gives_the_bits_of_its_optimizer() -> None:
    found = stepped(plugged("Momentum", train__optimizer_args={"decay": 0.7}))
    job = tiny_job()
    model = begun_state(job.model, job.train, CPU, invariant=True).model
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        optimizer = Momentum([parameter], LR, 0.1 if parameter.ndim >= 2 else 0.0, decay=0.7)
        for step in range(3):
            parameter.grad = gradient(name, tuple(parameter.shape), step)
            optimizer.step()
    for name, parameter in found.model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


def test_a_class_of_torch_as_a_plug_in_gives_the_bits_of_the_class() -> None:
    found = stepped(plugged("adam", train__optimizer_args={"betas": [0.8, 0.9], "amsgrad": True}))
    job = tiny_job()
    model = begun_state(job.model, job.train, CPU, invariant=True).model
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if (p.ndim >= 2) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.9), amsgrad=True, foreach=False)
    for step in range(3):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, tuple(parameter.shape), step)
        optimizer.step()
    for name, parameter in found.model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


@pytest.mark.parametrize("name", PLUG_INS)
@pytest.mark.quick("Momentum")
def test_a_plug_in_steps_shards_to_the_bits_of_one_process(name: str) -> None:
    job = plugged(name, **ODD)
    expected = {(item.group, item.name): item.tensor for item in stepped(job).items()}
    layouts: list[tuple[int, int | None]] = [(3, None), (4, 2)]
    (found, *_) = on_ranks(4, steps_in_shards, job, layouts)
    for layout, state in found.items():
        assert list(state) == list(expected)
        for own, tensor in expected.items():
            assert torch.equal(state[own], tensor), (layout, own)


@pytest.mark.parametrize(
    ("name", "changes", "code", "values"),
    [
        ("NoSuch", {}, "optimizer.not_callable", ["NoSuch", "pkg.module:function"]),
        ("without_lr", {}, "optimizer.not_callable", ["lr"]),
        ("Momentum", {"train__optimizer_args": {"speed": 1}}, "optimizer.not_callable", ["speed"]),
        ("raises_an_error", {}, "optimizer.fails", ["not today", "shape"]),
        ("returns_none", {}, "optimizer.not_callable", ["NoneType"]),
        ("GlobalNorm", {}, "optimizer.couples_parameters", ["GlobalNorm"]),
        ("NormedByRows", {}, "optimizer.not_elementwise", ["elementwise"]),
        ("Hiding", {}, "optimizer.state", ["num_steps"]),
        ("HidingTensor", {}, "optimizer.state", ["group.steps"]),
        ("Growing", {}, "optimizer.state", ["gradient2"]),
        ("Listing", {}, "optimizer.state", ["all", "list"]),
        ("Normed", {"train__weight_decay": 0.3}, "optimizer.no_weight_decay", ["0.3"]),
    ],
)
def test_a_plug_in_that_cannot_be_saved_or_divided_is_refused(
    name: str, changes: dict[str, Any], code: str, values: list[str]
) -> None:
    job = plugged(name, **changes)
    with raises(ConfigError, code, *values):
        begun_state(job.model, job.train, CPU, invariant=True)


@pytest.mark.parametrize(
    ("what", "name"), [("tensor", "late"), ("flag", "signed"), ("type", "mean"), ("group", "group.decay")]
)
def test_a_plug_in_that_later_keeps_something_else_ends_the_run(what: str, name: str) -> None:
    state = stepped(plugged("Late", train__optimizer_args={"what": what}))
    with raises(TrainingError, "optimizer.state", "Late", name):
        stepped(plugged("Late", train__optimizer_args={"what": what}), 1, state)


def test_a_plug_in_that_raises_in_a_step_ends_the_run_by_name_and_line(tmp_path: Path) -> None:
    values = ["FailsInItsThirdStep", "step 3", "RuntimeError: not a third time", "optimizers.py:", "in step)"]
    state = stepped(plugged("FailsInItsThirdStep"), 2)
    with raises(TrainingError, "optimizer.fails", *values):
        stepped(plugged("FailsInItsThirdStep"), 1, state)
    with members(tmp_path, "ab", job=plugged("FailsInItsThirdStep")) as group:
        group.join_all()
    status = group.launch.wait_for_end()
    assert (status.ended, status.code) == ("failed", "optimizer.fails")
    assert [value for value in values if value not in status.reason] == []
    assert sentences.untold(status.lost, status.reason) == []


@pytest.mark.quick("NAdam", "Rprop", "Adagrad", "ASGD")
@pytest.mark.parametrize(
    "name", ["RAdam", "NAdam", "Adamax", "Adagrad", "Rprop", "RMSprop", "ASGD", "Adadelta", "Adam"]
)
def test_optimizers_of_torch_can_be_named_and_continue_to_the_bit(tmp_path: Path, name: str) -> None:
    job = tiny_job(train__optimizer=f"torch.optim:{name}")
    found = stepped(job, 2)
    commit_state(RunStore(Storage(str(tmp_path))), KEY, layout_of(1, 1), [found.items()], optimizer_steps=2)
    state = stepped(job, 1)
    load(state.items(), KEY.point_name, CommittedFiles(Storage(str(tmp_path))))
    state.filled()
    stepped(job, 2, state)
    model = begun_state(tiny_job().model, tiny_job().train, CPU, invariant=True).model
    make: Any = getattr(torch.optim, name)
    for own, parameter in model.named_parameters():
        decay = {} if name == "Rprop" else {"weight_decay": 0.1 if parameter.ndim >= 2 else 0.0}
        optimizer = make([parameter], lr=LR, **decay)
        for step in range(4):
            parameter.grad = gradient(own, tuple(parameter.shape), step)
            optimizer.step()
        assert torch.equal(dict(state.model.named_parameters())[own], parameter), own
