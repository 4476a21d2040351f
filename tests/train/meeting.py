"""A second implementation of `Membership`: a rendezvous in the test's process that members reach over a local
socket.

Who is dead is known at once, because a killed process closes its connection. Each member has one connection,
and what the meeting sends over it arrives in order; so a test can hold a member at a named place, change the
world, and let it go on.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from blake3 import blake3

from orchestrator.records import (
    Cursor,
    GenerationView,
    StateKey,
    StepRecord,
    Vote,
    Wishes,
    encode,
)
from orchestrator.storage import Storage

KEY = b"only against mistakes"
WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Join:
    key: StateKey | None
    cursor: Cursor | None
    leaves: tuple[int, int] | None
    prepared: StateKey | None
    records: tuple[StepRecord, ...]
    reason: str
    port: int


@dataclasses.dataclass(frozen=True)
class Point:
    key: StateKey
    cursor: Cursor
    state_digest: str  # of weights and optimizer
    votes: tuple[Vote, ...]


class Meeting:
    """Forms generations of all who live, from the newest state over members and points; commits a save when
    all its votes are in."""

    def __init__(
        self,
        folder: Path,
        first_size: int,
        attempt: int = 1,
        step: int | None = None,
        points: dict[str, Point] | None = None,
    ) -> None:
        self.storage = Storage(str(folder))
        self.changed = threading.Condition()
        self.records: dict[StateKey, StepRecord] = {}
        self.points = dict(points or {})
        self.outcomes: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.finished: dict[str, tuple[StateKey, str]] = {}
        self.views: list[GenerationView] = []  # as rank 0 sees them
        self.joins: list[tuple[str, Join]] = []
        self.acknowledge = True
        self._first_size, self._attempt, self._step = first_size, attempt, step
        self._links: dict[str, Connection] = {}
        self._members: tuple[str, ...] = ()
        self._waiting: dict[str, Join] = {}
        self._held: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._votes: dict[str, dict[int, Vote]] = {}
        self._voters: dict[str, tuple[str, ...]] = {}
        self._wish = {"save": False, "stop": False, "reform": False}
        self._listener = Listener(("127.0.0.1", 0), backlog=16, authkey=KEY)
        self.address = self._listener.address
        threading.Thread(target=self._accept, daemon=True).start()

    # ------------------------------------------------------------------------------------------ for the test
    def wait_for(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.errors) or what(), WAIT_S), (
                "nothing happened in time"
            )
        assert not self.errors, self.errors

    def wish(self, **wishes: bool) -> None:
        with self.changed:
            self._wish |= wishes
            self._tell_wishes()

    def waits(self, name: str) -> bool:
        return name in self._waiting

    def held(self, name: str) -> str | None:
        return self._held.get(name)

    def release(self, name: str) -> None:
        with self.changed:
            del self._held[name]
            self._send(name, "release")

    def leave_out(self, name: str) -> None:
        """It is silent: the others go on without it, until it comes."""
        with self.changed:
            self._left_out.add(name)
            self._form()

    def has_links(self) -> bool:
        return bool(self._links)

    def last_point(self) -> Point:
        return max(self.points.values(), key=lambda point: point.key)

    # ------------------------------------------------------------------------------------------------ members
    def _accept(self) -> None:
        while True:
            link = self._listener.accept()
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
                try:
                    getattr(self, f"_on_{kind}")(name, *values)
                except Exception as error:  # noqa: BLE001  the test reads it
                    self.errors["meeting"] = f"{type(error).__name__}: {error}"
                self.changed.notify_all()
            if kind == "gone":
                return

    def _on_gone(self, name: str) -> None:
        del self._links[name]
        self._waiting.pop(name, None)
        self._form()

    def _on_join(self, name: str, join: Join) -> None:
        self.joins.append((name, join))
        self._left_out.discard(name)
        self._waiting[name] = join
        for record in join.records:
            self._journal(record)
        if name not in self._members:
            self._wish["reform"] = True
            self._tell_wishes()
        self._form()

    def _on_report(self, name: str, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._journal(record)
        self._tell_wishes()

    def _on_vote(self, name: str, vote: Vote) -> None:
        point = vote.key.point_name
        votes = self._votes.setdefault(point, {})
        votes[vote.rank] = vote
        self._voters.setdefault(point, self._members)
        for record in vote.records:
            self._journal(record)
        if len(votes) == vote.world_size:
            self._commit(point, tuple(votes[rank] for rank in sorted(votes)))

    def _on_finished(self, name: str, key: StateKey, reason: str) -> None:
        self.finished[name] = (key, reason)

    def _on_outcome(self, name: str, outcome: Any) -> None:
        self.outcomes[name] = outcome

    def _on_error(self, name: str, text: str) -> None:
        self.errors[name] = text

    def _on_hold(self, name: str, place: str) -> None:
        self._held[name] = place

    # ------------------------------------------------------------------------------------------------ inside
    def _journal(self, record: StepRecord) -> None:
        known = self.records.setdefault(record.key, record)
        assert known == record, f"two different records of one step: {known} and {record}"

    def _commit(self, name: str, votes: tuple[Vote, ...]) -> None:
        first = votes[0]
        for vote in votes:
            same = dataclasses.replace(
                vote,
                rank=0,
                files=first.files,
                tensors=first.tensors,
                records=first.records,
                save_blocked_s=first.save_blocked_s,
            )
            assert same == first, f"votes of one save differ: {vote} and {first}"
        tensors = sorted((t for vote in votes for t in vote.tensors), key=lambda t: (t.group, t.name))
        document = json.dumps({"format": 1, "tensors": encode(tensors)}).encode()
        self.storage.write(f"points/{name}/parts.json", document)
        contents = [(t.group, t.name, t.dtype, t.shape, t.chunks[0].digest) for t in tensors]
        assert len(set(contents)) == len(contents), "a tensor was saved twice"
        digest = blake3(repr(contents).encode()).hexdigest()
        self.points[name] = Point(key=first.key, cursor=first.cursor, state_digest=digest, votes=votes)
        self._wish["save"] = False
        self._answer(name, True)

    def _answer(self, name: str, committed: bool) -> None:
        for member in self._voters.pop(name):
            self._send(member, "answer", name, committed)
        self._votes.pop(name)

    def _form(self) -> None:
        awaited = self._links.keys() - self.finished.keys() - self._left_out
        live = [member for member in self._members if member in awaited]
        if not self._waiting or any(m not in self._waiting for m in live):
            return
        if not self._members and len(self._waiting) < self._first_size:
            return
        if self.finished:
            for member in self._waiting:
                self._send(member, "view", None)
            self._waiting.clear()
            return
        for point in list(self._votes):
            self._answer(point, False)  # a missing vote will never come
        held = {member: join for member, join in self._waiting.items() if join.key is not None}
        source = max(sorted(held), key=lambda m: held[m].key, default=None)  # type: ignore[arg-type, return-value]
        point = max(self.points.values(), key=lambda p: p.key, default=None)
        if source is not None and (point is None or held[source].key >= point.key):  # type: ignore[operator]
            parent, cursor, name = held[source].key, held[source].cursor, None
        elif point is not None:
            parent, cursor, name, source = point.key, point.cursor, point.key.point_name, None
        else:
            parent, cursor, name = None, Cursor(), None
        self._members = tuple(sorted(self._waiting, key=lambda m: (m != source, m)))
        step = parent.step if parent else 0
        if self._step is not None:
            step, self._step = self._step, None
        view = GenerationView(
            attempt=self._attempt,
            generation=len(self.views) + 1,
            rank=0,
            world_size=len(self._members),
            members=self._members,
            host="127.0.0.1",
            port=self._waiting[self._members[0]].port,
            parent=parent,
            source_rank=None if source is None else 0,
            point=name,
            cursor=cursor,
            step=step,
            launch="test",
        )
        self.views.append(view)
        self._waiting.clear()
        self._wish["reform"] = False
        self._tell_wishes()
        for rank, member in enumerate(self._members):
            self._send(member, "view", dataclasses.replace(view, rank=rank))

    def _tell_wishes(self) -> None:
        if not self.views:
            return
        view = self.views[-1]
        steps = [key.step for key in self.records if key.generation == view.generation]
        acknowledged = max(steps, default=-1) if self.acknowledge else -1
        wishes = Wishes(ended=False, acknowledged_step=acknowledged, **self._wish)
        for member in self._members:
            self._send(member, "wishes", wishes)

    def _send(self, member: str, *message: Any) -> None:
        if member in self._links:
            try:
                self._links[member].send(message)
            except OSError:
                return  # it died just now; its connection will tell


class MeetingMembership:
    """The member's side. `hold` is no part of the protocol: it stops the caller until the test lets it go
    on."""

    def __init__(self, address: tuple[str, int], member: str) -> None:
        from orchestrator.train.membership import open_store

        self.member = member
        self.store = open_store("127.0.0.1")
        self._link, self._lock = Client(address, authkey=KEY), threading.Lock()
        self._link.send(member)
        self._votes: dict[str, Future[bool]] = {}
        self._wishes = Wishes(ended=False, save=False, stop=False, reform=False, acknowledged_step=-1)
        self._view: Future[GenerationView | None] = Future()
        self._released = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                kind, *values = self._link.recv()
            except (EOFError, OSError):
                return
            if kind == "wishes":
                self._wishes = values[0]
            elif kind == "view":
                self._view.set_result(values[0])
            elif kind == "answer":
                self._votes[values[0]].set_result(values[1])
            else:
                self._released.set()

    def send(self, *message: Any) -> None:
        with self._lock:
            self._link.send(message)

    def hold(self, place: str) -> None:
        self._released.clear()
        self.send("hold", place)
        assert self._released.wait(WAIT_S), f"held at {place} for ever"

    def connect_store(self, view: GenerationView) -> Any:
        from orchestrator.train.membership import connect_store

        return connect_store(self.store, view)

    def join(
        self,
        key: StateKey | None,
        cursor: Cursor | None,
        leaves: tuple[int, int] | None,
        prepared: StateKey | None,
        records: Sequence[StepRecord],
        reason: str,
    ) -> GenerationView | None:
        self._view = Future()
        self.send("join", Join(key, cursor, leaves, prepared, tuple(records), reason, self.store.port))
        return self._view.result(WAIT_S)

    def wishes(self, view: GenerationView) -> Wishes:
        return self._wishes

    def phase(self, name: str) -> None:
        """Nobody is left out for being slow here."""

    def report(self, view: GenerationView, records: Sequence[StepRecord]) -> None:
        self.send("report", tuple(records))

    def vote(self, vote: Vote) -> Future[bool]:
        self._votes[vote.key.point_name] = answer = Future()
        self.send("vote", vote)
        return answer

    def finished(self, key: StateKey, reason: str) -> None:
        self.send("finished", key, reason)
