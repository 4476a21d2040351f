"""Notes of a plan besides its decision: how the batch is divided among workers, and where the data end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.planning.batches import idle_share, micro_batches_per_rank, num_micro_batches
from orchestrator.planning.resume.data_end import KnownEpochs

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig


def world_size_notes(config: JobConfig, saved_at: int | None) -> Iterator[str]:
    """Describes the division of the global batch (data rule 16), for the fewest and the most workers.

    `saved_at`: the number of workers at which the point was saved (None: there is no point).
    """
    train, cluster = config.train, config.cluster
    num_micro = num_micro_batches(train.global_batch_size, train.micro_batch_size)
    for world in sorted({cluster.start_workers, cluster.max_workers}):
        idle = idle_share(num_micro, world)
        yield (
            f"world size {world}: a step of {train.global_batch_size} samples is cut into {num_micro} "
            f"micro-batches of at most {train.micro_batch_size}, up to "
            f"{micro_batches_per_rank(num_micro, world)} for a worker; workers are idle for {idle:.0%} of it"
        )
    worlds = {cluster.start_workers, cluster.max_workers} - {saved_at}
    if saved_at is not None and worlds:
        fast = train.is_fast(cluster.use_gpu)
        # with shards, which `auto` may choose, `numerics: auto` is fast
        open_ = not fast and (train.numerics, train.parallel) == ("auto", "auto")
        same = "stay the same, to the last bit" + (
            ", while train.parallel=auto is replicate" if open_ else ""
        )
        yield (
            f"the point was saved at world size {saved_at}; at another one losses and weights "
            + ("differ in their last bits (numerics: fast)" if fast else same)
        )


def end_notes(epochs: KnownEpochs | None, data_tokens: int | None) -> Iterator[str]:
    """Describes how much the data still hold, if known."""
    if epochs is not None and data_tokens is not None:
        left = f"{data_tokens:,} more tokens" if data_tokens else "no more tokens"
        yield (
            f"the data hold {left}: an epoch of source {epochs.source} has {epochs.tokens:,} tokens, which "
            f"is known since attempt {epochs.attempt} reached the end of the data"
        )
