"""FSDP2 and HSDP train what one process trains, in any layout, with uneven shards, tied, frozen and unused
weights.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError
from orchestrator.trainer.model.blocks import blocks_of
from orchestrator.trainer.model.build_model import build_model, emptied
from orchestrator.trainer.state.sharded_state import ShardedState
from tests.raising import check_error, raises
from tests.trainer.architectures import tiny
from tests.trainer.member import tiny_job
from tests.trainer.sharded import Odd, Trained, alone, first_weights, in_each_layout, on_ranks, refused_step
from tests.trainer.states import begun_state

pytestmark = pytest.mark.xdist_group("forked")

# (world size, number of shards): replicate, FSDP2, HSDP; later ones after earlier ones in the same processes
LAYOUTS = [(1, None), (2, 1), (3, None), (4, 1), (4, 2), (4, None), (2, None), (3, 2), (2, 2)]
SHARDED = [layout for layout in LAYOUTS if layout[1] != 1]
POISON_MODEL = "tests.trainer.member:PoisonModel"
ODD = {"model__factory": "tests.trainer.sharded:Odd"}  # DDP takes no model with a weight that nobody uses
# transformers keeps the routers in float32
TWO_TYPES = {"model__factory": None, "model__config": tiny("ernie4_5_moe")}


def assert_trained_alike(found: Trained, expected: Trained, tolerance: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=10 * tolerance)
    assert list(found.state) == list(expected.state), "the same tensors in the same order"
    for name, tensor in expected.state.items():
        assert found.state[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    ("changes", "tolerance", "layouts"),
    [
        ({}, 1e-5, LAYOUTS),
        (ODD, 1e-5, SHARDED),
        ({"train__precision": "bf16"}, 5e-3, LAYOUTS[1:6]),
        ({**ODD, "train__precision": "bf16"}, 5e-3, SHARDED[1:3]),
        ({**TWO_TYPES, "train__precision": "pure_bf16"}, 5e-3, SHARDED[1:2]),
    ],
    ids=["usual", "odd", "bf16", "odd in bf16", "float32 beside bf16"],
)
@pytest.mark.quick("usual")
def test_every_layout_trains_what_one_process_trains(changes, tolerance, layouts):
    job = tiny_job(train__numerics="fast", train__micro_batch_size=5, **changes)
    expected = alone(job, 4)
    by_rank = on_ranks(4, in_each_layout, job, layouts, 4)
    assert set(by_rank[0]) == set(layouts)
    for layout, found in by_rank[0].items():
        whole = next(other[layout] for other in by_rank if layout in other and other[layout].state)
        found = replace(found, state=whole.state)  # noqa: PLW2901  which rank 0 of the group has
        assert_trained_alike(found, expected, tolerance)
        for other in by_rank[1:]:
            if layout in other:
                assert other[layout].losses == found.losses
                assert other[layout].norms == found.norms, "the same on every rank"
        if tolerance < 1e-3:
            for name, tensor in expected.state.items():
                assert torch.allclose(found.state[name].double(), tensor.double(), atol=1e-4), name


@pytest.mark.quick("shard-None")
@pytest.mark.parametrize(("parallel", "num_shards"), [("shard", None), ("replicate", 1)])
def test_activations_that_are_computed_again_change_no_bit(parallel: str, num_shards: int | None) -> None:
    job = tiny_job(train__numerics="fast", train__parallel=parallel)
    again = tiny_job(
        train__numerics="fast", train__parallel=parallel, train__activation_checkpointing="blocks"
    )
    kept = on_ranks(2, in_each_layout, job, [(2, num_shards)], 3)[0][2, num_shards]
    found = on_ranks(2, in_each_layout, again, [(2, num_shards)], 3)[0][2, num_shards]
    assert found.losses == kept.losses
    assert all(torch.equal(found.state[name], tensor) for name, tensor in kept.state.items())


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_compiled_blocks_train_what_one_process_trains_also_in_later_generations():
    blocks = {"train__compile": "blocks", "train__activation_checkpointing": "blocks"}
    model = {**(tiny_job().model.config or {}), "attention_dropout": 0.0}  # compiled it draws other numbers
    job = tiny_job(train__numerics="fast", train__parallel="shard", model__config=model, **blocks)
    layouts = [(2, None), (1, None), (2, None), (2, 1), (1, 1)]
    by_rank = on_ranks(2, in_each_layout, job, layouts, 2, limit_s=1500.0)
    expected = alone(tiny_job(train__numerics="fast", model__config=model), 2)
    for layout, trained in by_rank[0].items():
        whole = next(other[layout] for other in by_rank if layout in other and other[layout].state)
        assert_trained_alike(replace(trained, state=whole.state), expected, 1e-4)


# ---------------------------------------------------------------------------------------- blocks
def test_the_blocks_are_the_children_of_the_largest_list_unless_they_share_weights():
    model = Odd()
    assert blocks_of(model) == list(model.blocks)[:2], "the third is the first once more"
    model.blocks[1][0].weight = model.blocks[0][0].weight
    assert blocks_of(model) == []
    model = Odd()
    model.head.weight = nn.Parameter(torch.empty(64, 5))
    model.blocks[0][0].bias = model.frozen
    assert blocks_of(model) == []
    assert blocks_of(nn.Linear(2, 2)) == []


def test_in_place_of_a_block_that_is_only_a_container_what_is_in_it_is_a_block():
    model = Odd()
    inner = [nn.ModuleDict({"one": nn.Linear(5, 9)}), nn.ModuleList([nn.Linear(9, 9), nn.Identity()])]
    model.blocks = nn.ModuleList([inner[0], nn.ModuleList([inner[1]]), nn.Linear(9, 5)])
    assert blocks_of(model) == [inner[0]["one"], inner[1][0], model.blocks[2]]


def test_buffers_that_modules_share_are_one_wherever_the_model_goes():
    odd = ModelConfig(factory=ODD["model__factory"])
    for device, precision in (("cpu", "pure_bf16"), ("meta", "float32")):
        first, second, _ = build_model(odd, precision, 7, torch.device(device), invariant=False).blocks
        assert first.angles is second.angles
        assert first.halves is second.halves


def test_weights_of_a_block_that_is_not_called_stop_the_run_in_words():
    bypassing = {"model__factory": "tests.trainer.sharded:Bypassing"}
    job = tiny_job(train__numerics="fast", train__parallel="shard", **bypassing)
    (error,) = on_ranks(1, refused_step, job)
    check_error(error, "model.weights_not_gathered", "train.parallel=replicate")


def test_compiling_blocks_that_there_are_not_is_refused():
    job = tiny_job(model__factory=POISON_MODEL, train__compile="blocks")
    for refuse in (
        lambda: ShardedState(job.model, job.train, torch.device("cpu"), None),
        lambda: begun_state(job.model, job.train, torch.device("cpu"), False),
    ):
        with raises(ConfigError, "model.no_blocks", "train.compile=blocks"):
            refuse()


def test_a_skeleton_has_no_weights_its_own_buffers_and_the_same_ties():
    bare = emptied(Odd(), torch.device("meta"))
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert bare.head.weight is bare.table.weight
    assert not bare.frozen.requires_grad
    assert torch.equal(bare.scale, torch.full((5,), 2.0))


@pytest.mark.quick("config-in order", "pretrained-by name", "resizing factory-in order", "init_from-by name")
# ---------------------------------------------------------------------------------------- first weights
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "in order"])
@pytest.mark.parametrize("how", ["config", "pretrained", "init_from", "resizing factory"])
def test_the_first_weights_are_those_of_replicate_bit_for_bit(tmp_path, how, by_name):
    job = replace(tiny_job(), weights_by_name=by_name)
    if how in ("pretrained", "init_from"):
        build_model(job.model, "float32", 7, torch.device("cpu"), invariant=False).save_pretrained(tmp_path)
    model = {
        "config": job.model,
        "pretrained": ModelConfig(pretrained=str(tmp_path)),
        "init_from": job.model.model_copy(update={"init_from": str(tmp_path)}),
        "resizing factory": ModelConfig(factory="tests.trainer.sharded:resizing"),
    }[how]
    expected = begun_state(model, job.train, torch.device("cpu"), False, by_name)
    wanted = {item.name: item.tensor for item in expected.items()}
    (found,) = on_ranks(1, first_weights, replace(job, model=model))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
