"""Every interleaving of an old coordinator that saves and deletes, and a start that claims the next attempt.

Both sides are the real code (machine, committer, store) over a disk in memory, or each over the cache of an
NFS client before it; the search takes their steps in every order. A deletion is one step here, and nobody
goes back: `tests/launch/test_rewind_search.py` has these, call by call, and forks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    Action,
    ClaimChecked,
    CommitWritten,
    Event,
    Fence,
    GenerationFormed,
    GiveUp,
    StoreAction,
    VoteCast,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.commit.store_actions import PointCommitter
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ResumePointError
from orchestrator.history.claims.claim_files import RESUME, START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import effective_history
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from tests.checkpoint.samples import CONFIG, key, no_sleep, record, started_journal, write_vote
from tests.storage.crashfs import Files, ModelDisk
from tests.storage.nfs_client import Cache, NfsClient, trusts_the_miss

STEPS = (10, 20, 30)
KEEP = 1
LIMIT = 5000


def store_on(files: Files, cache: Cache | None = None) -> RunStore:
    """`cache`: that of the NFS client through which the files are seen."""
    disk = ModelDisk.of(files)
    return RunStore(Storage("/run", disk if cache is None else NfsClient(disk, cache), no_sleep))


class DurableJournal(JournalWriter):
    """A journal that is never the matter here: it lies on a disk of its own, and all records are durable
    already.
    """

    def __init__(self) -> None:
        super().__init__(Storage("/elsewhere", ModelDisk(), no_sleep), 1)

    def covers(self, key: StateKey) -> bool:
        return True


@dataclass(frozen=True)
class World:
    """A state of the search: the disk, the old coordinator, and how far the new start has come. The caches
    are those of their machines, where the disk is an NFS server.
    """

    files: frozenset[tuple[str, bytes | None]]
    machine: CommitMachine
    todo: tuple[Action, ...] = ()
    saves_begun: int = 0
    acknowledged: frozenset[str] = frozenset()
    fenced: bool = False
    claimed: bool = False
    listed: tuple[str, ...] | None = None
    parent: str | None = None
    old_cache: Cache | None = None
    new_cache: Cache | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What the search compares; the machine's other parts follow from these."""
        saves = tuple((s.key, s.stage) for s in self.machine.saves.values())
        rest = (self.machine.kept.names, self.machine.kept.deleting, self.machine.kept.verified)
        todo = tuple(
            (type(a), getattr(a, "key", None), getattr(a, "name", None), getattr(a, "names", None))
            for a in self.todo
        )
        return (
            self.files,
            saves,
            rest,
            todo,
            self.saves_begun,
            self.acknowledged,
            self.fenced,
            self.claimed,
            self.listed,
            self.parent,
            self.old_cache,
            self.new_cache,
        )


MakeCommitter = Callable[[RunStore], PointCommitter]


def real_committer(store: RunStore) -> PointCommitter:
    return PointCommitter(store, DurableJournal(), 1, CONFIG, {}, lambda: 0.0)


@dataclass(frozen=True)
class Protocol:
    """How both sides work; the planted mistakes replace one of these."""

    machine: type[CommitMachine] = CommitMachine
    committer: MakeCommitter = real_committer
    list_before_claim: bool = False
    on_nfs: bool = False


def first_world(protocol: Protocol) -> World:
    """A run whose first attempt has saved nothing yet."""
    disk = ModelDisk()
    store = RunStore(Storage("/run", disk, no_sleep))
    store.claim(1, "aaaa", START, "host")
    store.write_parent(ClaimParent(attempt=1, parent=None))
    journal = started_journal(store.storage)
    for step in range(1, max(STEPS) + 1):
        journal.step(record(key(step)))
    journal.flush()
    machine = protocol.machine(attempt=1, kept=KeptPoints(keep_latest=KEEP), vote_limit_s=60)
    for event in (GenerationFormed(generation=1, parent=None),):
        machine, _ = machine.on(event)
    cache = Cache() if protocol.on_nfs else None
    return World(files=frozenset(disk.files().items()), machine=machine, old_cache=cache, new_cache=cache)


def next_worlds(world: World, protocol: Protocol) -> list[tuple[str, World]]:
    """Every single step that either side can take."""
    return [*old_steps(world, protocol), *new_steps(world, protocol)]


def old_steps(world: World, protocol: Protocol) -> list[tuple[str, World]]:
    """The old coordinator does what comes next; with nothing to do, its members save."""
    if world.fenced:
        return []
    store = store_on(dict(world.files), world.old_cache)
    if not world.todo:
        if world.saves_begun == len(STEPS):
            return []
        at = key(STEPS[world.saves_begun])
        after = replace(world, saves_begun=world.saves_begun + 1)
        for rank in range(2):
            after = told(after, VoteCast(vote=write_vote(store.storage, at, rank, num_bytes=4), now_s=0.0))
        return [(f"members save {at.step}", by_old(after, store))]
    action, rest = world.todo[0], world.todo[1:]
    after = replace(world, todo=rest)
    match action:
        case Acknowledge():
            return [
                (
                    f"old acknowledges {action.key.step}",
                    replace(after, acknowledged=world.acknowledged | {action.key.point_name}),
                )
            ]
        case Fence():
            return [("old is fenced", replace(after, fenced=True))]
        case GiveUp():
            raise AssertionError(f"nothing fails here: {action}")
    return perform(after, action, store, protocol)


