"""One generation's process group: formed within its own time-out, checked to be the same group on every
member, left without a trace.

Every failure of a collective becomes `GenerationEnded`, and nothing else does. It knows no model and no data.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from orchestrator.records import GenerationView


class GenerationEnded(Exception):
    """This generation is over; the member goes back to the rendezvous with its state. The text says why.
    Never leaves the loop.
    """


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Around collectives and their store, and around nothing else: a RuntimeError inside means that the
    generation is over.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise GenerationEnded(f"{what}: {error}") from error


class Group:
    """The default process group of one generation. Control goes over gloo on the CPU; with a GPU, tensors
    there go over NCCL.
    """

    def __init__(self, view: GenerationView, timeout_s: float) -> None:
        self.view, self._timeout = view, datetime.timedelta(seconds=timeout_s)

    @classmethod
    @contextmanager
    def formed(
        cls, view: GenerationView, store: Store, device: torch.device, limit_s: float, timeout_s: float
    ) -> Iterator[Group]:
        """All members meet and `compare` within `limit_s`, else `GenerationEnded`; after that a collective
        may take `timeout_s`.

        On leaving, however it comes, the group is destroyed: the others' collectives fail, so that they leave
        too.
        """
        if device.type == "cuda":
            # a failed NCCL collective must raise here, not end the process
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        group = cls(view, timeout_s)
        try:
            with collective("forming the group"):
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=view.rank,
                    world_size=view.world_size,
                    timeout=datetime.timedelta(seconds=limit_s),
                )
            yield group
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def compare(self, config_digest: str, own: Sequence[int]) -> list[list[int]]:
        """The first collective: every member must see the same launch, generation, members, parent, step and
        configuration.

        Returns what each rank brought as `own`. Raises `GenerationEnded` naming the rank and what differs.
        """
        view = self.view
        facts = {
            "rank": view.rank,
            "launch": _number(view.launch),
            "attempt": view.attempt,
            "generation": view.generation,
            "members": _number(repr(view.members)),
            "step": view.step,
            "parent": _number(repr((view.parent, view.source_rank, view.point, view.cursor))),
            "configuration": _number(config_digest),
        }
        rows = self.gather([*facts.values(), *own], "comparing the group")
        for rank, row in enumerate(rows):
            expected = {**facts, "rank": rank}
            for (name, value), found in zip(expected.items(), row, strict=False):
                if value != found:
                    raise GenerationEnded(
                        f"rank {rank} has another {name} ({found}) than rank {view.rank} ({value}); "
                        "members of one group must have the same"
                    )
        _set_pg_timeout(self._timeout)
        return [row[len(facts) :] for row in rows]

    def gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        """The integers of every rank, by rank."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.view.world_size)]
        with collective(what):
            dist.all_gather(rows, mine)
        return [[int(v) for v in row.tolist()] for row in rows]

    def sum(self, vector: Tensor, what: str) -> Tensor:
        """`vector` (int64, on the CPU) summed over the ranks, in place."""
        with collective(what):
            dist.all_reduce(vector)
        return vector

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of some ranks; every rank must call it. None for the others."""
        with collective("forming the group that copies the state"):
            made = dist.new_group(list(ranks), timeout=self._timeout)
        return made if self.view.rank in ranks else None

    def send(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        """`tensor` of rank `source` to the others of `group`, in place."""
        with collective("copying the state"):
            dist.broadcast(tensor, source, group=group)


def _number(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little", signed=True)
