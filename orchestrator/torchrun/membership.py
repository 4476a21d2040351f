"""The membership of a group that never changes: the ranks that torchrun started, in one generation.

It uses torchrun's store. The recorder in rank 0's process handles claims, commits and journal.
"""

from __future__ import annotations

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
from orchestrator.json_form import decode, encode
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import (
    ControlRequests,
    GenerationView,
    HeldShard,
    MemberState,
    ShardSource,
    Source,
)
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.torchrun.growing_parts import Growth, place_of, wait_while_growing
from orchestrator.torchrun.store_rendezvous import StoreRendezvous


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The beginning of a static group: the claim's attempt, the only generation, and the state to continue.

    See `GenerationView`.
    """

    launch: str
    attempt: int
    generation: int
    parent: StateKey | None
    point: str | None
    cursor: Cursor | None
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartFailed:
    """What a rank sends instead of its vote."""

    key: StateKey
    rank: int
    reason: str


class Recorder(Protocol):
    """The coordinator's work (claim, commits, journal) for a static group. It runs in rank 0's process.

    Called from several threads.
    """

    def begin(self, world_size: int) -> Start:
        """Claims the run and journals the first generation. Raises what refuses the start."""

    def again(self, key: StateKey, cursor: Cursor | None) -> Start:
        """Journals another generation of the same ranks, which all hold the state `key` at `cursor`.

        Raises what has ended the recording.
        """

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """Reports how many bytes rank 0 has read of those that it loads."""

    def records(self, records: Sequence[StepRecord]) -> None:
        """Journals records in the background; never blocks."""

    def digest(self, key: StateKey, weights_digest: str) -> None:
        """Journals the digest of the weights of `key` in the background; never blocks."""

    def acknowledged_step(self) -> int:
        """Returns the label up to which all records are durable; −1: none."""

    def asked(self) -> tuple[bool, bool]:
        """Returns whether a save, and whether a stop, was requested from outside."""

    def ask_save(self, by: str) -> None:
        """Requests a save, for a signal; never blocks."""

    def vote(self, vote: Vote) -> Future[bool]:
        """Takes a rank's vote. True: committed. False: given up. The answer is the same for all ranks."""

    def save_failed(self, key: StateKey, rank: int, world_size: int, reason: str) -> None:
        """Takes, instead of a rank's vote, that it could not write its part.

        All votes for that save are answered False.
        """

    def finished(self, key: StateKey, reason: str, stop_by: str = "") -> None:
        """Ends the run; called once. `stop_by`: the sender of a signal to stop ("": there was none)."""