def perform(
    world: World, action: StoreAction, store: RunStore, protocol: Protocol
) -> list[tuple[str, World]]:
    answer = protocol.committer(store).perform(action)
    after = by_old(world, store)
    return [(f"old: {action}"[:60], told(after, answer) if answer else after)]


def new_steps(world: World, protocol: Protocol) -> list[tuple[str, World]]:
    """The new start claims, lists, chooses the newest healthy point, and writes its parent file."""
    store = store_on(dict(world.files), world.new_cache)
    may_list = world.claimed or protocol.list_before_claim
    if may_list and world.listed is None:
        names = tuple(store.point_names())
        return [("new lists", by_new(replace(world, listed=names), store))]
    if not world.claimed:
        store.claim(2, "bbbb", RESUME, "host")
        return [("new claims", by_new(replace(world, claimed=True), store))]
    if world.parent is not None or world.listed is None:
        return []
    try:
        point, _ = store.healthy_newest(world.listed)
    except ResumePointError:
        return [("new finds nothing healthy", by_new(replace(world, parent="nothing"), store))]
    store.write_parent(ClaimParent(attempt=2, parent=point.key if point else None, inherited=world.listed))
    return [("new writes its parent", by_new(replace(world, parent=point.name if point else ""), store))]


def told(world: World, event: Event) -> World:
    machine, actions = world.machine.on(event)
    return replace(world, machine=machine, todo=(*world.todo, *actions))


def by_old(world: World, store: RunStore) -> World:
    """The disk, and the old coordinator's cache, after it used this store."""
    files, cache = seen_by(store)
    return replace(world, files=files, old_cache=cache)


def by_new(world: World, store: RunStore) -> World:
    """As `by_old`, for the new start."""
    files, cache = seen_by(store)
    return replace(world, files=files, new_cache=cache)


def seen_by(store: RunStore) -> tuple[frozenset[tuple[str, bytes | None]], Cache | None]:
    local = store.storage._store
    assert isinstance(local, LocalStore)
    disk, cache = local.disk, None
    if isinstance(disk, NfsClient):
        disk, cache = disk.server, disk.cache
    assert isinstance(disk, ModelDisk)
    return frozenset(disk.files().items()), cache


def wrong_with(world: World) -> str | None:
    """What no interleaving may come to."""
    if world.parent is None:
        return None
    if world.parent == "nothing":
        return "the new attempt finds no healthy point"
    store = store_on(dict(world.files))
    if world.parent and store.verify_point(world.parent):
        return "the new attempt's parent is gone or damaged"
    parents, _ = store.parents()
    journal = read_journal(store.storage)
    lineage = effective_history(store.claims(), parents, journal.generations, journal.records)
    assert not lineage.errors, lineage.errors
    # an older one may have been deleted before the claim; then nobody can inherit it, and nobody needs it
    for name in world.acknowledged & {max(world.acknowledged, default=""), *store.point_names()}:
        at = parse_point_name(name)
        assert at is not None
        if not lineage.on_lineage(at):
            return "an acknowledged point is an orphan"
    return None


def search(protocol: Protocol) -> tuple[int, set[str]]:
    """The number of states, and everything that went wrong in any of them."""
    first = first_world(protocol)
    seen, queue, wrong = {first.identity}, deque([first]), set()
    while queue:
        world = queue.popleft()
        if reason := wrong_with(world):
            wrong.add(reason)
        for _, after in next_worlds(world, protocol):
            if after.identity not in seen:
                seen.add(after.identity)
                queue.append(after)
        assert len(seen) < LIMIT, "the search must end"
    return len(seen), wrong


@pytest.mark.parametrize("on_nfs", [False, True])
def test_no_interleaving_orphans_an_acknowledged_point_or_loses_the_parent(on_nfs: bool) -> None:
    states, wrong = search(Protocol(on_nfs=on_nfs))
    assert wrong == set()
    assert states > 100, "the search must be one"


def test_the_search_catches_a_claim_that_lists_before_it_fences() -> None:
    assert search(Protocol(list_before_claim=True))[1] & {
        "an acknowledged point is an orphan",
        "the new attempt finds no healthy point",
    }


def test_the_search_catches_a_store_that_trusts_the_miss_of_an_nfs_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusts_the_miss(monkeypatch)
    wrong = search(Protocol(on_nfs=True))[1]
    assert "an acknowledged point is an orphan" in wrong
    assert "the new attempt's parent is gone or damaged" in wrong


class BlindStore(RunStore):
    """Planted mistake: never looks for a newer claim."""

    def next_claim_exists(self, number: int) -> bool:
        return False


def blind_committer(store: RunStore) -> PointCommitter:
    return real_committer(BlindStore(store.storage))


def test_the_search_catches_a_coordinator_that_never_looks_for_a_newer_claim() -> None:
    wrong = search(Protocol(committer=blind_committer))[1]
    assert "an acknowledged point is an orphan" in wrong
    assert "the new attempt's parent is gone or damaged" in wrong


class AnswersAtOnce(CommitMachine):
    """Planted mistake: acknowledges and deletes once COMMIT is written; it looked only before."""

    def _commit_written(self, event: CommitWritten) -> tuple[CommitMachine, tuple[Action, ...]]:
        after, _ = super()._commit_written(event)
        return after._claim_checked(ClaimChecked(key=event.key, newer=False))


def test_the_search_catches_a_coordinator_that_looks_only_before_commit() -> None:
    wrong = search(Protocol(machine=AnswersAtOnce))[1]
    assert "an acknowledged point is an orphan" in wrong
