"""The membership of a group that never changes: the ranks that torchrun started, in one generation.

It knows torchrun's environment and store; claims, commits and journal are the keeper's, in rank 0's process.
"""

from __future__ import annotations

import datetime
import json
import os
import queue
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from orchestrator.errors import ElasticError
from orchestrator.records import Cursor, GenerationView, StateKey, StepRecord, Vote, Wishes, decode, encode
from orchestrator.train.membership import STORE_TIMEOUT_S


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


def meet() -> tuple[Store, int, int]:
    """The store through which the ranks of this start of the group meet, this rank, and the world size.

    Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. torchrun keeps one store over its restarts, so the keys
    stand under TORCHELASTIC_RESTART_COUNT (0 where it is not set): no start reads what an older one wrote. It
    does not help where agents of several machines count differently.
    """
    store, rank, world_size = next(rendezvous("env://"))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"restart/{restart}", store), rank, world_size


class StaticMembership:
    """The group that torchrun started: one generation, and the first failure ends it (torchrun starts all
    ranks again).

    `keeper` is needed on rank 0 only. `ask_stop` may be called from a signal handler; rank 0's counts. All
    ranks' answers go through torchrun's store.
    """

    def __init__(self, keeper: Keeper | None, vote_limit_s: float = 600.0) -> None:
        """Meets the other ranks' store. `vote_limit_s`: how long a vote may stay unanswered."""
        self.member = secrets.token_hex(6)
        self._store, self._rank, self._world_size = meet()
        # a store serves one blocked caller at a time: the group's own must stay free while votes wait. It is
        # opened now, because a new connection to a torchrun that is gone is tried for 30 minutes
        self._vote_store, _, _ = meet()
        assert (keeper is not None) == (self._rank == 0), (
            f"rank 0 alone has a keeper; this is rank {self._rank}"
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

    def join(
        self,
        key: StateKey | None,
        cursor: Cursor | None,
        leaves: tuple[int, int] | None,
        prepared: StateKey | None,
        records: Sequence[StepRecord],
        reason: str,
    ) -> GenerationView | None:
        """See `Membership`; a second call raises `ElasticError`, because nobody can form another
        generation.
        """
        del key, cursor, leaves, prepared, records
        if self._joined:
            raise ElasticError(
                f"the static group of {self._world_size} ranks came apart ({reason}); "
                "start the same command again"
            )
        self._joined = True
        self._store.set(f"member/{self._rank}", self.member)
        if self._keeper is not None:
            with self._published("start", self._store):
                start = self._keeper.begin(self._world_size)
                self._store.set("start", json.dumps({"value": encode(start)}))
        begin = decode(Start, self._answer("start", self._store))
        names = [self._store.get(f"member/{rank}").decode() for rank in range(self._world_size)]
        return GenerationView(
            attempt=begin.attempt,
            generation=begin.generation,
            rank=self._rank,
            world_size=self._world_size,
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
        return PrefixStore(f"group/{view.launch}/{view.attempt}/{view.generation}", self._store)

    def wishes(self, view: GenerationView) -> Wishes:
        """See `Membership`: nothing but a stop is ever wished for."""
        del view
        acknowledged = self._keeper.acknowledged_step() if self._keeper is not None else -1
        return Wishes(
            ended=False, save=False, stop=self._stop.is_set(), reform=False, acknowledged_step=acknowledged
        )

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
        store, place = self._vote_store, f"vote/{vote.key.point_name}"
        store.set(f"{place}/{vote.rank}", json.dumps(encode(vote)))
        if self._keeper is not None:
            with self._published(f"{place}/answer", store):
                others = [f"{place}/{rank}" for rank in range(1, self._world_size)]
                store.wait(others, self._limit)
                votes = [vote, *(decode(Vote, json.loads(store.get(name))) for name in others)]
                answers = [self._keeper.vote(each) for each in votes]
                committed = all(answer.result(self._limit.total_seconds()) for answer in answers)
                store.set(f"{place}/answer", json.dumps({"value": committed}))
        store.wait([f"{place}/answer"], self._limit)
        return bool(self._answer(f"{place}/answer", store))

    @contextmanager
    def _published(self, name: str, store: Store) -> Iterator[None]:
        """An exception of rank 0 reaches the other ranks instead of leaving them waiting."""
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the store is gone
                store.set(name, json.dumps({"error": f"{type(error).__name__}: {error}"}))
                # it may end with this process: the others read it first, if they live
                heard = [f"{name}/heard/{rank}" for rank in range(1, self._world_size)]
                store.wait(heard, datetime.timedelta(seconds=STORE_TIMEOUT_S))
            raise

    def _answer(self, name: str, store: Store) -> object:
        answer = json.loads(store.get(name))
        if "error" in answer:
            store.set(f"{name}/heard/{self._rank}", "")
            raise ElasticError(f"rank 0 failed: {answer['error']}")
        return answer["value"]
