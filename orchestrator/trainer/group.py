"""One generation's process group: formed within its own time-out, checked to be the same group on every
member, left without a trace.

Every failure of a collective becomes `GenerationEnded`, and nothing else does. It knows no model and no data.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from orchestrator.planning.state_layout import Layout
from orchestrator.records.membership import GenerationView
from orchestrator.trainer import interruptible
from orchestrator.trainer.gloo_sockets import GlooSockets
from orchestrator.trainer.interruptible import BACKEND, Interruptible
from orchestrator.trainer.phases import LOAD, PHASE_LIMITS_S
from orchestrator.trainer.reshard import Pending

_VERDICT, _ALL_HERE, _CALLED_OFF = "verdict", b"all here", b"called off"
_ASK_AGAIN_S = 0.01
_PLACE = re.compile(r"\[[^\]\s]*gloo/[^\]\s]*:\d+\]\s*")
_ADVICE = re.compile(r"\s*This is typically caused by .*", re.DOTALL)


class GenerationEnded(Exception):
    """This generation is over; the member goes back to the rendezvous with its state. The text says why.
    Never leaves the loop.
    """


class LastSaveFailed(GenerationEnded):
    """The run is over, or is to stop, and the save of its last state was given up."""


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
        raise ended_by(what, error) from error


def ended_by(what: str, error: RuntimeError) -> GenerationEnded:
    """What a collective's error means. Of gloo's text what it knows is kept: the peer, and what became of the
    connection; not its source's line, nor its advice.
    """
    return GenerationEnded(f"{what}: {_ADVICE.sub('', _PLACE.sub('', str(error))).rstrip('. ')}")


def raised_by_collective(error: BaseException) -> bool:
    """Whether an error out of a pass through a model comes from a collective inside, as DDP and FSDP2 begin
    them, and not from the model: by its class, or because its innermost frame lies in torch's code for
    collectives, or in ours around gloo's.
    """
    if isinstance(error, dist.DistError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.startswith("torch.distributed.") or module == interruptible.__name__


class Group:
    """The process groups of one generation. Control goes over gloo on the CPU; with a GPU, tensors there go
    over NCCL.
    """

    def __init__(self, view: GenerationView, limit_s: float) -> None:
        self.view, self._limit_s = view, limit_s
        self._forming = datetime.timedelta(seconds=limit_s)
        self._sockets = GlooSockets()
        self._waits = Interruptible()
        self._control: dist.ProcessGroup | None = None
        self._of_mesh: list[dist.ProcessGroup] = []

    @classmethod
    @contextmanager
    def formed(
        cls,
        view: GenerationView,
        store: Store,
        device: torch.device,
        limit_s: float,
        called_off: Callable[[], bool],
    ) -> Iterator[Group]:
        """All members meet and `compare` within `limit_s`, else `GenerationEnded`; see `allow` for the time
        after that, and `assemble` for `called_off`.

        On leaving, however it comes, the group is destroyed: the others' collectives fail, so that they leave
        too.
        """
        if device.type == "cuda":
            # a failed NCCL collective must raise here, not end the process
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        group = cls(view, limit_s)
        try:
            with collective("forming the group"):
                assemble(view, store, limit_s, called_off)
                group._form(store, device)
            yield group
        finally:
            group._sockets.forget()
            group._control = None
            group._of_mesh.clear()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _form(self, store: Store, device: torch.device) -> None:
        """The default group is that of the model's tensors."""
        limit = datetime.timedelta(seconds=self._limit_s)
        self._waits.register()
        with self._sockets.watched():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else BACKEND,
                store=store,
                rank=self.view.rank,
                world_size=self.view.world_size,
                timeout=limit,
            )
            if device.type == "cuda":
                self._control = dist.new_group(backend=BACKEND, timeout=limit)

    def call_off(self) -> None:
        """The generation is over: what waits in gloo, here and at the peers, fails at once, sums of gradients
        included, and what gloo forgets all the same (`interruptible`) within a second. From any thread.

        NCCL's collectives are left alone, and wait out their time.
        """
        self._sockets.shut()
        self._waits.cut()

    def compare(self, config_digest: str, num_shards: int, own: Sequence[int]) -> list[list[int]]:
        """The first collective: every member must see the same launch, generation, members, parent, step,
        configuration, and number of shards of the group's state (which `train.parallel: auto` leaves open).

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
            "parent": _number(repr((view.parent, view.sources, view.point, view.cursor))),
            "configuration": _number(config_digest),
            "number of shards": num_shards,
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
        self.allow(PHASE_LIMITS_S[LOAD])  # a peer may load the state from storage now
        return [row[len(facts) :] for row in rows]

    def allow(self, seconds: float) -> None:
        """From now on a collective may wait so long for a peer that says nothing. The same on every rank."""
        if seconds != self._limit_s:
            self._limit_s = seconds
            for group in (None, *([self._control] if self._control else []), *self._of_mesh):
                _set_pg_timeout(datetime.timedelta(seconds=seconds), group)

    def gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        """The integers of every rank, by rank."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.view.world_size)]
        with collective(what):
            dist.all_gather(rows, mine, group=self._control)
        return [[int(v) for v in row.tolist()] for row in rows]

    def sum(self, vector: Tensor, what: str) -> Tensor:
        """`vector` (int64, on the CPU) summed over the ranks, in place."""
        with collective(what):
            dist.all_reduce(vector, group=self._control)
        return vector

    def give(self, buffer: Tensor, rank: int) -> Pending:
        """Sends `buffer` to `rank`; see `reshard.Peers`."""
        return _work(dist.isend(buffer, rank, group=self._control))

    def mesh(self, layout: Layout, device: torch.device) -> DeviceMesh:
        """The ranks as a mesh of the dimension "shard", with "replicate" before it where there are several
        replicas; every rank must call it. `allow` and `call_off` hold for its groups, too.
        """
        shards, replicas = layout.num_shards, layout.num_replicas
        if replicas == 1:
            assert dist.group.WORLD is not None
            return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=("shard",))
        rows = torch.arange(layout.world_size).view(replicas, shards)
        own: list[dist.ProcessGroup] = []
        with collective("dividing the group"), self._sockets.watched():
            for of_one in (rows.T, rows):  # the holders of each shard, then the shards of each replica
                for ranks in of_one.tolist():
                    made = dist.new_group(ranks, timeout=datetime.timedelta(seconds=self._limit_s))
                    if self.view.rank in ranks:
                        own.append(made)
        self._of_mesh = own
        names = ("replicate", "shard")
        return DeviceMesh.from_group(own, device.type, mesh=rows, mesh_dim_names=names)

    def take(self, buffer: Tensor, rank: int) -> Pending:
        """Receives a message of `rank` into `buffer`; see `reshard.Peers`."""
        return _work(dist.irecv(buffer, rank, group=self._control))


def assemble(view: GenerationView, store: Store, limit_s: float, called_off: Callable[[], bool]) -> None:
    """Returns on every member once all have reached the store, at most `limit_s` seconds later.

    gloo's own rendezvous cannot be woken: it would wait out its time for a member that died on the way. Here
    rank 0 ends the wait for all as soon as `called_off()` (the coordinator has left that member out), and its
    death ends the store and with it the wait. Raises `GenerationEnded`, or `RuntimeError` of the store.
    """
    if store.add("present", 1) == view.world_size:
        store.compare_set(_VERDICT, "", _ALL_HERE.decode())
    deadline = time.monotonic() + limit_s
    while view.rank == 0 and not store.check([_VERDICT]):
        if called_off() or time.monotonic() > deadline:
            store.compare_set(_VERDICT, "", _CALLED_OFF.decode())  # whichever came first holds for all
        time.sleep(_ASK_AGAIN_S)
    store.wait([_VERDICT], datetime.timedelta(seconds=limit_s))
    if store.get(_VERDICT) != _ALL_HERE:
        raise GenerationEnded("the generation was called off before all its members had come")


def _work(begun: dist.Work | None) -> dist.Work:
    assert begun is not None, "this rank is in the group"
    return begun


def _number(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little", signed=True)
