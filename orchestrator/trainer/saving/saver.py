"""Carries out a member's saves while it trains: the staging buffer, the writing of its part, and the vote.

`SaveSlot` decides what to do. Before a group ends, all its ranks wait for each other's saves. A failed last
save is retried for a limited time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from orchestrator.checkpoint.files.part_writer import JobPart, PartJob, PartWriter, PartWritten
from orchestrator.errors import OrchestratorError, StorageError, UnsavedError, text_of
from orchestrator.faults import Hook
from orchestrator.planning.state.state_layout import Layout, flat_part
from orchestrator.records.membership import GenerationView
from orchestrator.records.points import SavedTensor, Vote
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.tries import TIMEOUT
from orchestrator.trainer.comm.group import GenerationEnded, Group
from orchestrator.trainer.interfaces.loop_interface import Membership
from orchestrator.trainer.saving.save_machines import (
    Action,
    Answered,
    Begin,
    CallOff,
    CastVote,
    Copy,
    Event,
    Report,
    SaveSlot,
    SlotStage,
    Staged,
    Stopped,
    StopWriting,
    Write,
    Written,
)
from orchestrator.trainer.saving.staging import (
    Copies,
    SharedRows,
    Staging,
    StagingBuffer,
    replica_digests,
    shared_rows,
)
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import Item, dtype_name, saved_tensors

STOP_LIMIT_S = 900.0  # how long the writing of a part may take to end after its save was given up


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The rows of a generation's state that a rank writes, and where they are staged.

    `tensors` are those of the whole state, for rank 0's vote.
    """

    layout: Layout
    num_bytes: int
    parts: tuple[JobPart, ...]
    copies: Copies
    tensors: tuple[SavedTensor, ...]
    shared: SharedRows  # for comparing replicas


@dataclass(kw_only=True, slots=True)
class _Save:
    """The current save, and the contents of its vote besides the files."""

    view: GenerationView
    vote: Vote  # without its file, sums and nodes until they are written
    job: PartJob
    copies: Copies
    shared: SharedRows | None  # until it was read
    began_s: float
    blocked_s: float = 0.0


