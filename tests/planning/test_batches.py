"""The arithmetic of steps: every token once and in order, whatever the sequence of shapes, worlds and
stops.
"""

from collections import namedtuple
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning import batches
from orchestrator.records.steps import StepRange

# One stretch of a run between two restarts: its shape, its world, and how many steps it lives.
Stretch = namedtuple("Stretch", "batch seq_len micro world steps")

STRETCHES = st.lists(
    st.builds(
        Stretch,
        batch=st.integers(1, 50),
        seq_len=st.integers(1, 40),
        micro=st.integers(1, 9),
        world=st.integers(1, 9),
        steps=st.integers(0, 6),
    ),
    min_size=1,
    max_size=6,
)
STOPS = st.one_of(st.none(), st.integers(0, 1500))


def trained(
    stretches, max_tokens=None, max_samples=None, *, steps=batches.next_range, ranks=batches.rank_samples
):
    """What each rank of each step trains, in order: ((first sample, stop sample), (first position, stop))."""
    samples, tokens, taken = 0, 0, []
    for stretch in stretches:
        for _ in range(stretch.steps):
            step = steps(samples, tokens, stretch.batch, stretch.seq_len, max_tokens, max_samples)
            if step is None:
                break
            for rank in range(stretch.world):
                start, stop = ranks(step.first_sample, step.num_samples, stretch.micro, rank, stretch.world)
                # where the step's samples [0, n) begin and end in the stream; only the last one may be short
                first, last = (
                    tokens + (step.num_tokens if n == step.num_samples else n * step.seq_len)
                    for n in (start - step.first_sample, stop - step.first_sample)
                )
                if stop > start:
                    taken.append(((start, stop), (first, last)))
            samples, tokens = step.first_sample + step.num_samples, tokens + step.num_tokens
    return samples, tokens, taken


def check_every_token_once(stretches, max_tokens=None, max_samples=None, **parts):
    """The property: samples and positions join without hole or overlap, and a stop is met exactly."""
    samples, tokens, taken = trained(stretches, max_tokens, max_samples, **parts)
    at = (0, 0)
    for (first_sample, stop_sample), (first, stop) in taken:
        assert (first_sample, first) == at, f"after {at} comes {(first_sample, first)}"
        at = (stop_sample, stop)
    assert at == (samples, tokens)
    if max_tokens is not None or max_samples is not None:
        to_the_end = [*stretches, stretches[-1]._replace(steps=1501)]
        samples, tokens, _ = trained(to_the_end, max_tokens, max_samples, **parts)
        assert max_tokens is None or tokens <= max_tokens
        assert max_samples is None or samples <= max_samples
        assert tokens == max_tokens or samples == max_samples


@given(STRETCHES, STOPS, STOPS)
def test_every_token_is_trained_once_for_every_sequence_of_shapes_worlds_and_stops(
    stretches, tokens, samples
):
    check_every_token_once(stretches, tokens, samples)


def flooring_budget(samples, tokens, batch, seq_len, max_tokens=None, max_samples=None):
    """Planted: drops the last, shorter sample of a token budget."""
    step = batches.next_range(samples, tokens, batch, seq_len, max_tokens, max_samples)
    if step is None or step.num_tokens < seq_len:
        return None
    whole = step.num_tokens // seq_len
    return replace(step, num_samples=whole, num_tokens=whole * seq_len)


def rounding_up_budget(samples, tokens, batch, seq_len, max_tokens=None, max_samples=None):
    """Planted: fills the last sample beyond the token budget."""
    step = batches.next_range(samples, tokens, batch, seq_len, max_tokens, max_samples)
    return step and replace(step, num_tokens=step.num_samples * seq_len)


def place_from_a_step_label(samples, tokens, batch, seq_len, max_tokens=None, max_samples=None):
    """Planted: the next sample is counted in whole steps of the new shape, rounded down (OLMo's loader)."""
    first = samples // batch * batch
    return StepRange(first_sample=first, num_samples=batch, num_tokens=batch * seq_len, seq_len=seq_len)


