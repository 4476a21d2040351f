"""Computes which samples a step trains, which rank trains them, and the step's label.

All ranges are half-open ranges of integers. The only rounding is upwards, of counts of steps and samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.records.steps import StepRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Remaining:
    """What is left until the first stop: positions, samples, and steps at a given batch size and seq_len.

    All 0: the stop is reached.
    """

    tokens: int
    samples: int
    steps: int


def ceil_div(amount: int, size: int) -> int:
    """Returns `amount / size` rounded up, exact for integers of any size. `size` must be positive."""
    assert size > 0, f"cannot divide {amount} into parts of {size}"
    return -(-amount // size)


def micro_batches(num_samples: int, micro_batch_size: int) -> list[range]:
    """Returns the micro-batches of a step of `num_samples`, as ranges relative to the step's first sample.

    All have `micro_batch_size` samples except the last, which may be smaller. They do not depend on the world
    size: I8.
    """
    assert micro_batch_size > 0, f"micro-batches of {micro_batch_size} samples"
    starts = range(0, num_samples, micro_batch_size)
    return [range(start, min(start + micro_batch_size, num_samples)) for start in starts]


def num_micro_batches(num_samples: int, micro_batch_size: int) -> int:
    """Returns the number of micro-batches that `micro_batches` returns."""
    return ceil_div(num_samples, micro_batch_size)


def rank_run(num_micro: int, rank: int, world_size: int) -> range:
    """Returns the contiguous micro-batches of `rank`.

    Sizes differ by at most one, and larger runs are first. Together the runs are all micro-batches, in order.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    size, larger = divmod(num_micro, world_size)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def micro_batches_per_rank(num_micro: int, world_size: int) -> int:
    """Returns how many micro-batches every rank runs: ceil(num_micro / world_size).

    Missing ones are empty (data rule 16).
    """
    return ceil_div(num_micro, world_size)


def idle_share(num_micro: int, world_size: int) -> float:
    """Returns the share of a step's micro-batches that are empty; 0 for none.

    They are empty because every rank runs equally many.
    """
    slots = micro_batches_per_rank(num_micro, world_size) * world_size
    return (slots - num_micro) / slots if slots else 0.0


def rank_samples(
    first_sample: int, num_samples: int, micro_batch_size: int, rank: int, world_size: int
) -> tuple[int, int]:
    """Returns the samples [start, stop) of `rank` in the step [first_sample, first_sample + num_samples).

    Samples are given by their index in the run. A rank without a micro-batch gets an empty range at the place
    where its samples would have been.
    """
    run = rank_run(num_micro_batches(num_samples, micro_batch_size), rank, world_size)
    start = min(run.start * micro_batch_size, num_samples)
    stop = min(run.stop * micro_batch_size, num_samples)
    return first_sample + start, first_sample + stop


def rebase_step(consumed_tokens: int, global_batch_size: int, seq_len: int) -> int:
    """Returns the step label after `consumed_tokens` positions at this batch size and seq_len.

    It is the number of steps, rounded up.
    """
    return ceil_div(consumed_tokens, global_batch_size * seq_len)


def tokens_left(
    consumed_samples: int, consumed_tokens: int, seq_len: int, max_tokens: int | None, max_samples: int | None
) -> int | None:
    """Returns the positions until the first of the two stops, at `seq_len` from here on.

    None without a stop; 0 if one is reached or passed.
    """
    left = []
    if max_tokens is not None:
        left.append(max_tokens - consumed_tokens)
    if max_samples is not None:
        left.append((max_samples - consumed_samples) * seq_len)
    return max(0, min(left)) if left else None


def next_range(
    consumed_samples: int,
    consumed_tokens: int,
    global_batch_size: int,
    seq_len: int,
    max_tokens: int | None = None,
    max_samples: int | None = None,
) -> StepRange | None:
    """Returns the samples of the next step, from exactly the next unread token; None if a stop is reached.

    A stop inside the step makes it smaller. A token stop that is not a multiple of `seq_len` shortens its
    last sample. The end of the data is unknown here: the feed then returns fewer samples.
    """
    left = tokens_left(consumed_samples, consumed_tokens, seq_len, max_tokens, max_samples)
    num_tokens = global_batch_size * seq_len if left is None else min(left, global_batch_size * seq_len)
    if num_tokens == 0:
        return None
    return StepRange(
        first_sample=consumed_samples,
        num_samples=ceil_div(num_tokens, seq_len),
        num_tokens=num_tokens,
        seq_len=seq_len,
    )


def remaining(
    consumed_samples: int,
    consumed_tokens: int,
    global_batch_size: int,
    seq_len: int,
    max_tokens: int | None = None,
    max_samples: int | None = None,
    data_tokens: int | None = None,
) -> Remaining | None:
    """Returns what repeated calls of `next_range` would still return in total; None without any stop.

    `data_tokens` is the number of positions that the data still hold, if known.
    """
    left = tokens_left(consumed_samples, consumed_tokens, seq_len, max_tokens, max_samples)
    known = [tokens for tokens in (left, data_tokens) if tokens is not None]
    if not known:
        return None
    samples = ceil_div(min(known), seq_len)
    return Remaining(tokens=min(known), samples=samples, steps=ceil_div(samples, global_batch_size))
