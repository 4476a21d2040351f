"""Computes the digest of a group's weights, independent of how its state is divided."""

from __future__ import annotations

from orchestrator.planning.state.weights_sum import weights_sum
from orchestrator.trainer.comm.group import Group
from orchestrator.trainer.loading.loading import digest_of, share_sum
from orchestrator.trainer.state.train_state import TrainState


def group_digest(group: Group, state: TrainState) -> str | None:
    """Returns the digest of the weights; None on a rank that does not need it.

    Every rank must call it: of a sharded state each rank contributes the sum of its rows. Raises
    `GenerationEnded` as a collective does.
    """
    rank = group.view.rank
    if state.sharded:
        own = share_sum(state.items(), state.layout, rank)
        rows = group.gather([own >> at & 0xFFFFFFFF for at in range(0, 160, 32)], "a digest of the weights")
        sums = [sum(part << 32 * number for number, part in enumerate(row)) for row in rows]
        return weights_sum(sums)
    return digest_of(state.items()) if rank == 0 else None