class Saver:
    """One member's saves, one at a time. `begin` returns at once, and the rest happens in threads.

    Between a save's begin and the end of its copy the state must not be written to. `writable` waits for
    that, and for nothing else. Memory: the staging buffer, as large as the largest part so far, however slow
    the storage is.
    """

    def __init__(
        self,
        membership: Membership,
        writer: PartWriter,
        device: torch.device,
        faults: Hook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns seconds."""
        self._membership, self._writer, self._faults, self._clock = membership, writer, faults, clock
        self._buffer = StagingBuffer(device)
        self._changed = threading.Condition(threading.RLock())
        self._plan: _Plan | None = None  # of the generation
        self._slot = SaveSlot()  # under the lock, as all fields below
        self._save: _Save | None = None
        self._staging: Staging | None = None
        self._error: BaseException | None = None
        self._committed: StateKey | None = None
        self._begun: StateKey | None = None
        self._blocked_s = self._called_off_at = 0.0

    # ---------------------------------------------------------------------- for the loop
    @property
    def is_free(self) -> bool:
        """Whether a save may begin."""
        with self._changed:
            return self._slot.is_free

    @property
    def saving(self) -> StateKey | None:
        """The save that this member has begun, until its vote or its report is answered."""
        with self._changed:
            return self._slot.key

    @property
    def begun(self) -> StateKey | None:
        """The newest save that was begun."""
        return self._begun

    @property
    def committed(self) -> StateKey | None:
        """The newest save of this member that was committed."""
        with self._changed:
            return self._committed

    def prepare(self, state: TrainState, rank: int) -> None:
        """Prepares the saves of a generation, once it has its state.

        Decides what this rank saves, and enlarges the staging buffer so that no save has to. While an older
        save is being written, the buffer stays unchanged until the next one begins.
        """
        items = state.items()
        part = flat_part([item.whole for item in items], state.layout, rank)
        mine = [(place, item) for place, item in zip(part.places, items, strict=True) if place.rows]
        self._plan = _Plan(
            layout=state.layout,
            num_bytes=part.num_bytes,
            parts=tuple(JobPart(place=place, dtype=dtype_name(item.tensor)) for place, item in mine),
            copies=[(place, _rows(item, place.rows)) for place, item in mine],
            tensors=saved_tensors(items) if rank == 0 else (),
            shared=shared_rows(items, state.layout),
        )
        with self._changed:
            if self._slot.is_free:
                self._buffer.reserve(part.num_bytes)

    def begin(
        self, state: TrainState, view: GenerationView, records: Sequence[StepRecord], peak_memory_bytes: int
    ) -> None:
        """Begins a save of the current state. Requires `is_free` and an earlier `prepare`."""
        began, plan = time.monotonic(), self._plan
        assert state.key is not None, "a blank member has nothing to save"
        assert plan is not None, "a generation is prepared before it saves"
        self._buffer.reserve(plan.num_bytes)
        job = PartJob(
            point=state.key.point_name,
            layout=plan.layout,
            rank=view.rank,
            parts=plan.parts,
            buffer=self._buffer.path,
        )
        vote = Vote(
            key=state.key,
            rank=view.rank,
            world_size=view.world_size,
            cursor=state.cursor,
            optimizer_steps=state.optimizer_steps,
            files=(),
            tensors=plan.tensors,
            save_blocked_s=0.0,
            records=tuple(records),
            peak_memory_bytes=peak_memory_bytes,
            layout=(plan.layout.num_shards, plan.layout.num_replicas),
            fixed=dict(state.fixed) if view.rank == 0 else {},
        )
        with self._changed:
            self._save = _Save(
                view=view, vote=vote, job=job, copies=plan.copies, shared=plan.shared, began_s=began
            )
            self._begun = state.key
            self._on(Begin(key=state.key))
            self._blocked(time.monotonic() - began)

    def writable(self) -> None:
        """Waits until the state may be written to: no thread copies it any more."""
        staging = self._staging
        if staging is None:
            return
        began = time.monotonic()
        staging.wait()
        with self._changed:
            self._staging = None
            self._blocked(time.monotonic() - began)

    def take_blocked_s(self) -> float:
        """Returns how long `begin` and `writable` have blocked training since the last call."""
        with self._changed:
            waited_s, self._blocked_s = self._blocked_s, 0.0
        return waited_s

    def poll(self, state: TrainState) -> None:
        """Updates `state.committed`, and checks whether the current save is given up.

        Raises the error that answered a vote. Raises `StorageError` if a part is still being written
        `STOP_LIMIT_S` after its save was given up: until that ends the group makes no save.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._committed is not None and self._committed == state.key:
                state.committed = True
            save = self._save
            late_s = self._clock() - self._called_off_at if self._slot.called_off else 0.0
            writes = self._slot.stage in (SlotStage.STAGING, SlotStage.WRITING)
        if save is not None and late_s > STOP_LIMIT_S:
            raise StorageError(
                f"this rank's part of {save.job.point} is still being written {late_s:.0f} s after the save "
                f"was given up (allowed: {STOP_LIMIT_S:g} s); check that storage is mounted and answers here",
                code=TIMEOUT,
            )
        if (
            save is not None
            and writes
            and self._membership.is_given_up(save.view, save.vote.key, lambda: self._writer.progress)
        ):
            self.call_off(save.vote.key, "the save was given up")

    def call_off(self, key: StateKey, reason: str) -> None:
        """The save of `key` is no longer wanted. If it is still being written, that ends soon and is
        reported.

        A vote that was already cast remains valid.
        """
        with self._changed:
            if not self._slot.called_off:
                self._called_off_at = self._clock()
            self._on(CallOff(key=key, reason=reason))

    def wait(self, timeout_s: float) -> None:
        """Waits until the current save has advanced or ended, or until the timeout."""
        with self._changed:
            if not self._slot.is_free and self._error is None:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Releases the memory. A write that still runs is cancelled; it ends by itself, or with the
        process.
        """
        if not self.is_free:
            self._writer.cancel()
            return
        self._writer.close()
        self._buffer.close()

    # ---------------------------------------------------------------------- inside, from any thread
    def _blocked(self, seconds: float) -> None:
        self._blocked_s += seconds
        if self._save is not None:
            self._save.blocked_s += seconds

    def _tell(self, event: Event) -> None:
        with self._changed:
            try:
                self._on(event)
            except BaseException as error:  # noqa: BLE001  a thread has no caller to raise it to
                self._ends_with(error)

    def _ends_with(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _on(self, event: Event) -> None:
        self._slot, actions = self._slot.on(event)
        if self._slot.is_free:
            self._save = None
        for action in actions:
            self._carry_out(action)
        self._changed.notify_all()

    def _carry_out(self, action: Action) -> None:
        save, key = self._save, action.key
        assert save is not None, f"{action} without a save"
        match action:
            case Copy():
                begun, ended = self._fault("staging_begun", save), self._fault("staged", save)
                assert save.shared is not None, f"{key} is copied twice"
                self._staging = self._buffer.stage(save.copies, begun, ended, save.shared.sums)
                self._staging.done.add_done_callback(partial(self._staged, key, self._staging))
            case Write():
                self._writer.write(save.job).add_done_callback(partial(self._written, save))
            case StopWriting():
                self._writer.cancel()
            case CastVote():
                part_s = time.monotonic() - save.began_s
                vote = replace(save.vote, save_blocked_s=save.blocked_s, part_s=part_s)
                self._membership.vote(vote).add_done_callback(partial(self._answered, key))
            case Report():
                error = StorageError(action.reason, code="point.part_not_written")
                answer = self._membership.save_failed(save.view, key, error)
                answer.add_done_callback(partial(self._answered, key))

    def _staged(self, key: StateKey, staging: Staging, done: Future[None]) -> None:
        error = done.exception()
        with self._changed:
            if self._save is not None:
                # the state may already be another one before this save ends
                self._save.copies, self._save.shared = (), None
                if error is None:
                    of_shard, of_all = staging.beside
                    self._save.vote = replace(self._save.vote, replicas=replica_digests((of_shard, of_all)))
        self._tell(Staged(key=key) if error is None else self._stopped(key, error))

    def _written(self, save: _Save, done: Future[PartWritten]) -> None:
        key = save.vote.key
        try:
            written = done.result()
            save.vote = replace(save.vote, files=(written.entry,), sums=written.sums, nodes=written.nodes)
            self._fault("save_part_written", save)()
        except BaseException as error:  # noqa: BLE001  it is reported
            self._tell(self._stopped(key, error))
        else:
            self._tell(Written(key=key))

    def _stopped(self, key: StateKey, error: BaseException) -> Stopped:
        if not isinstance(error, OrchestratorError):  # an internal error: it also ends the member
            self._ends_with(error)
        return Stopped(key=key, reason=text_of(error))

    def _answered(self, key: StateKey, answer: Future[bool]) -> None:
        error = answer.exception()
        with self._changed:
            if error is not None:
                self._ends_with(error)
            elif answer.result():
                self._committed = key
            self._tell(Answered(key=key))

    def _fault(self, place: str, save: _Save) -> Callable[[], None]:
        return partial(self._faults, place, save.vote.key.step, save.vote.rank)


def _rows(item: Item, rows: range) -> Tensor:
    """Returns these rows of the item. A scalar is one row."""
    tensor = item.tensor
    return tensor[rows.start - item.first_row : rows.stop - item.first_row] if tensor.ndim else tensor


# ---------------------------------------------------------------------------------------------- the last save
_ASK_AGAIN_S = 0.05
LAST_SAVE_LIMIT_S = 300.0  # how long saving the last state of a run is retried


def await_saves(
    group: Group, membership: Membership, saver: Saver, state: TrainState, settled: Callable[[], bool]
) -> bool:
    """Waits until every rank's saves are `settled`; returns whether `state` is in a committed point then.

    The ranks exchange their status. If one dies, or learns that the generation is over, the wait ends on all
    ranks with `GenerationEnded`. A rank that knows of the commit needs no other rank and returns. An error
    that answers a vote is raised.
    """
    while True:
        if not settled():
            saver.wait(_ASK_AGAIN_S)
        done = settled()  # before its outcome is checked
        saver.poll(state)
        if membership.control_requests(group.view).ended and not (done and state.committed):
            raise GenerationEnded("the membership ended it while votes were unanswered")
        mine = torch.tensor([int(done), int(state.committed)], dtype=torch.int64)
        try:
            num_done, num_committed = group.sum(mine, "waiting for the answers to votes").tolist()
        except GenerationEnded:
            if done and state.committed:
                return True
            raise
        if num_done == group.view.world_size:
            return bool(num_committed == group.view.world_size)


class Unsaved:
    """Paces and limits the attempts to save the last state of a run."""

    def __init__(self, limit_s: float = LAST_SAVE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._wait_s = 0.1

    def again(self, point: str) -> float:
        """Waits before the next attempt, longer each time; returns the seconds left for retries.

        Called after a save was given up. Raises `UnsavedError` when the limit is reached.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > self._limit_s:
            raise UnsavedError(
                f"the last state of the run could not be saved for {now - self._since:.0f} s "
                f"(allowed: {self._limit_s:g} s): every save was given up, the last one as {point}; the "
                "journal has the reasons. Start the same command again: it continues from the newest resume "
                "point, or from the beginning if the run has none"
            )
        time.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, 5.0)
        return self._limit_s - (now - self._since)
