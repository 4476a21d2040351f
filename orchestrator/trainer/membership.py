"""What the loop asks of the outside, as two small protocols, and the store through which a group forms.

It knows no Ray and no coordinator; those who do implement these elsewhere, `torchrun.membership` does for
plain torchrun.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from orchestrator.errors import OrchestratorError
from orchestrator.records.batches import BatchSlice, StepRange
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import ControlRequests, GenerationView, MemberState
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey, StepRecord

STORE_TIMEOUT_S = 10.0


def open_store(host: str) -> TCPStore:
    """This member's own store, on a port of the system's choice (`.port`), as master; one for the whole life
    of the member.
    """
    return TCPStore(
        host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
    )


def connect_store(own: TCPStore, view: GenerationView) -> Store:
    """The store of the generation's rank 0, with keys under launch/attempt/generation. Raises `RuntimeError`
    if it cannot be reached.
    """
    store = own
    if view.rank != 0:
        store = TCPStore(
            view.host,
            view.port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
        )
    return PrefixStore(f"{view.launch}/{view.attempt}/{view.generation}", store)


class Membership(Protocol):
    """Who trains. `member` is this process's random name."""

    member: str

    def join(self, state: MemberState) -> GenerationView | None:
        """Blocks until this member is in a new generation; None: the run is over for it, and it leaves."""

    def connect_store(self, view: GenerationView) -> Store:
        """The store through which the generation's process group forms."""

    def control_requests(self, view: GenerationView) -> ControlRequests:
        """The latest that is known of what the coordinator wants of this generation; never blocks.

        Rank 0 copies them into the summary; the others use only `ended`. `acknowledged_step` counts in this
        generation's labels: all its records up to there are durable, and those of earlier generations with
        them; below the generation's first step it says nothing.
        """

    def when_ended(self, view: GenerationView, act: Callable[[], None]) -> None:
        """Has `act` called, from any thread, as soon as it is known that the coordinator has ended the
        generation; at once if it is known already. One act per generation.
        """

    def step_limit(self, seconds: float) -> None:
        """From now on a step of this member may take so long, with all that it waits for: if its generation
        ends meanwhile, the others wait that long for it to come. Never blocks.
        """

    def phase(self, name: str) -> None:
        """What this member does from now on (one of `phases.PHASE_LIMITS_S`), so that the others know how
        long to wait for it; never blocks.
        """

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """This member has read so many bytes of all that it reads of the point; never blocks."""

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """Takes the records of new steps; never blocks. Called by rank 0 only."""

    def digest(self, view: GenerationView, key: StateKey, weights_digest: str) -> None:
        """Takes the digest of the weights of `key`, this generation's newest state; never blocks, and may be
        lost. Called by rank 0 only.
        """

    def vote(self, vote: Vote) -> Future[bool]:
        """Sends a vote; True: the point is committed, False: the save was given up. Never blocks. An
        exception ends the member.
        """

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        """This rank, which is that of `view`, has no part of the save of `key` and writes none any more: the
        save is to be given up, and the member trains on. Never blocks; answered False when that is known. An
        exception ends the member.
        """

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        """Whether it is known that the save of `key`, which this member began as that of `view`, will not be
        committed; never blocks. Asked again and again while that save is not answered. `progress` grows
        while the part is written, and may be asked from any thread until the save's vote or report is given.
        """

    def finished(self, key: StateKey, reason: str) -> None:
        """This member's part is over: `done` (budget or data exhausted) or `stopped` (save and stop). `key`
        is in a committed point, or is the parent that the generation began with.
        """


class Feed(Protocol):
    """What is trained. Its answers depend only on the sample range, never on who asks or when."""

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """A new generation, which goes on at `cursor`: what was fetched ahead is dropped unless it is still
        this rank's. Idempotent.
        """

    def prefetch(self, steps: Sequence[StepRange], rank: int, world_size: int, micro_batch_size: int) -> None:
        """The slices of these steps will probably be asked for next, in this order; the feed fetches as many
        of them as it likes. Never blocks and never fails.
        """

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """This rank's share of `step`; blocks until it is there. `cursor` is that of the last applied step,
        from which a feeder that has lost its place is re-opened. At the end of the data the answer's `step`
        is smaller than asked for, 0 samples when nothing is left.

        Raises `FeedError` if it cannot be served, and `RuntimeError` if the generation has ended for the
        others: the loop then leaves it.
        """