class StaticMembership:
    """The group that torchrun started.

    The first failure ends it, and torchrun starts all ranks again. The exception is a last save that was
    given up: then all ranks form another generation and save under its name.

    `recorder` is needed on rank 0 only. `ask_stop` may be called from a signal handler; only rank 0's call
    has an effect. All ranks' answers go through torchrun's store.
    """

    def __init__(
        self, rendezvous: StoreRendezvous, recorder: Recorder | None, vote_limit_s: float = 600.0
    ) -> None:
        """`vote_limit_s`: how long a vote may stay unanswered while no rank writes more of its part."""
        self.member = secrets.token_hex(6)
        self._rendezvous = rendezvous
        # The group's store must stay free while votes wait. This one is opened now, because a new connection
        # to a torchrun that is gone is retried for minutes.
        self._voting = rendezvous.again()
        assert (recorder is not None) == (rendezvous.rank == 0), (
            f"rank 0 alone has a recorder; this is rank {rendezvous.rank}"
        )
        self._recorder = recorder
        self._limit_s = vote_limit_s
        self._growth = Growth(rendezvous.store, rendezvous.rank)
        self._stop, self._stop_by = threading.Event(), ""
        self._num_generations = 0
        self._votes: queue.SimpleQueue[tuple[Vote | _PartFailed, Future[bool]]] = queue.SimpleQueue()
        # A daemon, so that a process whose group came apart ends although a vote is unanswered.
        threading.Thread(target=self._exchange_votes, name="vote", daemon=True).start()

    def ask_stop(self, by: str = "") -> None:
        """Requests a save and stop at the next step boundary; `by` is the origin."""
        self._stop_by = self._stop_by or by
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._stop.is_set()

    def ask_save(self, by: str = "") -> None:
        """Requests a save at the next step boundary, if this is rank 0; `by` is the origin."""
        if self._recorder is not None:
            self._recorder.ask_save(by)

    def join(self, state: MemberState) -> GenerationView | None:
        """See `Membership`. A second call raises `ElasticError`, unless the last save was given up.

        All ranks know of a save that was given up.
        """
        rendezvous = self._rendezvous
        if self._num_generations and not state.unsaved:
            raise ElasticError(
                f"the group of {rendezvous.world_size} ranks ended ({state.reason}), and under torchrun its "
                "processes form no other one; start the same command again",
                code="training.group_ended",
            )
        self._num_generations += 1
        place = f"start/{self._num_generations}"
        mine = {"member": self.member, "holds": [encode(held) for held in state.holdings]}
        rendezvous.store.set(f"{place}/{rendezvous.rank}", json.dumps(mine))
        if self._recorder is not None:
            with rendezvous.reporting_failure(place):
                begin = self._begin(self._recorder, place, state)
                rendezvous.publish(place, encode(begin))
        begin = decode(Start, rendezvous.receive(place))
        told = self._told_at(place)
        sources = _sources([held for _, held in told], begin.parent) if self._num_generations > 1 else ()
        return GenerationView(
            attempt=begin.attempt,
            generation=begin.generation,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            members=tuple(member for member, _ in told),
            host="",  # the store is torchrun's
            port=0,
            parent=begin.parent,
            source_rank=0 if sources else None,
            sources=sources,
            point=begin.point,
            cursor=begin.cursor,
            step=begin.step,
            launch=begin.launch,
        )

    def _begin(self, recorder: Recorder, place: str, state: MemberState) -> Start:
        """Begins on rank 0: the first generation, or another one of ranks that all hold one state."""
        if self._num_generations == 1:
            return recorder.begin(self._rendezvous.world_size)
        assert state.key is not None, "a last state is one"
        without = [rank for rank, (_, held) in enumerate(self._told_at(place)) if not _live(held, state.key)]
        if without:
            raise ElasticError(
                f"rank 0 has the state {state.key.point_name}, which must be saved again, and ranks "
                f"{', '.join(map(str, without))} do not have it; start the same command again",
                code="training.states_differ",
            )
        return recorder.again(state.key, state.cursor)

    def _told_at(self, place: str) -> list[tuple[str, list[HeldShard]]]:
        """Returns what each rank sent when it joined: its name, and what it holds."""
        store, world_size = self._rendezvous.store, self._rendezvous.world_size
        told = [json.loads(store.get(f"{place}/{rank}")) for rank in range(world_size)]
        return [(each["member"], [decode(HeldShard, held) for held in each["holds"]]) for each in told]

    def connect_store(self, view: GenerationView) -> Store:
        """See `Membership`."""
        return PrefixStore(f"group/{view.launch}/{view.attempt}/{view.generation}", self._rendezvous.store)

    def control_requests(self, view: GenerationView) -> ControlRequests:
        """See `Membership`: only rank 0 has requests."""
        del view
        save, stop, acknowledged = False, False, -1
        if self._recorder is not None:
            (save, stop), acknowledged = self._recorder.asked(), self._recorder.acknowledged_step()
        stop = stop or self._stop.is_set()
        return ControlRequests(
            ended=False, save=save, stop=stop, reform=False, acknowledged_step=acknowledged
        )

    def when_ended(self, view: GenerationView, act: Callable[[], None]) -> None:
        """See `Membership`: a static group ends only by a failing collective."""

    def step_limit(self, seconds: float) -> None:
        """See `Membership`: no member is waited for."""

    def phase(self, name: str) -> None:
        """See `Membership`: no member is left out of a static group."""

    def loading(self, done_bytes: int, num_bytes: int) -> None:
        """See `Membership`: rank 0's share is shown."""
        if self._recorder is not None:
            self._recorder.loading(done_bytes, num_bytes)

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        """See `Membership`."""
        del view
        assert self._recorder is not None, "rank 0 reports"
        self._recorder.records(records)

    def digest(self, view: GenerationView, key: StateKey, weights_digest: str) -> None:
        """See `Membership`."""
        del view
        assert self._recorder is not None, "rank 0 reports"
        self._recorder.digest(key, weights_digest)

    def vote(self, vote: Vote) -> Future[bool]:
        """See `Membership`: rank 0 collects all votes and publishes the recorder's answer."""
        answer: Future[bool] = Future()
        self._votes.put((vote, answer))
        return answer

    def save_failed(self, view: GenerationView, key: StateKey, error: OrchestratorError) -> Future[bool]:
        """See `Membership`: sent instead of this rank's vote, for which the others wait."""
        failed = _PartFailed(key=key, rank=view.rank, reason=str(error))
        answer: Future[bool] = Future()
        self._votes.put((failed, answer))
        return answer

    def is_given_up(self, view: GenerationView, key: StateKey, progress: Callable[[], int]) -> bool:
        """See `Membership`: a save is decided only when all ranks have written or failed.

        Reports to the waiting ranks that this rank is still writing.
        """
        del view
        self._growth.tell(key, progress())
        return False

    def finished(self, key: StateKey, reason: str) -> None:
        """See `Membership`."""
        if self._recorder is not None:
            self._recorder.finished(key, reason, self._stop_by)

    def _exchange_votes(self) -> None:
        """Runs the voting thread: one vote after the other."""
        while True:
            vote, answer = self._votes.get()
            try:
                answer.set_result(self._exchange(vote))
            except (RuntimeError, TimeoutError) as error:  # raised by the store and by a future
                unanswered = ElasticError(
                    f"the vote for {vote.key.point_name} had no answer ({type(error).__name__}: {error}; "
                    f"allowed while no rank writes more of its part: {self._limit_s:.0f} s); "
                    "start the same command again",
                    code="training.vote_unanswered",
                )
                answer.set_exception(unanswered)
            except Exception as error:  # noqa: BLE001  the thread that waits for the answer raises it
                answer.set_exception(error)

    def _exchange(self, vote: Vote | _PartFailed) -> bool:
        rendezvous, place = self._voting, place_of(vote.key)
        own = {"failed": vote.reason} if isinstance(vote, _PartFailed) else {"vote": encode(vote)}
        rendezvous.store.set(f"{place}/{vote.rank}", json.dumps(own))
        if self._recorder is not None:
            with rendezvous.reporting_failure(f"{place}/answer"):
                ranks = [f"{place}/{rank}" for rank in range(rendezvous.world_size)]
                self._wait(ranks, vote.key)
                said = [json.loads(rendezvous.store.get(name)) for name in ranks]
                failed = {rank: each["failed"] for rank, each in enumerate(said) if "failed" in each}
                for rank, reason in failed.items():
                    self._recorder.save_failed(vote.key, rank, rendezvous.world_size, reason)
                votes = [decode(Vote, each["vote"]) for each in said if "vote" in each]
                answers = [self._recorder.vote(each) for each in votes]
                all_say_so = [answer.result(self._limit_s) for answer in answers]
                committed = all(all_say_so) and not failed
                rendezvous.publish(f"{place}/answer", committed)
        self._wait([f"{place}/answer"], vote.key)
        return bool(rendezvous.receive(f"{place}/answer"))

    def _wait(self, names: Sequence[str], key: StateKey) -> None:
        here = self._voting
        wait_while_growing(here.store, names, key, here.world_size, self._limit_s)


def _live(held: Sequence[HeldShard], key: StateKey) -> HeldShard | None:
    """Returns the shard of the state `key` that a rank trains."""
    return next((each for each in held if each.source == Source.LIVE and each.key == key), None)


def _sources(
    held: Sequence[Sequence[HeldShard]], key: StateKey | None
) -> tuple[tuple[ShardSource, ...], ...]:
    """See `GenerationView.sources`. `held` is by rank; all ranks train the state `key`."""
    assert key is not None, "a generation that follows another one continues a state"
    shards = [each for of_one in held if (each := _live(of_one, key)) is not None]
    return tuple(
        tuple(ShardSource(rank=r, source=Source.LIVE) for r, each in enumerate(shards) if each.shard == shard)
        for shard in range(shards[0].num_shards)
    )