def flooring_ranks(first, num, micro, rank, world):
    """Planted: every rank gets num // world samples, the rest is dropped."""
    return first + rank * (num // world), first + (rank + 1) * (num // world)


def rounding_up_ranks(first, num, micro, rank, world):
    """Planted: every rank gets ceil(num / world) samples, the last ones repeat what is not there."""
    size = -(-num // world)
    return first + rank * size, first + (rank + 1) * size


SHAPE = Stretch(batch=5, seq_len=4, micro=2, world=2, steps=3)


@pytest.mark.parametrize(
    ("parts", "stretches", "max_tokens"),
    [
        ({"steps": flooring_budget}, [SHAPE], 43),
        ({"steps": rounding_up_budget}, [SHAPE], 43),
        ({"steps": place_from_a_step_label}, [SHAPE, SHAPE._replace(batch=7)], None),
        ({"ranks": flooring_ranks}, [SHAPE], None),
        ({"ranks": rounding_up_ranks}, [SHAPE._replace(world=4)], None),
    ],
)
def test_planted_wrong_divisions_are_caught_by_the_same_property(parts, stretches, max_tokens):
    check_every_token_once(stretches, max_tokens)
    with pytest.raises(AssertionError):
        check_every_token_once(stretches, max_tokens, **parts)


def check_micro_batches_ignore_the_world(num, micro, world, ranks=batches.rank_samples):
    """The property: what each rank cuts its samples into are together the micro-batches of the step."""
    whole = [(part.start, part.stop) for part in batches.micro_batches(num, micro)]
    cut = []
    for rank in range(world):
        start, stop = ranks(0, num, micro, rank, world)
        cut += [
            (start + part.start, start + part.stop) for part in batches.micro_batches(stop - start, micro)
        ]
    assert cut == whole


@given(num=st.integers(0, 200), micro=st.integers(1, 20), world=st.integers(1, 20))
def test_micro_batches_do_not_depend_on_the_world_size(num, micro, world):
    check_micro_batches_ignore_the_world(num, micro, world)


def test_a_division_by_samples_instead_of_micro_batches_is_caught():
    def even_samples(first, num, micro, rank, world):
        return first + num * rank // world, first + num * (rank + 1) // world

    with pytest.raises(AssertionError):
        check_micro_batches_ignore_the_world(10, 4, 2, ranks=even_samples)


@given(num=st.integers(0, 300), world=st.integers(1, 40))
def test_ranks_take_contiguous_runs_that_differ_by_at_most_one(num, world):
    runs = [batches.rank_run(num, rank, world) for rank in range(world)]
    assert [i for run in runs for i in run] == list(range(num))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert max(map(len, runs)) == batches.micro_batches_per_rank(num, world)


def test_the_idle_share_counts_the_empty_micro_batches():
    assert batches.idle_share(4, 2) == 0
    assert batches.idle_share(4, 3) == pytest.approx(2 / 6)
    assert batches.idle_share(0, 3) == 0


def test_the_last_micro_batch_is_smaller_where_the_batch_is_no_multiple():
    assert batches.micro_batches(10, 4) == [range(0, 4), range(4, 8), range(8, 10)]
    assert batches.micro_batches(0, 4) == []


def check_label(rebase, consumed, batch, seq_len):
    """The property: the label is the least number of steps of this shape that covers what was consumed."""
    label = rebase(consumed, batch, seq_len)
    assert (label - 1) * batch * seq_len < consumed <= label * batch * seq_len or consumed == label == 0


@given(consumed=st.integers(0, 10**19), batch=st.integers(1, 10**5), seq_len=st.integers(1, 10**6))
def test_a_rebased_label_is_the_number_of_steps_rounded_up_exactly(consumed, batch, seq_len):
    check_label(batches.rebase_step, consumed, batch, seq_len)


@given(
    consumed=st.integers(0, 10**5),
    batch=st.integers(1, 50),
    seq_len=st.integers(1, 50),
    more=st.integers(1, 20),
)
def test_the_last_label_after_a_re_base_is_the_stop_in_steps_or_one_more(consumed, batch, seq_len, more):
    label, size = batches.rebase_step(consumed, batch, seq_len), batch * seq_len
    max_steps, tokens = label + more, consumed
    while step := batches.next_range(0, tokens, batch, seq_len, max_tokens=max_steps * size):
        label, tokens = label + 1, tokens + step.num_tokens
    assert tokens == max_steps * size, "all tokens of these steps are trained"
    assert label == max_steps + (consumed % size > 0)


def test_labels_computed_in_floats_are_caught():
    # MindFormers scales the step by old / new batch and floors: 55 steps of 192 become 14 of 704, exact is 15
    def floor_of_floats(consumed, batch, seq_len):
        return int((consumed / (192 * seq_len)) * (192 / batch))

    def round_up_in_floats(consumed, batch, seq_len):
        return int(-(-(consumed / (batch * seq_len)) // 1))

    assert floor_of_floats(55 * 192 * 8, 704, 8) == 14
    assert batches.rebase_step(55 * 192 * 8, 704, 8) == 15
    with pytest.raises(AssertionError):
        check_label(floor_of_floats, 55 * 192 * 8, 704, 8)
    with pytest.raises(AssertionError):
        check_label(round_up_in_floats, 2**60 + 1, 1, 1)


@given(STRETCHES, st.integers(0, 3000), STOPS)
def test_remaining_counts_are_what_the_steps_then_take(stretches, max_tokens, max_samples):
    samples, tokens, _ = trained(stretches, max_tokens, max_samples)
    shape = stretches[-1]
    left = batches.remaining(samples, tokens, shape.batch, shape.seq_len, max_tokens, max_samples)
    taken = []
    at = samples, tokens
    while step := batches.next_range(*at, shape.batch, shape.seq_len, max_tokens, max_samples):
        taken.append(step)
        at = at[0] + step.num_samples, at[1] + step.num_tokens
    assert left == batches.Remaining(
        tokens=sum(s.num_tokens for s in taken),
        samples=sum(s.num_samples for s in taken),
        steps=len(taken),
    )


def test_what_remains_is_unknown_without_a_stop_and_bounded_by_the_data():
    assert batches.remaining(0, 0, 4, 10) is None
    assert batches.remaining(0, 0, 4, 10, max_tokens=1000, data_tokens=95) == batches.Remaining(
        tokens=95, samples=10, steps=3
    )
    assert batches.next_range(8, 80, 4, 10, max_samples=8) is None
    assert batches.next_range(8, 80, 4, 10, max_tokens=50) is None
