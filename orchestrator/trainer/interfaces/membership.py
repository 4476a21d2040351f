"""The loop's interfaces to membership and data, and the store through which a group forms."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from orchestrator.errors import OrchestratorError
from orchestrator.records.cursor import Cursor
from orchestrator.records.evals import EvalRecord
from orchestrator.records.membership import ControlRequests, GenerationView, MemberState
from orchestrator.records.points import Vote
from orchestrator.records.steps import BatchSlice, StateKey, StepRange, StepRecord

STORE_TIMEOUT_S = 10.0


def open_store(host: str) -> TCPStore:
    """Opens this member's own store, on a port that the system chooses (`.port`), as master.

    A member has one such store for its whole life.
    """
    return TCPStore(
        host,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
    )


def connect_store(own: TCPStore, view: GenerationView) -> Store:
    """Connects to the store of the generation's rank 0, with keys under launch/attempt/generation.

    Raises `RuntimeError` if it cannot be reached.
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
    """The members that train together. `member` is this process's random name."""

    member: str

    def join(self, state: MemberState) -> GenerationView | None:
        """Blocks until this member is in a new generation. None: the run is over for it, and it leaves."""

    def connect_store(self, view: GenerationView) -> Store:
        """Returns the store through which the generation's process group forms."""

    def control_requests(self, view: GenerationView) -> ControlRequests:
        """Returns the latest known requests of the coordinator for this generation. Never blocks.

        Rank 0 copies them into the summary. The other ranks use only `ended`. `acknowledged_step` is a label
        of this generation: all its records up to that step are durable, and so are all records of earlier
        generations. A value below the generation's first step has no meaning.
        """

    def when_ended(self, view: GenerationView, act: Callable[[], None]) -> None:
        """Registers `act`, which is called from any thread as soon as the end of the generation is known.

        It is called at once if the end is already known. There is one act per generation.
        """

    def step_limit(self, seconds: float) -> None:
        """Sets how long a step of this member may take from now on, with everything that it waits for.

        If its generation ends meanwhile, the other members wait this long for it. Never blocks.
        """

    def phase(self, name: str) -> None:
        """Reports this member's current phase (one of `job.PHASE_LIMITS_S`). Never blocks.

        The other members derive from it how long to wait for this one.
        """

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """Reports how many bytes of the point this member has read, of all that it reads. Never blocks."""

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """Reports the records of new steps. Never blocks. Called by rank 0 only."""

    def digest(self, view: GenerationView, key: StateKey, weights_digest: str) -> None:
        """Reports the digest of the weights of `key`, this generation's newest state. Never blocks.

        The report may be lost. Called by rank 0 only.
        """

    def evaluated(self, view: GenerationView, record: EvalRecord, is_last: bool) -> None:
        """Reports the evaluation of one part; `is_last`: all parts are evaluated. Never blocks. Called by
        rank 0 only.

        If the report is lost with this member, a later generation evaluates again.
        """

    def send_reports(self) -> bool:
        """Waits until the coordinator has everything that this member has reported.

        Returns whether all evaluations are durable. A restarted coordinator does not take those of a
        generation before it. Raises what the loop's own calls raise if the coordinator stays away.
        """

    def callback_failed(self, text: str, stops: bool) -> None:
        """Reports an error of a callback; `stops`: it is to save and stop the run. Never blocks.

        May be called from any thread.
        """

    def vote(self, vote: Vote) -> Future[bool]:
        """Sends a vote. True: the point is committed. False: the save was given up. Never blocks.

        An exception of the future ends the member.
        """

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        """Reports that this rank has no part of the save of `key` and will not write one.

        The rank is that of `view`. The save is to be given up, and the member continues to train. Never
        blocks. The future is False once that is known. An exception of the future ends the member.
        """

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        """Whether it is known that the save of `key` will not be committed.

        This member began the save as that of `view`. Never blocks. Called repeatedly while that save is not
        answered. `progress` grows while the part is written. It may be called from any thread until the
        save's vote or report is given.
        """

    def finished(self, key: StateKey, reason: str) -> None:
        """Reports that this member's part is over: `done` (budget or data exhausted) or `stopped` (save and
        stop).

        `key` is in a committed point, or is the parent that the generation began with.
        """


class Feed(Protocol):
    """The source of training samples. Its answers depend only on the sample range, not on the caller or the
    time.
    """

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """Starts a new generation, which continues at `cursor`. Idempotent.

        Prefetched slices are dropped unless they still belong to this rank.
        """

    def prefetch(self, steps: Sequence[StepRange], rank: int, world_size: int, micro_batch_size: int) -> None:
        """Announces the slices that will probably be requested next, in this order. Never blocks and never
        fails.

        The feed fetches as many of them as it chooses.
        """

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """Returns this rank's share of `step`; blocks until it is available.

        `cursor` is that of the last applied step. A feeder that has lost its place is reopened there. At the
        end of the data the answer's `step` is smaller than requested, with 0 samples if nothing is left.

        Raises `FeedError` if the share cannot be served. Raises `RuntimeError` if the generation has ended
        for the others; the loop then leaves it.
        """
