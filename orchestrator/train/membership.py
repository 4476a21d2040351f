"""What the loop asks of the outside, as two small protocols, and the membership of a group that never changes
(plain torchrun).

It knows no Ray and no coordinator; those who do implement the protocols elsewhere.
"""

from __future__ import annotations

import datetime
import json
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from orchestrator.errors import ElasticError
from orchestrator.records import (
    BatchSlice,
    Cursor,
    GenerationView,
    StateKey,
    StepRange,
    StepRecord,
    Vote,
    Wishes,
    decode,
    encode,
)

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

    def join(
        self,
        key: StateKey | None,
        cursor: Cursor | None,
        leaves: tuple[int, int] | None,
        prepared: StateKey | None,
        records: Sequence[StepRecord],
        reason: str,
    ) -> GenerationView | None:
        """Blocks until this member is in a new generation; None: the run is over for it, and it leaves.

        `key`, `cursor`: the state it holds (None: blank). `leaves`: (attempt, generation) it was in, None at
        first. `prepared`: the step whose word it waited for. `records`: all that were not acknowledged.
        `reason`: why the last generation ended, for the journal.
        """

    def connect_store(self, view: GenerationView) -> Store:
        """The store through which the generation's process group forms."""

    def wishes(self, view: GenerationView) -> Wishes:
        """The latest that is known of what the coordinator wants of this generation; never blocks.

        Rank 0 copies them into the word; the others use only `ended`. `acknowledged_step` counts in this
        generation's labels: all its records up to there are durable, and those of earlier generations with
        them; below the generation's first step it says nothing.
        """

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """Takes the records of new steps; never blocks. Called by rank 0 only."""

    def vote(self, vote: Vote) -> Future[bool]:
        """Sends a vote; True: the point is committed, False: the save was given up. An exception ends the
        member.
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

    def prefetch(self, step: StepRange, rank: int, world_size: int, micro_batch_size: int) -> None:
        """This slice will probably be asked for next; never blocks and never fails."""

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """This rank's share of `step`; blocks until it is there. `cursor` is that of the last applied step,
        from which a feeder that has lost its place is re-opened. At the end of the data the answer's `step`
        is smaller than asked for, 0 samples when nothing is left.

        Raises `FeedError` if it cannot be served, and `RuntimeError` if the generation has ended for the
        others: the loop then leaves it.
        """


# -------------------------------------------------------------------------------------------------- torchrun
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

    Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. `keeper` is needed on rank 0 only. `ask_stop` may be
    called from a signal handler; rank 0's counts. All ranks' answers go through torchrun's store.
    """

    def __init__(self, keeper: Keeper | None, vote_limit_s: float = 600.0) -> None:
        """Meets the other ranks' store. `vote_limit_s`: how long a vote may stay unanswered."""
        self.member = secrets.token_hex(6)
        self._store, self._rank, self._world_size = next(rendezvous("env://"))
        assert (keeper is not None) == (self._rank == 0), (
            f"rank 0 alone has a keeper; this is rank {self._rank}"
        )
        self._keeper = keeper
        self._limit = datetime.timedelta(seconds=vote_limit_s)
        self._stop = threading.Event()
        self._joined = False
        self._voters = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vote")

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
            with self._published("start"):
                start = self._keeper.begin(self._world_size)
                self._store.set("start", json.dumps({"value": encode(start)}))
        begin = decode(Start, self._answer("start"))
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

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """See `Membership`."""
        del view
        assert self._keeper is not None, "rank 0 reports"
        self._keeper.records(records)

    def vote(self, vote: Vote) -> Future[bool]:
        """See `Membership`: rank 0 collects all votes and publishes the keeper's answer."""
        return self._voters.submit(self._exchange, vote)

    def finished(self, key: StateKey, reason: str) -> None:
        """See `Membership`."""
        if self._keeper is not None:
            self._keeper.finished(key, reason)
        self._voters.shutdown()

    def _exchange(self, vote: Vote) -> bool:
        # a store object serves one blocked caller at a time: the group's own must stay free
        store, place = self._store.clone(), f"vote/{vote.key.point_name}"
        store.set(f"{place}/{vote.rank}", json.dumps(encode(vote)))
        if self._keeper is not None:
            with self._published(f"{place}/answer"):
                others = [f"{place}/{rank}" for rank in range(1, self._world_size)]
                store.wait(others, self._limit)
                votes = [vote, *(decode(Vote, json.loads(store.get(name))) for name in others)]
                answers = [self._keeper.vote(each) for each in votes]
                committed = all(answer.result(self._limit.total_seconds()) for answer in answers)
                store.set(f"{place}/answer", json.dumps({"value": committed}))
        store.wait([f"{place}/answer"], self._limit)
        return bool(self._answer(f"{place}/answer", store))

    @contextmanager
    def _published(self, name: str) -> Iterator[None]:
        """An exception of rank 0 reaches the other ranks instead of leaving them waiting."""
        try:
            yield
        except BaseException as error:
            store = self._store.clone()
            store.set(name, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            with suppress(
                RuntimeError
            ):  # the store ends with this process: the others read it first, if they live
                heard = [f"{name}/heard/{rank}" for rank in range(1, self._world_size)]
                store.wait(heard, datetime.timedelta(seconds=STORE_TIMEOUT_S))
            raise

    def _answer(self, name: str, store: Store | None = None) -> object:
        store = store or self._store
        answer = json.loads(store.get(name))
        if "error" in answer:
            store.set(f"{name}/heard/{self._rank}", "")
            raise ElasticError(f"rank 0 failed: {answer['error']}")
        return answer["value"]
