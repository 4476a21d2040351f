"""`train.precision`: float32 weights under bfloat16 products, the same bits on any world, and points that
either precision continues."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.launch import Launch, trained_steps
from tests.trainer.losses import loss_sum
from tests.trainer.member import run_to_end, tiny_job
from tests.trainer.states import begun_state

pytestmark = pytest.mark.xdist_group("forked")

CPU = torch.device("cpu")
BF16 = tiny_job(train__precision="bf16")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Launch:
    return run_to_end(tmp_path_factory.mktemp("bf16"), 1, job=BF16)


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_bf16_gives_the_same_bits_on_any_number_of_members_and_other_ones_than_float32(
    tmp_path, alone, world_size
):
    launch = run_to_end(tmp_path, world_size, job=BF16)
    assert launch.last_point().state_digest == alone.last_point().state_digest
    assert trained_steps(launch) == trained_steps(alone)
    exact = run_to_end(tmp_path / "float32", 1)
    assert exact.last_point().state_digest != alone.last_point().state_digest
    for column in (1, 2):  # loss, norm of the gradient
        expected = [row[column] for row in trained_steps(exact)]
        assert [row[column] for row in trained_steps(alone)] == pytest.approx(expected, rel=2e-2)


def test_bf16_under_fast_numerics_trains_nearly_the_same_and_repeats_itself_to_the_last_bit(tmp_path, alone):
    job = tiny_job(train__precision="bf16", train__numerics="fast")
    first, second = (run_to_end(tmp_path / name, 2, job=job) for name in ("first", "second"))
    assert first.last_point().state_digest == second.last_point().state_digest
    expected = [row[1] for row in trained_steps(alone)]
    assert [row[1] for row in trained_steps(first)] == pytest.approx(expected, rel=1e-3)


@pytest.mark.chaos
def test_a_point_of_one_precision_is_continued_in_the_other_and_back(tmp_path, alone):
    points = run_to_end(tmp_path, 2, job=tiny_job(train__max_steps=3, train__precision="bf16")).points
    jobs = (tiny_job(train__max_steps=6), BF16)
    for attempt, job in enumerate(jobs, start=2):
        later = run_to_end(tmp_path, 1, attempt=attempt, point=max(points), job=job)
        points = later.points
    assert later.last_point().key.step == 8
    assert later.last_point().state_digest != alone.last_point().state_digest


def test_the_products_are_bfloat16_and_the_loss_is_float32():
    state = begun_state(BF16.model, BF16.train, CPU, invariant=True)
    state.model.eval()
    tokens = torch.arange(16).reshape(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = state.model(tokens).logits
    assert logits.dtype == torch.bfloat16
    exact = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), tokens.flatten(), reduction="sum"
    )
    loss = loss_sum(state.model, tokens, tokens, "bf16")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert loss_sum(state.model, tokens, tokens, "float32").item() != loss.item()


def moved(precision: str) -> dict[str, float]:
    """The share of each weight that one step at a usual learning rate changes."""
    job = tiny_job(train__precision=precision)
    state = begun_state(job.model, job.train, CPU, invariant=True)
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    tokens = torch.arange(32).reshape(4, 8)
    torch.autograd.backward(loss_sum(state.model, tokens, tokens, precision) / 32)
    state.apply(3e-4, num_units=1)
    return {name: (p != before[name]).double().mean().item() for name, p in state.model.named_parameters()}


def test_a_step_at_a_usual_learning_rate_changes_every_weight_but_no_norm_that_is_bfloat16():
    for name, share in moved("bf16").items():
        assert share > 0.99, name
    norms = [share for name, share in moved("pure_bf16").items() if "norm" in name]
    assert norms == [0.0] * 5, "which is why its name says so"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", torch.float32), ("bf16", torch.float32), ("pure_bf16", torch.bfloat16)],
)
def test_weights_and_moments_are_float32_unless_the_name_says_otherwise(precision, dtype):
    job = tiny_job(train__precision=precision)
    state = begun_state(job.model, job.train, CPU, invariant=True)
    assert {item.tensor.dtype for item in state.items() if item.name != "steps"} == {dtype}
