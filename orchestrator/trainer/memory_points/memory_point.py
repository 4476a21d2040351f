"""Memory points: frequent copies of each rank's shard in memory, with a second copy at a neighbour.

Every few steps each rank copies its shard in a thread, and a neighbour keeps another copy. A lost rank then
costs at most the steps since the last memory point (membership rule 5). This module carries out the decisions
of `MemorySlots`. The rendezvous decides which copies the next generation continues from.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from typing_extensions import override

from orchestrator.errors import StorageError
from orchestrator.faults import Hook
from orchestrator.planning.state.copy_placement import neighbours
from orchestrator.planning.state.state_layout import StateTensor, flat_shard
from orchestrator.records.membership import GenerationView, HeldShard, Source
from orchestrator.records.steps import StateKey
from orchestrator.trainer.comm.group import GenerationEnded, collective
from orchestrator.trainer.memory_points.memory_replica import (
    Address,
    CopyHeader,
    LentCopy,
    Marks,
    NeighbourLink,
    Receiver,
    new_token,
)
from orchestrator.trainer.memory_points.memory_slots import MemorySlots
from orchestrator.trainer.saving.staging import Staging, StagingBuffer
from orchestrator.trainer.state.sync_state import MemoryCopies
from orchestrator.trainer.state.train_state import TrainState

_log = logging.getLogger(__name__)


class MemoryPoints(Receiver, MemoryCopies):
    """The memory points of one member.

    A memory point is made after every `every_steps`-th step, if the previous one is sealed then (None:
    never), and as soon as a generation has agreed on its state.

    Memory points are optional copies. No failure here ends a generation that could train without them. A rank
    without memory, port or link reports this once (`say`) and never has a whole memory point, so that none is
    sealed. It tries again in the next generation. A link that breaks after a point was sealed in its
    generation ends the generation, so that the next one has memory points again.

    Memory: four times the largest shard of the group, on the CPU. It is twice that shard if the neighbour is
    on the same node, because the neighbour then lends its buffers (`LentCopy`). A group of one makes no
    memory points. Between `begin` and the end of its copy the state must not be written to; `writable` waits
    for that. `faults` is called in threads at `memory_staged` and `neighbour_half_sent`, and at `sealed`,
    with the copied step.
    """

    def __init__(
        self,
        every_steps: int | None,
        device: torch.device,
        faults: Hook,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        self._every, self._device, self._faults, self._say = every_steps, device, faults, say
        self._said = ""  # the reason that was last reported
        self._own: tuple[StagingBuffer, ...] = ()
        self._marks: Marks | None = None
        if every_steps is not None:
            self._try(self._open)
        self._has_sealed = False  # in this generation
        self._num_unlinked = 0  # consecutive steps that were applied after the link had failed
        # copies kept for a neighbour, in memory of this process or lent
        self._kept: list[Tensor | LentCopy] = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._lock = threading.Lock()
        self._slots = MemorySlots()  # under the lock
        self._tensors: Sequence[StateTensor] = ()
        self._listener: socket.socket | None = None  # created with the first generation
        self._address: Address | None = None
        self._view: GenerationView | None = None
        self._store: Store | None = None
        self._link: NeighbourLink | None = None
        self._staging: Staging | None = None

    # ------------------------------------------------------------------------------ for the rendezvous
    def holdings(self) -> tuple[HeldShard, ...]:
        """Returns all whole copies, own and kept. To be called between generations."""
        with self._lock:
            for number, kept in enumerate(self._kept):
                if isinstance(kept, LentCopy) and not kept.is_there:
                    self._slots = self._slots.overwritten(number)
            return self._slots.holdings

    @override
    def copy_of(self, key: StateKey, shard: int) -> list[Tensor]:
        """A lent copy becomes this member's own.

        Raises `GenerationEnded` if the owner has begun to overwrite it since `holdings` was called. An owner
        does that if it was in a group whose other members dropped out while it formed.
        """
        with self._lock:
            source, number = self._slots.place_of(key, shard)
            slots = self._slots.own if source is Source.STAGED else self._slots.kept
            copy = slots[number].copy
        assert copy is not None, "what is held is there"
        memory = self._own[number].memory if source is Source.STAGED else self._taken(number, copy)
        flat = flat_shard(self._tensors, copy.num_shards, shard)
        return [memory[place.offset : place.offset + place.num_bytes] for place in flat.places]

    def _taken(self, number: int, copy: HeldShard) -> Tensor:
        kept = self._kept[number]
        if isinstance(kept, Tensor):
            return kept
        data = kept.taken()
        if data is None:
            raise GenerationEnded(
                f"the copy of shard {copy.shard} of {copy.key} was overwritten by its owner"
            )
        self._keep(number, data)
        return data

    def _keep(self, number: int, kept: Tensor | LentCopy) -> None:
        before, self._kept[number] = self._kept[number], kept
        if isinstance(before, LentCopy):
            before.close()

    # ------------------------------------------------------------------------------ a generation
    @contextmanager
    def within(self, view: GenerationView, store: Store) -> Iterator[None]:
        """Wraps a generation, from before its members agree on their state.

        This rank publishes its address in the group's store. When the block ends, incomplete copies stop
        where they are, and whole ones stay.
        """
        self._view, self._store = view, store
        if self._every is not None and view.nodes:
            self._try(self._listen)
            with collective("announcing the memory points"):
                store.set(f"memory/{view.rank}", self._address.to_json() if self._address else "")
        try:
            yield
        finally:
            self._leave()

    def enter(self, state: TrainState) -> None:
        """Links to the neighbours and starts the first memory point. Called once the group has agreed on its
        state.
        """
        view, store = self._view, self._store
        assert view is not None, "a generation is entered within it"
        assert store is not None, "a generation is entered within it"
        keeper = neighbours([str(node) for node in view.nodes])
        self._has_sealed, self._num_unlinked = False, 0
        with self._lock:
            self._slots = self._slots.entered(view.keep, has_neighbour=bool(keeper))
        if not keeper or self._address is None:
            return
        with collective("looking for the neighbour"):
            found = store.get(f"memory/{keeper[view.rank]}").decode()
        if not found:  # the neighbour has reported the reason
            return
        self._tensors = [item.whole for item in state.items()]
        beside = view.nodes[keeper[view.rank]] == view.nodes[view.rank]
        self._try(partial(self._connect, Address.from_json(found), beside))
        if self._link is not None:
            self._begin(state)

    # ------------------------------------------------------------------------------ what may fail
    def _try(self, act: Callable[[], object]) -> None:
        """Runs `act`. If it fails, this rank has no memory points, and the failure is reported."""
        try:
            act()
        except (OSError, RuntimeError, MemoryError, StorageError) as error:  # of the system, threads, torch
            self._go_without(f"{type(error).__name__}: {error}")

    def _go_without(self, reason: str) -> None:
        """Reports a reason once."""
        if reason != self._said:
            self._said = reason
            self._say(
                f"this worker makes no memory points ({reason}): training continues, and a lost worker costs "
                "the steps since the newest resume point"
            )

    def _open(self) -> None:
        if not self._own:
            self._own = (StagingBuffer(self._device),)
        if len(self._own) < 2:
            self._own = (*self._own, StagingBuffer(self._device))
        if self._marks is None:
            self._marks = Marks([buffer.path for buffer in self._own])

    def _listen(self) -> None:
        assert self._view is not None, "a generation is entered within it"
        self._open()
        self._listener = self._listener or _listening()
        port = int(self._listener.getsockname()[1])
        self._address = Address(host=self._view.own_host, port=port, token=new_token())

    def _connect(self, keeper: Address, beside: bool) -> None:
        """`beside`: the keeper is on this node."""
        assert self._listener is not None, "who has an address listens"
        assert self._address is not None, "who has an address listens"
        assert self._marks is not None, "who has an address listens"
        half = partial(self._fault, "neighbour_half_sent")
        self._link = NeighbourLink(
            self._listener,
            self._address,
            keeper,
            self,
            lambda header: half(header.copy.key),
            self._marks.offer if beside else None,
        )

    def _leave(self) -> None:
        if self._staging is not None:
            self._staging.done.exception()  # waits: afterwards the slot belongs to the machine again
        if self._link is not None:
            self._link.close()
        self._link = self._view = self._store = self._staging = self._address = None

    def close(self) -> None:
        """Releases all memory."""
        self._leave()
        if self._listener is not None:
            self._listener.close()
        for buffer in self._own:
            buffer.close()
        if self._marks is not None:
            self._marks.close()
        for number in range(len(self._kept)):
            self._keep(number, torch.empty(0, dtype=torch.uint8))

    # ------------------------------------------------------------------------------ steps
    def writable(self) -> None:
        """Waits until the state may be written to: no thread copies it any more."""
        if self._staging is not None:
            self._staging.wait()

    @property
    def is_whole(self) -> bool:
        """The value that this rank reports in the step's summary."""
        with self._lock:
            return self._slots.is_whole

    def applied(self, state: TrainState, sealed: bool) -> None:
        """Handles an applied step. `sealed`: by its summary, every rank has the whole memory point.

        Starts the next memory point if it is due, and none if copies do not get through (`check`).
        """
        link, view = self._link, self._view
        if link is None or view is None:
            return
        if sealed:
            with self._lock:
                self._slots = self._slots.sealed()
                key = self._slots.keep
            assert key is not None, "a memory point was sealed"
            self._has_sealed = True
            self._fault("sealed", key)
        if link.failure:
            self._num_unlinked += 1
            # a single failure can be the end of the generation, which this rank may not know yet
            if self._num_unlinked > 1:
                self._go_without(link.failure)
            return
        if self._staging is not None and self._staging.done.done():
            error = self._staging.done.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            if error is not None:
                self._go_without(f"{type(error).__name__}: {error}")
                return
        assert state.key is not None, "a member that trains holds a state"
        if self._every is not None and state.key.step % self._every == 0 and self._slots.is_free:
            self._begin(state)

    def check(self) -> None:
        """Raises `GenerationEnded` if copies got through in this generation and no longer do.

        The next generation may have memory points again. If copies never got through, a new generation would
        not help.

        To be called when a step begins, for two reasons. Requests in the summary of the previous step come
        first. After a re-form at a step boundary, some ranks have closed their links while others still apply
        that step.
        """
        if self._has_sealed and self._link is not None and self._link.failure:
            raise GenerationEnded(f"memory points do not reach their neighbours: {self._link.failure}")

    def _begin(self, state: TrainState) -> None:
        view = self._view
        assert view is not None, "memory points are made within a generation"
        assert state.key is not None, "a member that trains holds a state"
        copy = HeldShard(
            key=state.key,
            shard=state.layout.shard_of(view.rank),
            num_shards=state.layout.num_shards,
            source=Source.STAGED,
            cursor=state.cursor,
        )
        with self._lock:
            keep = self._slots.keep
            self._slots, number = self._slots.begun(copy)
        self._try(partial(self._stage, state, copy, keep, number))

    def _stage(self, state: TrainState, copy: HeldShard, keep: StateKey | None, number: int) -> None:
        assert self._marks is not None, "who has a link has buffers"
        mark = self._marks.renew(number)
        flat = flat_shard(self._tensors, copy.num_shards, copy.shard)
        copies = [
            (place, item.tensor)
            for place, item in zip(flat.places, state.items(), strict=True)
            if place.num_bytes
        ]
        buffer = self._own[number]
        buffer.reserve(max(1, flat.num_bytes))
        header = CopyHeader(copy=copy, keep=keep, num_bytes=flat.num_bytes, buffer=number, mark=mark)
        self._staging = buffer.stage(copies, lambda: None, partial(self._staged, header, buffer))

    # ------------------------------------------------------------------------------ in threads
    def _staged(self, header: CopyHeader, buffer: StagingBuffer) -> None:
        self._fault("memory_staged", header.copy.key)
        with self._lock:
            self._slots = self._slots.staged()
        if self._link is not None:
            self._link.send(header, memoryview(buffer.memory.numpy())[: header.num_bytes])  # type: ignore[arg-type]

    @override
    def room(self, header: CopyHeader) -> memoryview:
        """The old copy is removed from the list before its first byte is
        overwritten.
        """
        number = self._arriving(header)
        kept = self._kept[number]
        if isinstance(kept, LentCopy) or kept.numel() < header.num_bytes:
            kept = torch.zeros(header.num_bytes, dtype=torch.uint8)
            self._keep(number, kept)
        return memoryview(kept.numpy())  # type: ignore[arg-type]

    @override
    def lent(self, header: CopyHeader, copy: LentCopy) -> None:
        self._keep(self._arriving(header), copy)
        self.arrived(header)

    def _arriving(self, header: CopyHeader) -> int:
        given = header.copy
        kept = HeldShard(
            key=given.key,
            shard=given.shard,
            num_shards=given.num_shards,
            source=Source.NEIGHBOUR,
            cursor=given.cursor,
        )
        with self._lock:
            self._slots, number = self._slots.arriving(kept, header.keep)
        return number

    @override
    def arrived(self, header: CopyHeader) -> None:
        with self._lock:
            self._slots = self._slots.arrived(header.copy.key)

    def _fault(self, place: str, key: StateKey) -> None:
        self._faults(place, key.step, -1 if self._view is None else self._view.rank)


def _listening() -> socket.socket:
    """Listens on a free port of this machine, on all its addresses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=16, dualstack_ipv6=both)
