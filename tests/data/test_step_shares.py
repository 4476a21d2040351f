"""A rank's part of a step as runs gives the very arrays that the whole step has there, whatever is cut where;
and how far steps are drawn ahead of their turn.
"""

from __future__ import annotations

import pickle
from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.feed.buffers import ReplayBuffer
from orchestrator.data.packing.step_samples import PackedRun, Run, StepSamples
from orchestrator.errors import FeedError
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRange
from tests.num_examples import examples
from tests.raising import raises

SEQ_LEN = 6


def tokens(draw: st.DrawFn, num: int) -> tuple[np.ndarray, np.ndarray | None]:
    loss = draw(st.none() | st.lists(st.booleans(), min_size=num, max_size=num))
    return np.arange(1, num + 1, dtype=np.int32), None if loss is None else np.array(loss, np.bool_)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Of some samples, the last of which may be short."""
    num = draw(st.integers(0, 5 * SEQ_LEN))
    starts = draw(st.sets(st.integers(0, num - 1)) if num else st.just(set()))
    ids, loss = tokens(draw, num + 1 if num else 0)
    return Run(tokens=ids, document_starts=np.array(sorted(starts), np.int64), loss=loss)


@st.composite
def packed_runs(draw: st.DrawFn) -> PackedRun:
    """Of packs of one to three stretches, which need not fill them."""
    sizes = draw(st.lists(st.lists(st.integers(1, SEQ_LEN // 3), min_size=1, max_size=3), max_size=5))
    flat = [size for pack in sizes for size in pack]
    ids, loss = tokens(draw, sum(size + 1 for size in flat))
    return PackedRun(
        seq_len=SEQ_LEN,
        tokens=ids,
        sizes=np.array(flat, np.int64),
        firsts=np.array(list(accumulate(map(len, sizes), initial=0)), np.int64),
        loss=loss,
    )


def num_samples(run: Run | PackedRun) -> int:
    return run.num_packs if isinstance(run, PackedRun) else -(-run.num_positions // SEQ_LEN)


@given(runs() | packed_runs(), st.data())
def test_a_run_that_is_cut_has_the_rows_of_the_whole_one(run: Run | PackedRun, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, num_samples(run)))
    start = data.draw(st.integers(0, stop))
    cut = run.cut(start, stop, SEQ_LEN)
    for found, expected in zip(
        cut.rows(0, stop - start, SEQ_LEN), run.rows(start, stop, SEQ_LEN), strict=True
    ):
        assert np.array_equal(found, expected)
    assert cut.nbytes <= run.nbytes


def step_of(of: list[Run], seed: int = 0) -> StepSamples:
    numbers = np.repeat(np.arange(len(of), dtype=np.int32), [num_samples(run) for run in of])
    np.random.default_rng(seed).shuffle(numbers)
    step = StepRange(
        first_sample=40, num_samples=len(numbers), num_tokens=len(numbers) * SEQ_LEN, seq_len=SEQ_LEN
    )
    cursor = Cursor(consumed_samples=40 + len(numbers))
    return StepSamples(step, dict(enumerate(of)), numbers, cursor, False, ())


@settings(max_examples=examples(20, chaos=100))
@given(st.lists(runs(), min_size=1, max_size=3), st.integers(0, 99), st.data())
def test_a_share_becomes_the_slice_after_its_way_to_the_rank(
    of: list[Run], seed: int, data: st.DataObject
) -> None:
    samples = step_of(of, seed)
    stop = data.draw(st.integers(0, samples.step.num_samples))
    start = data.draw(st.integers(0, stop))
    share = pickle.loads(pickle.dumps(samples.share(40 + start, 40 + stop)))  # noqa: S301
    found, expected = share.slice(), samples.slice(40 + start, 40 + stop)
    whole = samples.arrays(0, samples.step.num_samples)
    for name, all_of_them in zip(
        ("source_numbers", "input_ids", "labels", "document_ids"), whole, strict=True
    ):
        array = getattr(found, name)
        assert np.array_equal(array, getattr(expected, name))
        assert np.array_equal(array, all_of_them[start:stop])
        assert array.flags.writeable or not array.size
    assert (found.step, found.start, found.stop) == (samples.step, 40 + start, 40 + stop)
    assert (found.step_digest, found.step_targets) == (samples.digest, samples.targets)


def test_samples_that_are_not_in_the_step_are_refused() -> None:
    run = Run(tokens=np.arange(13, dtype=np.int32), document_starts=np.empty(0, np.int64))
    with raises(FeedError, "feed.outside_step", "[41, 43)", "[40, 42)"):
        step_of([run]).share(41, 43)


def test_what_is_drawn_ahead_leaves_half_of_the_limit_for_going_back() -> None:
    run = Run(tokens=np.arange(2 * SEQ_LEN + 1, dtype=np.int32), document_starts=np.empty(0, np.int64))
    size = step_of([run]).nbytes
    held = ReplayBuffer(Cursor(consumed_samples=0), 12 * size)
    ahead = []
    for number in range(6):
        step = StepRange(first_sample=2 * number, num_samples=2, num_tokens=2 * SEQ_LEN, seq_len=SEQ_LEN)
        cursor = Cursor(consumed_samples=2 * number + 2)
        held.append(step, StepSamples(step, {0: run}, np.zeros(2, np.int32), cursor, False, ()))
        ahead.append(held.has_room_ahead(2))  # the caller has those from the second step on
    assert ahead == [True] * 5 + [False]
    assert held.has_room_ahead(8), "a caller who is further needs fewer of them"
    assert held.first_sample == 0, "nothing was dropped for it"
