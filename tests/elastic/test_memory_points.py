"""The real machine of memory points loses nothing that was sealed, whoever is lost at whatever moment; with
fewer buffers, or other rules, it would.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from orchestrator.records.membership import HeldShard, Source
from orchestrator.records.steps import StateKey
from orchestrator.trainer.memory_points.memory_slots import MemorySlots, Slot
from tests.elastic.memory_point_model import Bounds, search


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """The search keeps everything it makes; looking for garbage in it takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.quick("one of two, re-formed")
@pytest.mark.parametrize(
    ("bounds", "at_least"),
    [
        (Bounds(steps=4), 6_000),
        (Bounds(world=2, steps=3, generations=2), 10_000),
        (Bounds(world=2, steps=3, generations=2, lent=True), 5_000),
        pytest.param(Bounds(world=2, steps=2, generations=3), 40_000, marks=pytest.mark.chaos),
        pytest.param(Bounds(steps=1, generations=2), 20_000, marks=pytest.mark.chaos),
        pytest.param(Bounds(steps=1, generations=2, lent=True), 10_000, marks=pytest.mark.chaos),
        pytest.param(Bounds(world=4, steps=2, lost=2), 8_000, marks=pytest.mark.chaos),
    ],
    ids=[
        "one of three",
        "one of two, re-formed",
        "one of two, lent, re-formed",
        "re-formed twice",
        "three, re-formed",
        "three, lent, re-formed",
        "two of four",
    ],
)
def test_a_loss_at_any_moment_leaves_what_was_sealed(bounds: Bounds, at_least: int):
    lost, states = search(bounds)
    assert not lost
    assert states > at_least, f"only {states} states: the model has lost some of its events"


class InTurn(MemorySlots):
    """Buffers are taken in turn, whatever is sealed."""

    __slots__ = ()

    def choose(self, slots: tuple[Slot, ...], keep: StateKey | None) -> int:
        return max(range(len(slots)), key=lambda n: (not slots[n].whole, -n))


class One(MemorySlots):
    """There is one buffer of a kind, so it is always the one."""

    __slots__ = ()

    def choose(self, slots: tuple[Slot, ...], keep: StateKey | None) -> int:
        return 0 if len(slots) == 1 else super().choose(slots, keep)


class Hasty(MemorySlots):
    """A rank says that the point is whole before its neighbour's copy has come."""

    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        return self.making is not None and any(slot.holds(self.making) for slot in self.own)


class OwnKnowledge(MemorySlots):
    """The receiver spares what it knows itself to be sealed, not what its sender knows."""

    __slots__ = ()

    def arriving(self, copy: HeldShard, keep: StateKey | None) -> tuple[MemorySlots, int]:
        return super().arriving(copy, self.keep)


WRONG = {
    "one own buffer": Bounds(steps=3, slots=One(own=(Slot(),))),
    "one kept buffer": Bounds(steps=3, slots=One(kept=(Slot(),))),
    "buffers in turn": Bounds(steps=3, generations=2, world=2, slots=InTurn()),
    "whole without the neighbour's copy": Bounds(slots=Hasty()),
    "spares what it knows itself": Bounds(steps=3, world=2, slots=OwnKnowledge()),
    "one own buffer, which is lent": Bounds(steps=3, lent=True, slots=One(own=(Slot(),))),
    "buffers in turn, which are lent": Bounds(steps=3, generations=2, world=2, lent=True, slots=InTurn()),
    "keeps what few hold": Bounds(generations=2, world=2, keeps_newest=True),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_loses_a_sealed_memory_point(name: str):
    lost, states = search(WRONG[name])
    assert lost, f"{name}: nothing is lost in {states} states"


def test_a_half_copy_is_on_no_list_and_ends_with_its_generation():
    point = StateKey(attempt=1, generation=1, step=4)
    copy = HeldShard(key=point, shard=0, num_shards=2, source=Source.STAGED)
    slots, number = MemorySlots().entered(None, True).begun(copy)
    assert (number, slots.holdings, slots.is_whole, slots.is_free) == (0, (), False, False)
    assert slots.entered(None, True).own == (Slot(), Slot())
    slots = slots.staged()
    assert slots.holdings == (copy,)
    assert not slots.is_whole, "the neighbour's copy has not come"
    theirs = replace(copy, shard=1, source=Source.NEIGHBOUR)
    slots = slots.arriving(theirs, None)[0].arrived(point)
    assert slots.is_whole
    assert slots.place_of(point, 0) == (Source.STAGED, 0)
    assert slots.place_of(point, 1) == (Source.NEIGHBOUR, 0)
    assert slots.sealed().keep == point


def test_alone_the_own_copy_is_enough():
    point = StateKey(attempt=1, generation=1, step=4)
    copy = HeldShard(key=point, shard=0, num_shards=1, source=Source.STAGED)
    slots = MemorySlots().entered(None, has_neighbour=False).begun(copy)[0].staged()
    assert slots.is_whole
