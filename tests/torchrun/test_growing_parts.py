"""Ranks under torchrun wait for a slow part of a save as long as it grows, by the test's clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import HashStore

from orchestrator.records.steps import StateKey
from orchestrator.torchrun.growing_parts import TELL_EVERY_S, Growth, place_of, wait_while_growing

KEY = StateKey(attempt=1, generation=1, step=5)
VOTE = f"{place_of(KEY)}/1"
LIMIT_S = 600.0


class Clock:
    """Time passes where it is waited; `meanwhile` is called then."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()


def wait(store: HashStore, clock: Clock) -> None:
    wait_while_growing(store, [VOTE], KEY, 2, LIMIT_S, clock, clock.wait)


def test_a_part_that_grows_is_waited_for_however_long_it_takes() -> None:
    store, clock = HashStore(), Clock()
    growth = Growth(store, 1, clock)

    def write() -> None:
        growth.tell(KEY, int(clock.now_s / (LIMIT_S / 2)))
        if clock.now_s >= 5 * LIMIT_S:
            store.set(VOTE, "vote")

    clock.meanwhile = write
    wait(store, clock)
    assert clock.now_s == pytest.approx(5 * LIMIT_S, abs=1.0)


def test_a_part_that_grows_no_more_is_waited_for_no_longer_than_the_limit() -> None:
    store, clock = HashStore(), Clock()
    growth, other = Growth(store, 1, clock), StateKey(attempt=1, generation=1, step=6)
    clock.meanwhile = lambda: growth.tell(KEY if clock.now_s <= 90.0 else other, int(clock.now_s))
    with pytest.raises(TimeoutError, match=f"nothing under {VOTE}$"):
        wait(store, clock)
    look_s = LIMIT_S / 20
    assert 90.0 + LIMIT_S <= clock.now_s <= 90.0 + LIMIT_S + 2 * look_s + 1.0


def test_a_vote_that_is_there_is_waited_for_not_at_all() -> None:
    store, clock = HashStore(), Clock()
    store.set(VOTE, "vote")
    wait(store, clock)
    assert clock.now_s == 0.0


def test_a_rank_does_not_ask_the_store_at_every_look() -> None:
    store, clock = HashStore(), Clock()
    growth, place = Growth(store, 0, clock), f"{place_of(KEY)}/grown/0"
    for now_s, said in ((0.0, b"1"), (TELL_EVERY_S - 0.1, b"1"), (TELL_EVERY_S, b"3")):
        clock.now_s = now_s
        growth.tell(KEY, 1 + int(now_s) // 2)
        assert store.get(place) == said
