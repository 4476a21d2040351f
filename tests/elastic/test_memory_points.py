"""How many buffers memory points take, so that any loss leaves a complete state: two own, two kept."""

from __future__ import annotations

import pytest

from tests.elastic.memory_point_model import Bounds, search


@pytest.mark.parametrize(
    ("bounds", "at_least"),
    [
        (Bounds(), 15_000),
        pytest.param(Bounds(steps=4), 150_000, marks=pytest.mark.chaos),
        pytest.param(Bounds(world=4, lost=2), 150_000, marks=pytest.mark.chaos),
    ],
    ids=["one of three", "one of three, four steps", "two of four"],
)
def test_two_own_and_two_kept_buffers_survive_a_loss_at_any_moment(bounds: Bounds, at_least: int):
    lost, states = search(bounds)
    assert not lost
    assert states > at_least, f"only {states} states: the model has lost some of its events"


@pytest.mark.parametrize(
    "bounds",
    [Bounds(steps=3, own=1), Bounds(steps=3, kept=1), Bounds(steps=3, in_turn=True)],
    ids=["one own buffer", "one kept buffer", "buffers in turn"],
)
def test_fewer_buffers_or_buffers_taken_in_turn_lose_the_memory_point(bounds: Bounds):
    lost, _ = search(bounds)
    assert lost
