"""What the weights of a group are, in one digest, however its state is divided."""

from __future__ import annotations

from orchestrator.planning.weights_sum import weights_sum
from orchestrator.trainer.group import Group
from orchestrator.trainer.loading import digest_of, share_sum
from orchestrator.trainer.state import TrainState


def group_digest(group: Group, state: TrainState) -> str | None:
    """The digest of the weights; None on a rank that need not know it. Every rank calls it: of a sharded
    state each adds its rows up. Raises `GenerationEnded` as a collective does.
    """
    rank = group.view.rank
    if state.sharded:
        own = share_sum(state.items(), state.layout, rank)
        rows = group.gather([own >> at & 0xFFFFFFFF for at in range(0, 160, 32)], "a digest of the weights")
        sums = [sum(part << 32 * number for number, part in enumerate(row)) for row in rows]
        return weights_sum(sums)
    return digest_of(state.items()) if rank == 0 else None
