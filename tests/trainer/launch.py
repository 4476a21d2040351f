"""A launch whose coordinator is the real one, in the test's process, and whose members reach it over a local
socket instead of Ray.

Who is dead is known at once, because a killed process closes its connection. Each member has one connection,
and what the launch sends over it arrives in order; so a test can hold a member at a named place, change the
world, and let it go on. What passes is noted, and nothing is changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from blake3 import blake3

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.sections import TrainConfig
from orchestrator.coordinator.actor import Coordinator
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.elastic.formation import GroupSize, RendezvousSettings
from orchestrator.history.claims.claim_files import RESUME, START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.journal.journal_reader import Journal, read_journal
from orchestrator.launch.member.coordinator_calls import UnansweredError
from orchestrator.planning.loss_policy import window_of
from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import ControlRequests, GenerationView, JoinRequest
from orchestrator.records.points import Vote
from orchestrator.records.run_status import RunStatus
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage

KEY = b"only against mistakes"
WAIT_S = 240.0  # on a busy machine, and the server of the members begins in it
LAUNCH = "test"
CONFIG = {"train.seed": 0, "train.global_batch_size": 12, "pack.seq_len": 8}
# a joiner is let in at the next step boundary; whoever is held is not waited for long
SETTINGS = RendezvousSettings(join_debounce_s=0.0, missing_grace_s=10.0)


@dataclasses.dataclass(frozen=True)
class Point:
    """A committed point."""

    key: StateKey
    cursor: Cursor
    state_digest: str  # of weights and optimizer
    votes: tuple[Vote, ...]


_at_work: list[Launch] = []


def end_all() -> None:
    """All launches end: a test that is over leaves none that beats and asks on, and none that holds files."""
    while _at_work:
        _at_work.pop().end()


class Launch:
    """A coordinator that waits for `first_size` members. `attempt` above 1 continues `point` under the label
    `step` (default: the point's own).
    """

    def __init__(
        self,
        folder: Path,
        first_size: int,
        attempt: int = 1,
        point: str | None = None,
        step: int | None = None,
        settings: RendezvousSettings = SETTINGS,
        storage: Storage | None = None,
        storage_limit_s: float = 60.0,
        max_failures: int = 100,
        sharded: bool = False,
        policies: TrainConfig | None = None,
    ) -> None:
        """`policies`: the job's `train`, if it has policies about losses."""
        self.storage = Storage(str(folder))
        self.changed = threading.Condition()
        self.records: dict[StateKey, StepRecord] = {}
        self.outcomes: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.finished: dict[str, tuple[StateKey, str]] = {}
        self.views: list[GenerationView] = []  # as rank 0 sees them
        self.joins: list[tuple[str, JoinRequest]] = []
        self.warnings: list[str] = []
        self.acknowledge = True
        self._links: dict[str, Connection] = {}
        self._held: dict[str, str] = {}
        self._gone: set[str] = set()
        self._votes: dict[str, dict[int, Vote]] = {}
        self._told: dict[tuple[int, int], ControlRequests] = {}
        self._start = self._claimed(attempt, point, step)
        self._start = dataclasses.replace(
            self._start,
            size=GroupSize(min_workers=1, max_workers=8, expected=first_size),
            max_failures=max_failures,
            rendezvous=settings,
            storage_limit_s=storage_limit_s,
            sharded=sharded,
        )
        if policies is not None:
            given = policies.model_dump(mode="json")
            config = {f"train.{name}": given[name] for name in ("on_nonfinite", "on_spike")}
            self._start = dataclasses.replace(
                self._start, flat_config={**CONFIG, **config}, loss_window=window_of(policies)
            )
        self._loop = asyncio.new_event_loop()
        self._looping = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._looping.start()
        self._made: list[Coordinator] = []
        self.coordinator = self._new_coordinator(storage)
        # no port: what other tests' processes still try to reach might be the same one
        self._listener = Listener(family="AF_UNIX", backlog=16, authkey=KEY)
        self.address = self._listener.address
        self._over = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        _at_work.append(self)

    def _claimed(self, number: int, name: str | None, step: int | None) -> CoordinatorStart:
        store = RunStore(self.storage)
        store.claim(number, LAUNCH, START if name is None else RESUME, "host")
        point = None if name is None else store.read_point(name)
        inherited = () if name is None else (name,)
        store.write_parent(
            ClaimParent(attempt=number, parent=point.key if point else None, inherited=inherited)
        )
        label = step if step is not None else point.key.step if point else 0
        return CoordinatorStart(
            attempt=Attempt(
                number=number,
                launch=LAUNCH,
                why=START,
                point=point,
                inherited=inherited,
                step_label=label,
                budgets=Budgets(),
                encoders=(),
            ),
            storage=self.storage.root,
            size=GroupSize.fixed(1),
            max_failures=3,
            keep_latest=100,
            run="tiny",
            global_batch_size=12,
            seq_len=8,
            flat_config=CONFIG,
            rng={"rule": "none"},
        )

    def _new_coordinator(self, storage: Storage | None = None) -> Coordinator:
        async def make() -> Coordinator:
            made = Coordinator(self._start, lambda info: "gone" if info.actor_id in self._gone else None)
            if storage is not None:
                made._journal._log._storage = made._driver._store.storage = storage
            self._made.append(made)
            await made.expect(self._start.size.expected)
            return made

        return self.run(make())

    # ------------------------------------------------------------------------------------------ for the test
    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a call of the coordinator."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """A call of the coordinator that lives now; waits for nothing."""
        return asyncio.run_coroutine_threadsafe(getattr(self.coordinator, method)(*arguments), self._loop)

    def status(self) -> RunStatus:
        return self.run(self.coordinator.status((-1, -1), 0.0))

    def wait_for(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.errors) or what(), WAIT_S), (
                "nothing happened in time"
            )
        assert not self.errors, self.errors

    def wait_for_end(self) -> RunStatus:
        """The status that says how the run ended."""
        status = self.status()
        while status.ended is None:
            status = self.run(self.coordinator.status((status.attempt, status.version), 1.0))
        return status

    def request_stop(self) -> None:
        self.run(self.coordinator.stop("a test"))

    def restart_coordinator(self) -> None:
        """Its process dies and Ray starts it anew: what it knew is what stands in storage."""

        self.close()
        self.coordinator = self._new_coordinator()

    def close(self) -> None:
        """The coordinator does nothing more."""

        async def die(old: Coordinator) -> None:
            for task in old._driver._tasks:
                task.cancel()

        self.run(die(self.coordinator))

    def end(self) -> None:
        """Nothing of it is left in this process, but connections of members that live."""

        async def drop_all() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self.run(drop_all())
        self._over = True
        Client(self.address, authkey=KEY).close()  # whoever accepts looks up
        self._accepting.join(WAIT_S)
        self._listener.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._looping.join(WAIT_S)
        self._loop.close()
        for journal in (made._journal for made in self._made):
            if journal._disk_lock.acquire(blocking=False):  # else a test's storage hangs for good
                journal._log.close()

    def declare_dead(self, name: str) -> None:
        """Ray says that the host of this member is gone. Its connections stay open: whoever loses power, or
        its network, closes none.
        """
        self._gone.add(name)

    def waits(self, name: str) -> bool:
        """It waits for the next generation, and rank 0 of the running one knows that it is to meet."""
        told = self._told.get((self.views[-1].attempt, self.views[-1].generation)) if self.views else None
        return name in self.coordinator._launch.waiting and told is not None and told.reform

    def is_asked(self, *, save: bool, reform: bool) -> bool:
        """Rank 0 of the newest generation knows that this is wanted."""
        told = self._told.get((self.views[-1].attempt, self.views[-1].generation)) if self.views else None
        return told is not None and (told.save, told.reform) == (save, reform)

    def acknowledged(self) -> int:
        """The newest step that rank 0 of the newest generation knows to be durable."""
        told = self._told.get((self.views[-1].attempt, self.views[-1].generation)) if self.views else None
        return told.acknowledged_step if told else -1

    def held(self, name: str) -> str | None:
        return self._held.get(name)

    def release(self, name: str) -> None:
        with self.changed:
            del self._held[name]
            self._send(name, "release")

    def has_links(self) -> bool:
        return bool(self._links)

    @property
    def points(self) -> dict[str, Point]:
        """The committed points, oldest first."""
        store = RunStore(self.storage)
        found = {name: store.read_point(name) for name in store.point_names()}
        return {
            name: Point(
                key=point.key,
                cursor=point.cursor,
                state_digest=self._state_digest(name),
                votes=tuple(self._votes.get(name, {}).values()),
            )
            for name, point in found.items()
        }

    def last_point(self) -> Point:
        return max(self.points.values(), key=lambda point: point.key)

    def journal(self) -> Journal:
        return read_journal(self.storage)

    def _state_digest(self, name: str) -> str:
        store = RunStore(self.storage)
        forms = [(t.group, t.name, t.dtype, t.shape) for t in store.read_manifest(name).tensors.values()]
        return blake3(repr((sorted(forms), store.read_point(name).commit.state_sums)).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------ members
    def _accept(self) -> None:
        while True:
            link = self._listener.accept()
            if self._over:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: Connection) -> None:
        name = link.recv()
        with self.changed:
            self._links[name] = link
        while True:
            try:
                kind, *values = link.recv()
            except (EOFError, OSError):
                kind, values = "gone", []
            with self.changed:
                getattr(self, f"_on_{kind}")(name, *values)
                self.changed.notify_all()
            if kind == "gone":
                return

    def _on_gone(self, name: str) -> None:
        del self._links[name]
        self._gone.add(name)

    def _on_call(self, name: str, number: int, method: str, arguments: Sequence[Any]) -> None:
        if self._over:
            return
        self._note(name, method, arguments)
        call = getattr(self.coordinator, method)(*arguments)
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        future.add_done_callback(lambda done: self._answered(name, number, method, arguments, done))

    def _note(self, name: str, method: str, arguments: Sequence[Any]) -> None:
        records: Sequence[StepRecord] = ()
        if method == "join":
            (request,) = arguments
            self.joins.append((name, request))
            records = request.records
        elif method == "report":
            records = arguments[-1]
        elif method == "vote":
            vote = arguments[1]
            self._votes.setdefault(vote.key.point_name, {})[vote.rank] = vote
            records = vote.records
        elif method == "watch" and arguments[-1] is not None:
            self._told[arguments[1], arguments[2]] = arguments[-1]  # what the member has taken in
        elif method == "finished":
            self.finished[name] = (arguments[2], arguments[3])
        for record in records:
            known = self.records.setdefault(record.key, record)
            # when a step ended each rank saw for itself
            again = dataclasses.replace(record, ended=known.ended)
            assert known == again, f"two different records of one step: {known} and {record}"

    def _answered(
        self, name: str, number: int, method: str, arguments: Sequence[Any], done: Future[Any]
    ) -> None:
        with self.changed:
            if done.cancelled() or (error := done.exception()) is not None:
                self._send(name, "answer", number, False, None if done.cancelled() else error)
                return
            answer = done.result()
            if isinstance(answer, GenerationView) and answer.rank == 0:
                self.views.append(answer)
            if isinstance(answer, ControlRequests) and not self.acknowledge:
                answer = dataclasses.replace(answer, acknowledged_step=-1)
            self._send(name, "answer", number, True, answer)
            self.changed.notify_all()

    def _on_outcome(self, name: str, outcome: Any) -> None:
        self.outcomes[name] = outcome

    def _on_error(self, name: str, text: str) -> None:
        self.errors[name] = text

    def _on_hold(self, name: str, place: str) -> None:
        self._held[name] = place

    def _send(self, member: str, *message: Any) -> None:
        if member in self._links:
            try:
                self._links[member].send(message)
            except OSError:
                return  # it died just now; its connection will tell


class LinkCalls:
    """The member's side: `launch.member.coordinator_calls.Calls` over the connection. `hold` is no part of
    the protocol: it stops the caller until the test lets it go on.
    """

    def __init__(self, address: Any, name: str) -> None:
        self._link, self._lock = Client(address, authkey=KEY), threading.Lock()
        self._link.send(name)
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._released = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                kind, *values = self._link.recv()
            except (EOFError, OSError):
                return
            if kind == "release":
                self._released.set()
                continue
            number, worked, value = values
            future = self._answers.pop(number)
            if worked:
                future.set_result(value)
            else:
                future.set_exception(value or UnansweredError("the coordinator died"))

    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        number = next(self._numbers)
        future = self._answers[number] = Future()
        self.send("call", number, method, tuple(arguments))
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            raise UnansweredError(f"no answer to {method} within {limit_s:g} s") from error

    def send(self, *message: Any) -> None:
        with self._lock:
            self._link.send(message)

    def hold(self, place: str) -> None:
        self._released.clear()
        self.send("hold", place)
        assert self._released.wait(WAIT_S), f"held at {place} for ever"


def trained_steps(launch: Launch) -> list[tuple]:
    """What the journal says of the training itself; not the times."""
    records = sorted(launch.records.values(), key=lambda r: r.step)
    return [
        (r.step, r.loss, r.grad_norm, r.lr, r.digest, r.consumed_samples, r.target_tokens) for r in records
    ]
