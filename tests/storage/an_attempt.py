"""One attempt of a run as storage sees it, by the real code of claims, journal, votes, commits, retention and
end records, without training; what it was promised; and whether storage has kept that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from orchestrator.checkpoint.commit.commit_events import PartFailed
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import RESUME, START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import Lineage, effective_history
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from tests.checkpoint.driver import Coordinator
from tests.checkpoint.samples import key, record, start, write_vote

SAVES = (2, 4, 6)  # steps after the attempt's begin
KEEP = 1

CLAIMED, DURABLE, ACKNOWLEDGED, WRITTEN = "claimed", "durable", "acknowledged", "written"
Tell = Callable[[str, str], None]


@dataclass
class Promises:
    """What was told while attempts ran: claims that were won, steps that are durable (`attempt step`), points
    that were acknowledged, and what was to be written under which name (path -> digests).
    """

    claimed: list[int] = field(default_factory=list)
    durable: dict[int, int] = field(default_factory=dict)
    acknowledged: list[str] = field(default_factory=list)
    written: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Iterable[tuple[str, str]]) -> Promises:
        promises = cls()
        for what, value in told:
            promises.tell(what, value)
        return promises

    def tell(self, what: str, value: str) -> None:
        """Notes one."""
        if what == CLAIMED:
            self.claimed.append(int(value))
        elif what == ACKNOWLEDGED:
            self.acknowledged.append(value)
        else:
            first, second = value.split(" ", 1)
            if what == DURABLE:
                self.durable[int(first)] = int(second)
            else:
                self.written.setdefault(second, set()).add(first)


def an_attempt(storage: Storage, tell: Tell) -> list[str]:
    """Claims the next number, continues the newest healthy point, trains 6 steps, saves three times, keeps
    one point and ends. Returns the errors that it outlived; raises what ends it.
    """
    store, errors = RunStore(storage), list[str]()
    number = (store.claim_numbers() or [0])[-1] + 1
    store.claim(number, f"launch {number}", START if number == 1 else RESUME, "host")
    tell(CLAIMED, str(number))
    lineage = _history(store)
    names = [name for name in store.point_names() if lineage.on_lineage(_key(name))]
    parent, _ = store.healthy_newest(names)
    at = parent.key if parent else None
    store.write_parent(ClaimParent(attempt=number, parent=at, inherited=tuple(names)))
    heartbeat = store.heartbeat(number)
    heartbeat.beat()
    journal, begin = JournalWriter(storage, number, run="run"), at.step if at else 0
    journal.generation(start(1, at, number))
    for step in range(begin + 1, begin + max(SAVES) + 1):
        journal.step(record(key(step, attempt=number)))
    coordinator = Coordinator(store, KEEP, journal=journal, inherited=names, attempt=number)
    for step in SAVES:
        heartbeat.beat()
        _save(coordinator, key(begin + step, attempt=number), tell, errors)
    try:
        _flush(journal, tell, errors)
        journal.close()
    except StorageError as error:
        errors.append(str(error))
    store.write_end(number, "done", "all steps trained")
    return errors


def _save(coordinator: Coordinator, at: StateKey, tell: Tell, errors: list[str]) -> None:
    for rank in range(2):
        try:
            vote = write_vote(coordinator.store.storage, at, rank)
        except StorageError as error:
            errors.append(str(error))
            reason = PartFailed(key=at, rank=rank, world_size=2, reason=str(error), now_s=2.0)
            coordinator.tell(reason)
        else:
            coordinator.vote(vote)
    if any(committed for _, _, committed in coordinator.take_answers()):
        tell(ACKNOWLEDGED, at.point_name)
    errors += coordinator.reasons
    coordinator.reasons.clear()
    _flush(coordinator.journal, tell, errors)


def _flush(journal: JournalWriter, tell: Tell, errors: list[str]) -> None:
    try:
        reached = journal.flush()
    except StorageError as error:
        errors.append(str(error))
        return
    if reached is not None:
        tell(DURABLE, f"{reached.attempt} {reached.step}")


def broken(storage: Storage, promises: Promises) -> list[str]:
    """What of the promises storage has not kept, and what is there that must not be."""
    store, wrong = RunStore(storage), list[str]()
    for number in promises.claimed:
        if store.read_claim(number).launch != f"launch {number}":
            wrong.append(f"claim {number} is lost")
    whole = [name for name in store.point_names() if not store.verify_point(name)]
    if whole != store.point_names():
        wrong.append("a torn point is committed")
    if max(promises.acknowledged, default="") > max(whole, default=""):
        wrong.append("an acknowledged point is lost")
    try:
        steps = {(found.attempt, found.step) for found in read_journal(storage).records}
        lineage = _history(store)
    except OrchestratorError as error:
        return [*wrong, f"the history cannot be read: {error}"]
    for attempt, last in promises.durable.items():
        if (attempt, last) not in steps:
            wrong.append(f"durable steps of attempt {attempt} are lost")
    wrong += lineage.errors
    newest = max(promises.acknowledged, default="")
    if newest and not lineage.on_lineage(_key(newest)):
        wrong.append("an acknowledged point is an orphan")
    return wrong


def _history(store: RunStore) -> Lineage:
    parents, unreadable = store.parents()
    assert unreadable == (), "no parent file is torn"
    journal = read_journal(store.storage)
    return effective_history(store.claims(), parents, journal.generations, journal.records)


def _key(name: str) -> StateKey:
    at = parse_point_name(name)
    assert at is not None
    return at


def short(storage: Storage, promises: Promises, names: Iterable[str]) -> list[str]:
    """Which of these files do not hold what was to be written there, all of it."""
    found = [dataclasses.astuple(storage.entry(name)) for name in names]
    return [path for path, _, digest in found if digest not in promises.written.get(path, set())]
