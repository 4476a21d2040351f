"""Claims: one winner per number, what a loser is told, and when a run counts as busy."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import BusyError, FencedError, ResumePointError, StorageError
from orchestrator.history.claims.claim_files import RESTARTED, RESUME, START, UNREADABLE, UnreadableFile
from orchestrator.history.claims.claims import Claim, ClaimParent
from orchestrator.history.claims.lineage import effective_history
from orchestrator.history.claims.liveness import Busy, Free
from orchestrator.planning.schedule import Budgets, Length
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, record, start, write_point
from tests.planning.identities import IDENTITY
from tests.raising import raises


@pytest.fixture
def store(new_storage: Callable[[str], Storage]) -> RunStore:
    return RunStore(new_storage("run"))


def test_claims_and_parents_are_read_back_as_written(store) -> None:
    assert store.newest_claim() is None
    first = store.claim(1, "aaaa", START, "host")
    budgets = Budgets(max_steps=Length(given=10, unit="steps", global_batch_size=8, seq_len=32, tokens=2560))
    parent = ClaimParent(
        attempt=1, parent=key(10, attempt=0), inherited=(key(10, attempt=0).point_name,), budgets=budgets
    )
    assert store.read_parent(1) is None
    store.write_parent(parent)
    assert store.newest_claim() == first
    assert store.claims() == (first,)
    assert store.read_parent(1) == parent
    assert store.parents() == ((parent,), ())
    assert not store.next_claim_exists(1)
    second = store.claim(2, "bbbb", RESUME, "host")
    assert store.next_claim_exists(1)
    assert store.newest_claim() == second
    with raises(StorageError, "history.parent_exists", "attempts/0001.parent.json"):
        store.write_parent(parent)


def test_who_loses_the_race_for_a_number_is_told_who_has_it(store) -> None:
    store.claim(1, "aaaa", START, "first-host")
    stop = f"`orchestrator stop {shlex.quote(store.storage.root)}`"
    with raises(BusyError, "run.busy", "aaaa", "first-host", "bbbb", stop):
        store.claim(1, "bbbb", START, "second-host")


def test_a_claim_lost_between_looking_and_creating_is_busy_too(store, monkeypatch) -> None:
    other = RunStore(store.storage)
    look = store.newest_claim

    def look_then_lose() -> object:
        seen = look()
        other.claim(1, "aaaa", START, "first-host")
        return seen

    monkeypatch.setattr(store, "newest_claim", look_then_lose)
    with raises(BusyError, "run.busy", "first-host"):
        store.claim(1, "bbbb", START, "second-host")


def test_a_restarted_coordinator_follows_only_its_own_launch(store) -> None:
    store.claim(1, "aaaa", START, "host")
    assert store.claim(2, "aaaa", RESTARTED, "host").why == RESTARTED
    store.claim(3, "bbbb", RESUME, "host")
    for number in (3, 4):
        with raises(FencedError, "run.fenced", "bbbb"):
            store.claim(number, "aaaa", RESTARTED, "host")
    assert not store.next_claim_exists(3)


def test_a_torn_claim_is_taken_and_a_torn_parent_file_has_no_descendants(store) -> None:
    store.claim(1, "aaaa", START, "host")
    store.write_parent(ClaimParent(attempt=1, parent=None))
    store.storage.write("attempts/0002.json", b'{"content": {"num')
    store.storage.write("attempts/0002.parent.json", b'{"conte')
    newest = store.newest_claim()
    assert newest is not None
    assert (newest.number, newest.why) == (2, UNREADABLE)
    with raises(BusyError, "run.busy", "unknown"):
        store.claim(2, "bbbb", RESUME, "host")
    parents, unreadable = store.parents()
    assert [p.attempt for p in parents] == [1]
    assert unreadable == (UnreadableFile(path="attempts/0002.parent.json", reason=unreadable[0].reason),)
    assert store.claim(3, "bbbb", RESUME, "host").number == 3


def test_leftovers_of_a_crashed_creation_are_no_claims(store) -> None:
    store.storage.write("attempts/0001.json.tmp-00aa", b"x")
    assert store.newest_claim() is None
    assert store.claim(1, "aaaa", START, "host").number == 1


def test_a_run_is_created_once_and_read_back(store, tmp_path) -> None:
    assert store.read_run() is None
    run = store.create_run("tiny", IDENTITY)
    assert store.read_run() == run
    assert run.identity == IDENTITY
    with raises(BusyError, "run.busy", "run.json"):
        store.create_run("tiny", IDENTITY)
    path = tmp_path / "run" / "run.json"
    path.write_bytes(path.read_bytes().replace(b"tiny", b"tinx"))
    with raises(ResumePointError, "run.damaged_run_file", "digest"):
        store.read_run()


class Clock:
    """Time that passes only when somebody waits; `at` says what happens meanwhile."""

    def __init__(self, at: dict[float, Callable[[], object]] | None = None) -> None:
        self.now, self.at = 0.0, dict(at or {})

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for moment in [m for m in self.at if m <= self.now]:
            self.at.pop(moment)()


def test_a_run_without_claims_or_with_an_end_record_is_not_busy_at_once(store) -> None:
    clock = Clock()
    assert store.watch_busy(10, clock, clock.wait) == Free(number=0)
    store.claim(1, "aaaa", START, "host")
    store.write_end(1, "done", "all steps trained")
    store.write_end(1, "failed", "said twice")
    assert store.watch_busy(10, clock, clock.wait) == Free(number=1)
    assert clock.now == 0
    end = store.read_end(1)
    assert end is not None
    assert end.outcome == "done"


def test_a_dead_attempt_is_watched_for_the_whole_time_and_then_not_busy(store) -> None:
    store.claim(1, "aaaa", START, "host")
    store.heartbeat(1).beat()
    clock = Clock()
    assert store.watch_busy(10, clock, clock.wait) == Free(number=1)
    assert 10 <= clock.now < 11


def test_a_run_is_busy_when_its_heartbeat_or_journal_grows(store) -> None:
    store.claim(1, "aaaa", START, "host")
    for heartbeat in (store.start_heartbeat(1), store.heartbeat(1)):
        clock = Clock({7.0: heartbeat.beat})
        assert store.watch_busy(10, clock, clock.wait) == Busy(number=1)
        assert clock.now < 8
    clock = Clock({3.0: lambda: store.storage.write("journal/a0001/000001.jsonl", b"x")})
    assert store.watch_busy(10, clock, clock.wait) == Busy(number=1)


def test_an_attempt_that_ends_or_is_followed_while_watched_is_told_apart(store) -> None:
    store.claim(1, "aaaa", START, "host")
    clock = Clock({4.0: lambda: store.claim(2, "bbbb", RESUME, "host")})
    assert store.watch_busy(10, clock, clock.wait) == Busy(number=2)
    clock = Clock({4.0: lambda: store.write_end(2, "stopped", "asked to")})
    assert store.watch_busy(10, clock, clock.wait) == Free(number=2)
    assert clock.now < 5


def test_an_attempt_whose_processes_are_known_to_be_dead_is_not_watched(store) -> None:
    claim = store.claim(1, "aaaa", START, "host")
    asked: list[Claim] = []

    def dead_after_two_looks(about: Claim) -> bool:
        asked.append(about)
        return len(asked) > 2

    clock = Clock()
    assert store.watch_busy(10, clock, clock.wait, dead_after_two_looks) == Free(number=1)
    assert asked == [claim] * 3
    assert clock.now < 1


def test_a_cut_off_attempt_that_keeps_committing_never_enters_the_lineage(store) -> None:
    store.claim(1, "aaaa", START, "host")
    store.write_parent(ClaimParent(attempt=1, parent=None))
    write_point(store, key(10))
    old = RunStore(store.storage)  # on a machine that is cut off from now on and checks nothing

    store.claim(2, "bbbb", RESUME, "host")
    write_point(old, key(20))  # before the points are listed: inherited, because it is whole
    inherited = tuple(store.point_names())
    write_point(old, key(30))  # after the list
    store.write_parent(ClaimParent(attempt=2, parent=key(20), inherited=inherited))
    write_point(old, key(40))

    records = [record(key(step)) for step in range(1, 41)]
    lineage = effective_history(store.claims(), store.parents()[0], [start(1, None)], records)
    assert lineage.errors == ()
    on_it = [name for name in store.point_names() if lineage.on_lineage(store.read_point(name).key)]
    assert on_it == [key(10).point_name, key(20).point_name]
    assert [r.step for r in lineage.records] == list(range(1, 21))
    point, _ = store.healthy_newest(on_it)
    assert point is not None
    assert point.key == key(20)
