"""The process group of one generation: its formation, its consistency check and its destruction.

The group forms within its own timeout. Every member checks that it is in the same group. Every failure of a
collective becomes `GenerationEnded`, and nothing else does. `GlooSockets` interrupts blocked collectives.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.membership import GenerationView
from orchestrator.trainer.comm import interruptible
from orchestrator.trainer.comm.interruptible import BACKEND, Communicators, Interruptible
from orchestrator.trainer.comm.reshard import PendingMessage
from orchestrator.trainer.interfaces.loop_interface import LOAD, PHASE_LIMITS_S

_FDS, _FACTS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")


class GlooSockets:
    """The connections of the gloo groups that were created inside `watched`, which another thread can close.

    gloo offers no way to interrupt a collective. If a peer loses power, the collective waits until its
    timeout, because a dead machine closes no connection. But gloo notices a connection that is shut down
    locally, and treats it as closed by the peer.

    Guarantee: no other connection of the process is ever touched.

    A group's connections are found through the epolls that were created with the group and that also watch a
    listening socket. Works on Linux only. On other systems no connections are found, and collectives wait
    until their timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}  # file descriptor (which can be reused) -> inode of the socket
        self._shut = False

    @property
    def num_known(self) -> int:
        """The number of connections that would be shut down."""
        return len(self._known)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wraps the creation of a process group, in one thread. Its connections exist when the block ends."""
        before = _epolls()
        yield
        found: dict[int, int] = {}
        for epoll in _epolls() - before:
            found |= _connections(epoll)
        with self._lock:
            self._known |= found
            if self._shut:
                self._shut_all()

    def shut(self) -> None:
        """Shuts the connections down: collectives that wait on them, now or later, fail at once, here and at
        live peers.

        Can be called from any thread, at any time, and repeatedly.
        """
        with self._lock:
            self._shut = True
            self._shut_all()

    def forget(self) -> None:
        """Stops tracking the connections, because their groups are about to be destroyed."""
        with self._lock:
            self._known = {}

    def _shut_all(self) -> None:
        for fd, inode in self._known.items():
            with _copied(fd) as connection:
                if connection is not None and _inode(connection) == inode:
                    with suppress(OSError):  # the peer closed it first
                        connection.shutdown(socket.SHUT_RDWR)


def _epolls() -> set[int]:
    found = set()
    with suppress(FileNotFoundError):
        for entry in _FDS.iterdir():
            with suppress(FileNotFoundError):
                if "eventpoll" in str(entry.readlink()):
                    found.add(int(entry.name))
    return found


def _connections(epoll: int) -> dict[int, int]:
    """Maps file descriptor to inode for each connection that `epoll` watches.

    Empty if it watches no listener.
    """
    listens, found = False, dict[int, int]()
    try:
        facts = (_FACTS / str(epoll)).read_text()
    except FileNotFoundError:
        return {}  # it belonged to another thread, which has closed it
    for fd in re.findall(r"^tfd:\s*(\d+)", facts, re.MULTILINE):
        with _copied(int(fd)) as one:
            if one is None:
                continue  # gloo also watches a pipe, to wake its thread
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listens = True
            else:
                found[int(fd)] = _inode(one)
    return found if listens else {}


@contextmanager
def _copied(fd: int) -> Iterator[socket.socket | None]:
    """Yields the socket behind `fd` under a new descriptor, or None if `fd` is not a socket.

    The socket behind the new descriptor cannot change between a check and an action.
    """
    try:
        own = os.dup(fd)
    except OSError:
        yield None
        return
    if not stat.S_ISSOCK(os.fstat(own).st_mode):
        os.close(own)
        yield None
        return
    with socket.socket(fileno=own) as found:
        yield found


def _inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


_VERDICT, _ALL_HERE, _CALLED_OFF = "verdict", b"all here", b"called off"
_ASK_AGAIN_S = 0.01
_PLACE = re.compile(r"\[[^\]\s]*gloo/[^\]\s]*:\d+\]\s*")
_ADVICE = re.compile(r"\s*This is typically caused by .*", re.DOTALL)


class GenerationEnded(Exception):
    """The generation is over, and the member returns to the rendezvous with its state. The text gives the
    reason.

    The exception never leaves the loop.
    """


class LastSaveFailed(GenerationEnded):
    """The run is over or is to stop, and the save of its last state was given up."""


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Wraps collectives and their store, and nothing else: a RuntimeError becomes `GenerationEnded`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ended_by(what, error) from error


def ended_by(what: str, error: RuntimeError) -> GenerationEnded:
    """Converts a collective's error to `GenerationEnded`.

    Of gloo's text it keeps the peer and the state of the connection. It removes the source location and the
    advice.
    """
    return GenerationEnded(f"{what}: {_ADVICE.sub('', _PLACE.sub('', str(error))).rstrip('. ')}")


def raised_by_collective(error: BaseException) -> bool:
    """Whether a model's error comes from a collective that DDP or FSDP2 started in a pass.

    It does if its class says so, or if its innermost frame is in torch's code for collectives or in our
    wrapper around gloo's.
    """
    if isinstance(error, dist.DistError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.startswith("torch.distributed.") or module == interruptible.__name__


class Group:
    """The process groups of one generation.

    Control messages use gloo on the CPU. On a GPU, tensors use NCCL.
    """

    def __init__(self, view: GenerationView, limit_s: float) -> None:
        self.view, self._limit_s = view, limit_s
        self._forming = datetime.timedelta(seconds=limit_s)
        self._sockets = GlooSockets()
        self._waits = Interruptible()
        self._communicators = Communicators()
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
        """Forms the group: all members must meet and `compare` within `limit_s`, else it raises
        `GenerationEnded`.

        See `allow` for the timeout after that, and `assemble` for `called_off`. When the block ends, for any
        reason, the group is destroyed. The other members' collectives then fail, so that they leave too.
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
            group._communicators.forget()
            group._control = None
            group._of_mesh.clear()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _form(self, store: Store, device: torch.device) -> None:
        """Creates the groups. The default group is that of the model's tensors."""
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
                assert dist.group.WORLD is not None
                self._communicators.add_group(dist.group.WORLD)

    def call_off(self) -> None:
        """Ends the generation: operations that wait in gloo fail at once, here and at the peers. Any thread
        can call it.

        This includes gradient reductions. Operations that gloo forgets nevertheless (`interruptible`) fail
        within a second. NCCL's communicators are aborted.
        """
        self._sockets.shut()
        self._waits.cut()
        self._communicators.abort()

    def compare(self, config_digest: str, num_shards: int, own: Sequence[int]) -> list[list[int]]:
        """Runs the first collective, which checks that all members agree.

        Every member must see the same launch, generation, members, parent, step, configuration, and number of
        shards of the group's state (which `train.parallel: auto` leaves open).

        Returns what each rank passed as `own`. Raises `GenerationEnded` naming the rank and the difference.
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
        self.allow(PHASE_LIMITS_S[LOAD])  # a peer may load the state from storage next
        return [row[len(facts) :] for row in rows]

    def allow(self, seconds: float) -> None:
        """Sets how long a collective may wait for a silent peer. Must be the same on every rank."""
        if seconds != self._limit_s:
            self._limit_s = seconds
            for group in (None, *([self._control] if self._control else []), *self._of_mesh):
                _set_pg_timeout(datetime.timedelta(seconds=seconds), group)

    def gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        """Returns the integers of every rank, by rank."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.view.world_size)]
        with collective(what):
            dist.all_gather(rows, mine, group=self._control)
        return [[int(v) for v in row.tolist()] for row in rows]

    def sum(self, vector: Tensor, what: str) -> Tensor:
        """Sums `vector` (int64, on the CPU) over the ranks, in place."""
        with collective(what):
            dist.all_reduce(vector, group=self._control)
        return vector

    def give(self, buffer: Tensor, rank: int) -> PendingMessage:
        """Sends `buffer` to `rank`; see `reshard.Peers`."""
        return _work(dist.isend(buffer, rank, group=self._control))

    def mesh(self, layout: Layout, device: torch.device) -> DeviceMesh:
        """Builds a mesh of the ranks with the dimension "shard".

        With several replicas, the dimension "replicate" precedes it. Every rank must call it. `allow` and
        `call_off` also apply to its groups.
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
        if device.type == "cuda":
            for made in own:
                self._communicators.add_group(made)
        names = ("replicate", "shard")
        return DeviceMesh.from_group(own, device.type, mesh=rows, mesh_dim_names=names)

    def take(self, buffer: Tensor, rank: int) -> PendingMessage:
        """Receives a message of `rank` into `buffer`; see `reshard.Peers`."""
        return _work(dist.irecv(buffer, rank, group=self._control))


def assemble(view: GenerationView, store: Store, limit_s: float, called_off: Callable[[], bool]) -> None:
    """Returns on every member once all have reached the store, at most `limit_s` seconds later.

    gloo's own rendezvous cannot be interrupted: it would wait until its timeout for a member that died on the
    way. Here rank 0 ends the wait for all members as soon as `called_off()` is true (the coordinator has
    excluded that member). If rank 0 dies, its store ends and so does the wait. Raises `GenerationEnded`, or
    the store's `RuntimeError`.
    """
    if store.add("present", 1) == view.world_size:
        store.compare_set(_VERDICT, "", _ALL_HERE.decode())
    deadline = time.monotonic() + limit_s
    while view.rank == 0 and not store.check([_VERDICT]):
        if called_off() or time.monotonic() > deadline:
            store.compare_set(_VERDICT, "", _CALLED_OFF.decode())  # the first verdict holds for all
        time.sleep(_ASK_AGAIN_S)
    store.wait([_VERDICT], datetime.timedelta(seconds=limit_s))
    if store.get(_VERDICT) != _ALL_HERE:
        raise GenerationEnded("the generation was called off before all its members had come")


def _work(begun: dist.Work | None) -> dist.Work:
    assert begun is not None, "this rank is in the group"
    return begun


def _number(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little", signed=True)
