"""`data.memory_bytes`: how it is divided, what is refused, and how chunks wait for room."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.feed.buffers import Admission, Flight, chunk_bytes
from orchestrator.data.feed.memory import (
    MemoryNeeds,
    MemoryShares,
    chunk_bytes_at_most,
    divide_memory,
    memory_of,
)
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES
from orchestrator.errors import ConfigError
from orchestrator.records.tokens import PIECE, TokenChunk
from tests.conftest import TinyConfig
from tests.data.making import job, some_texts, spec_of, write_corpus
from tests.num_examples import examples
from tests.raising import raises

GIB = 1 << 30
USUAL = MemoryNeeds(
    num_tokenizers=2,
    num_sources=1,
    num_ranks=8,
    window_bytes=16 << 20,
    replay_bytes=256 << 20,
    step_tokens=1 << 20,
    vocab_size=128_000,
    lists_bytes=1 << 20,
)
NEEDS = st.builds(
    MemoryNeeds,
    num_tokenizers=st.integers(1, 64),
    num_sources=st.integers(1, 200),
    num_ranks=st.integers(1, 1000),
    window_bytes=st.integers(1, GIB),
    replay_bytes=st.integers(1, 4 * GIB),
    step_tokens=st.integers(1, 1 << 26),
    vocab_size=st.integers(256, 300_000),
    lists_bytes=st.integers(0, 1 << 28),
    large_decoders=st.booleans(),
)


def total(shares: MemoryShares) -> int:
    """All parts together, added up by hand."""
    each = shares.tokenizer_bytes + shares.words_bytes + shares.readers_bytes + shares.work_bytes
    of_feeder = shares.feeder_bytes + shares.replay_bytes + shares.answers_bytes + shares.flight_bytes
    return of_feeder + shares.num_tokenizers * each


def least(needs: MemoryNeeds) -> int:
    """What the refusal of one byte names as the least that works."""
    with raises(ConfigError, "feed.too_little_memory", "data.memory_bytes=1 ") as caught:
        divide_memory(needs, 1)
    return int(str(caught.value).partition("set data.memory_bytes=")[2].split()[0])


@given(needs=NEEDS, more=st.integers(0, 64 * GIB))
def test_the_parts_of_any_bound_that_is_taken_are_never_more_than_it(needs: MemoryNeeds, more: int) -> None:
    usual = divide_memory(needs, None).memory_bytes
    for asked in (None, least(needs), least(needs) + more, usual + more):
        shares = divide_memory(needs, asked)
        assert asked is None or shares.memory_bytes == asked
        assert total(shares) <= shares.memory_bytes
        assert shares.replay_bytes >= needs.replay_bytes
        assert shares.flight_bytes >= needs.window_bytes * (needs.num_tokenizers + needs.num_sources)
        assert shares.work_bytes >= 2 * needs.window_bytes
        assert 1 <= shares.open_blocks <= needs.num_sources
        assert shares.open_blocks * shares.decoder_bytes <= shares.readers_bytes


@given(needs=NEEDS, more=st.integers(0, 64 * GIB), step=st.integers(0, 8 * GIB))
def test_a_larger_bound_makes_no_part_smaller(needs: MemoryNeeds, more: int, step: int) -> None:
    small, large = (divide_memory(needs, least(needs) + m) for m in (more, more + step))
    for each in fields(MemoryShares):
        assert getattr(small, each.name) <= getattr(large, each.name), each.name


def test_one_byte_too_little_is_refused_with_both_values_and_the_largest_parts() -> None:
    enough = least(USUAL)
    divide_memory(USUAL, enough)
    values = (
        f"data.memory_bytes={enough - 1} ",
        f" {enough} ",
        "vocabulary of 128,000",
        "data.window_bytes=16777216",
        "data.replay_bytes=268435456",
        "data.num_tokenizers",
        "run.name",
    )
    with raises(ConfigError, "feed.too_little_memory", *values):
        divide_memory(USUAL, enough - 1)


@pytest.mark.parametrize(
    "more",
    [
        {"num_tokenizers": 3},
        {"num_sources": 2},
        {"num_ranks": 9},
        {"window_bytes": 17 << 20},
        {"replay_bytes": 257 << 20},
        {"step_tokens": 2 << 20},
        {"vocab_size": 129_000},
        {"lists_bytes": 2 << 20},
        {"large_decoders": True},
    ],
    ids=str,
)
def test_whatever_grows_needs_more(more: dict[str, Any]) -> None:
    assert least(replace(USUAL, **more)) > least(USUAL)
    assert divide_memory(replace(USUAL, **more), None).memory_bytes > divide_memory(USUAL, None).memory_bytes


def test_the_usual_bound_takes_a_document_of_200_mb_and_more_memory_longer_ones() -> None:
    usual = divide_memory(USUAL, None)
    assert usual.limits.record_bytes >= 200_000_000
    assert divide_memory(USUAL, usual.memory_bytes + 8 * GIB).limits.record_bytes > 600_000_000
    assert divide_memory(USUAL, 1000 * GIB).limits.record_bytes >= MAX_RECORD_BYTES


def test_a_bound_changes_neither_the_runs_identity_nor_its_stream(
    tiny_config: TinyConfig, tmp_path: Any
) -> None:
    write_corpus(tmp_path / "data", some_texts(40), "jsonl", num_files=2)
    free, bound = (
        job(tiny_config, tmp_path / "data", "jsonl", memory_bytes=m, replay_bytes=1) for m in (None, 2 * GIB)
    )
    assert spec_of(free).identity() == spec_of(bound).identity()
    assert memory_of(bound, spec_of(bound)).memory_bytes == 2 * GIB
    assert str(memory_of(bound, spec_of(bound))).startswith("at most 2,048 MiB of memory for the feed")


# ---------------------------------------------------------------------------------------- chunks
def chunk(source: str, num_tokens: int, ends_window: bool, num_entries: int = 1) -> TokenChunk:
    column = np.zeros(num_entries, np.int32)
    return TokenChunk(
        source=source, epoch=0, block=0, window=0, tokens=np.zeros(num_tokens, np.int32), record=column,
        piece=column, num_tokens=column, kind=column + PIECE, last_piece=column, special_texts=column,
        file=column, place=column.astype(np.int64), ends_window=ends_window, ends_block=False,
    )  # fmt: skip


class Line:
    """Slots of one source, of which several are made side by side, taken in their order and drawn: what the
    feeder does with a `Flight`, with a count of bytes of its own.
    """

    def __init__(self, slots: list[list[int]], limit: int) -> None:
        self.slots = [[chunk("a", n, i == len(s) - 1) for i, n in enumerate(s)] for s in slots]
        self.flight, self.limit = Flight(limit), limit
        self.made = [0] * len(slots)  # chunks of each slot that are handed on
        self.next = (0, 0)  # slot and number of the chunk that is taken next
        self.taken: list[TokenChunk] = []
        self.positions = 0  # taken and not drawn

    @property
    def over(self) -> bool:
        return self.next[0] == len(self.slots)

    def buffered(self, _: str) -> int:
        return self.positions

    def there(self) -> int:
        """Bytes that are handed on and not drawn, chunks that are drawn in part counted whole."""
        slot, number = self.next
        coming = [c for s in range(slot, len(self.slots)) for c in self.slots[s][: self.made[s]]]
        left, held = self.positions, 0
        for each in reversed(self.taken):
            if left <= 0:
                break
            held += chunk_bytes(each)
            left -= len(each.tokens)
        return held + sum(map(chunk_bytes, coming[number:]))

    def make(self, slot: int) -> Admission:
        due, needed = self.next[0], self.positions == 0
        found = Admission.YES
        if self.made[slot]:  # the first one of a slot asks nobody
            found = self.flight.goes_on(slot, due, needed, self.buffered)
        if found is Admission.YES:
            self.flight.announce(slot, chunk_bytes(self.slots[slot][self.made[slot]]))
            self.made[slot] += 1
        return found

    def take(self) -> bool:
        slot, number = self.next
        if self.over or number >= self.made[slot]:
            return False
        found = self.slots[slot][number]
        self.flight.take(slot, found)
        self.positions += len(found.tokens)
        self.flight.deliver(found, len(found.tokens))
        if len(found.tokens):  # of another one nothing is kept
            self.taken.append(found)
        self.next = (slot + 1, 0) if found.ends_window else (slot, number + 1)
        return True

    def does(self, act: str) -> bool:
        """Whether there was something to do."""
        now = self.next[0]
        if act == "make":
            return not self.over and self.made[now] < len(self.slots[now]) and self.make(now) is Admission.YES
        if act == "take":
            return self.take()
        drawn, self.positions = self.positions, self.positions - (self.positions + 1) // 2
        return drawn > 0


SIZES = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=examples(20, chaos=100))
@given(slots=SIZES, data=st.data())
def test_chunks_never_take_more_than_their_share_and_all_of_them_come(
    slots: list[list[int]], data: st.DataObject
) -> None:
    largest = max(chunk_bytes(chunk("a", n, False)) for s in slots for n in s)
    line = Line(slots, limit=4 * largest + data.draw(st.integers(0, 1000)))
    while not line.over or line.positions:
        now = line.next[0]
        ahead = [s for s in range(now, min(now + 3, len(slots))) if line.made[s] < len(slots[s])]
        if ahead:
            line.make(data.draw(st.sampled_from(ahead)))
        # whatever was made ahead: the slot that is due goes on, or there is something to take or to draw
        acts = data.draw(st.permutations(["make", "take", "draw"]))
        assert any(line.does(act) for act in acts)
        assert line.there() <= line.limit + 3 * largest, "one more for each that makes them"


def test_a_slot_that_is_begun_again_announces_anew_what_was_not_taken() -> None:
    flight, first, second = Flight(10_000), chunk("a", 100, False), chunk("a", 100, True)
    flight.begin(0)
    for each in (first, second):
        flight.announce(0, chunk_bytes(each))
    flight.take(0, first)
    flight.deliver(first, 100)
    assert flight.held_bytes(lambda _: 100) == 2 * chunk_bytes(first)
    flight.begin(0)  # its tokenizer was killed
    for each in (first, second):
        flight.announce(0, chunk_bytes(each))
    assert flight.held_bytes(lambda _: 100) == 2 * chunk_bytes(first)
    flight.take(0, second)
    flight.deliver(second, 100)
    assert flight.held_bytes(lambda _: 200) == 2 * chunk_bytes(first)
    assert flight.held_bytes(lambda _: 0) == 0


def test_chunks_of_a_window_that_is_packed_as_a_whole_are_held_until_its_last_pack() -> None:
    flight, size = Flight(None), chunk_bytes(chunk("a", 100, False))
    for number, positions in enumerate((0, 0, 256)):
        each = chunk("a", 100, number == 2)
        flight.take(0, each)
        flight.deliver(each, positions)
        assert flight.held_bytes(lambda _, p=positions: p) == (number + 1) * size  # type: ignore[misc]
    assert flight.held_bytes(lambda _: 1) == 3 * size
    assert flight.held_bytes(lambda _: 0) == 0


def test_what_never_fits_is_said_only_where_nothing_can_be_drawn_before_it() -> None:
    flight, large = Flight(1000), chunk("a", 500, False)
    flight.announce(0, chunk_bytes(large))
    assert flight.goes_on(0, 0, True, lambda _: 0) is Admission.LATER, "what is made comes first"
    flight.take(0, large)
    flight.deliver(large, 500)
    assert flight.goes_on(0, 0, False, lambda _: 500) is Admission.LATER
    assert flight.goes_on(1, 0, True, lambda _: 500) is Admission.LATER
    assert flight.goes_on(0, 0, True, lambda _: 500) is Admission.NEVER
    assert flight.goes_on(0, 1, True, lambda _: 500) is Admission.YES, "it was taken whole"
    assert flight.goes_on(0, 0, True, lambda _: 0) is Admission.YES


def test_of_a_chunk_without_tokens_nothing_is_held_once_it_is_delivered() -> None:
    flight, nothing = Flight(None), chunk("a", 0, False, num_entries=1000)
    flight.take(0, nothing)
    assert flight.held_bytes(lambda _: 0) == chunk_bytes(nothing) > 100_000
    flight.deliver(nothing, 0)
    assert flight.held_bytes(lambda _: 0) == 0


def test_no_chunk_is_larger_than_the_largest_that_shares_are_made_for() -> None:
    assert divide_memory(USUAL, least(USUAL)).flight_bytes > 2 * chunk_bytes_at_most()
