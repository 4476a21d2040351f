"""The membership of a group that never changes: the ranks that torchrun started, in one generation.

It knows torchrun's store; claims, commits and journal are the keeper's, in rank 0's process.
"""

from __future__ import annotations

import datetime
import json
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store

from orchestrator.errors import ElasticError, OrchestratorError
from orchestrator.records import (
    ControlRequests,
    Cursor,
    GenerationView,
    MemberState,
    StateKey,
    StepRecord,
    Vote,
    decode,
    encode,
)
from orchestrator.torchrun.store_rendezvous import StoreRendezvous


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """With what a static group begins: the claim's attempt, the only generation, and the state to continue
    (see `GenerationView`).
    """

    launch: str
    attempt: int
    generation: int
    parent: StateKey | None
    point: str | None
    cursor: Cursor | None
    step: int


class Keeper(Protocol):
    """The coordinator's work (claim, commits, journal) for a static group; lives in rank 0's process. Called
    from several threads.
    """

    def begin(self, world_size: int) -> Start:
        """Claims the run and journals the only generation. Raises whatever refuses the start."""

    def records(self, records: Sequence[StepRecord]) -> None:
        """Journals them in the background; never blocks."""

    def acknowledged_step(self) -> int:
        """The label up to which all records are durable; −1: none."""

    def vote(self, vote: Vote) -> Future[bool]:
        """A rank's vote; True: committed, False: given up. The answer is the same for all ranks."""

    def finished(self, key: StateKey, reason: str) -> None:
        """The run is over; called once."""


class StaticMembership:
    """The group that torchrun started: one generation, and the first failure ends it (torchrun starts all
    ranks again).

    `keeper` is needed on rank 0 only. `ask_stop` may be called from a signal handler; rank 0's counts. All
    ranks' answers go through torchrun's store.
    """

    def __init__(self, meeting: StoreRendezvous, keeper: Keeper | None, vote_limit_s: float = 600.0) -> None:
        """`vote_limit_s`: how long a vote may stay unanswered."""
        self.member = secrets.token_hex(6)
        self._meeting = meeting
        # the group's store must stay free while votes wait. This one is opened now, because a new connection
        # to a torchrun that is gone is tried for minutes
        self._voting = meeting.again()
        assert (keeper is not None) == (meeting.rank == 0), (
            f"rank 0 alone has a keeper; this is rank {meeting.rank}"
        )
        self._keeper = keeper
        self._limit = datetime.timedelta(seconds=vote_limit_s)
        self._stop = threading.Event()
        self._joined = False
        self._votes: queue.SimpleQueue[tuple[Vote, Future[bool]]] = queue.SimpleQueue()
        # a daemon, so that a process whose group came apart ends although a vote is unanswered
        threading.Thread(target=self._exchange_votes, name="vote", daemon=True).start()

    def ask_stop(self) -> None:
        """Save and stop at the next step boundary."""
        self._stop.set()

    def join(self, state: MemberState) -> GenerationView | None:
        """See `Membership`; a second call raises `ElasticError`, because nobody can form another
        generation.
        """
        meeting = self._meeting
        if self._joined:
            raise ElasticError(
                f"the static group of {meeting.world_size} ranks came apart ({state.reason}); "
                "start the same command again"
            )
        self._joined = True
        meeting.store.set(f"member/{meeting.rank}", self.member)
        if self._keeper is not None:
            with meeting.telling_failure("start"):
                meeting.tell("start", encode(self._keeper.begin(meeting.world_size)))
        begin = decode(Start, meeting.hear("start"))
        names = [meeting.store.get(f"member/{rank}").decode() for rank in range(meeting.world_size)]
        return GenerationView(
            attempt=begin.attempt,
            generation=begin.generation,
            rank=meeting.rank,
            world_size=meeting.world_size,
            members=tuple(names),
            host="",  # the store is torchrun's
            port=0,
            parent=begin.parent,
            source_rank=None,
            point=begin.point,
            cursor=begin.cursor,
            step=begin.step,
            launch=begin.launch,
        )

    def connect_store(self, view: GenerationView) -> Store:
        """See `Membership`."""
        return PrefixStore(f"group/{view.launch}/{view.attempt}/{view.generation}", self._meeting.store)

    def control_requests(self, view: GenerationView) -> ControlRequests:
        """See `Membership`: nothing but a stop is ever wished for."""
        del view
        acknowledged = self._keeper.acknowledged_step() if self._keeper is not None else -1
        return ControlRequests(
            ended=False, save=False, stop=self._stop.is_set(), reform=False, acknowledged_step=acknowledged
        )

    def when_ended(self, view: GenerationView, act: Callable[[], None]) -> None:
        """See `Membership`: nobody ends a static group but a collective that fails."""

    def step_limit(self, seconds: float) -> None:
        """See `Membership`: nobody is waited for."""

    def phase(self, name: str) -> None:
        """See `Membership`: nobody is left out of a static group."""

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """See `Membership`."""
        del view
        assert self._keeper is not None, "rank 0 reports"
        self._keeper.records(records)

    def vote(self, vote: Vote) -> Future[bool]:
        """See `Membership`: rank 0 collects all votes and publishes the keeper's answer."""
        answer: Future[bool] = Future()
        self._votes.put((vote, answer))
        return answer

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> None:
        """See `Membership`: the group ends with `error`, because the others wait for this rank's vote."""
        del view, key
        raise error

    def finished(self, key: StateKey, reason: str) -> None:
        """See `Membership`."""
        if self._keeper is not None:
            self._keeper.finished(key, reason)

    def _exchange_votes(self) -> None:
        """The voting thread: one vote after the other."""
        while True:
            vote, answer = self._votes.get()
            try:
                answer.set_result(self._exchange(vote))
            except (RuntimeError, TimeoutError) as error:  # what the store and a future raise
                limit_s = self._limit.total_seconds()
                told = ElasticError(
                    f"the vote for {vote.key.point_name} found no answer, for which it has {limit_s:.0f} s "
                    f"({type(error).__name__}: {error}); start the same command again"
                )
                answer.set_exception(told)
            except Exception as error:  # noqa: BLE001  whoever waits for the answer raises it
                answer.set_exception(error)

    def _exchange(self, vote: Vote) -> bool:
        meeting, place = self._voting, f"vote/{vote.key.point_name}"
        meeting.store.set(f"{place}/{vote.rank}", json.dumps(encode(vote)))
        if self._keeper is not None:
            with meeting.telling_failure(f"{place}/answer"):
                others = [f"{place}/{rank}" for rank in range(1, meeting.world_size)]
                meeting.store.wait(others, self._limit)
                votes = [vote, *(decode(Vote, json.loads(meeting.store.get(name))) for name in others)]
                answers = [self._keeper.vote(each) for each in votes]
                committed = all(answer.result(self._limit.total_seconds()) for answer in answers)
                meeting.tell(f"{place}/answer", committed)
        return bool(meeting.hear(f"{place}/answer", self._limit))
