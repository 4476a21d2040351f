"""Many launches that race for one run through a storage that fails: each attempt has exactly one holder, and
the claims make one history.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import BusyError, StorageError
from orchestrator.history.claims.claim_files import RESUME, START
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.storage.buckets import Limits
from orchestrator.storage.files import Storage
from orchestrator.storage.object_store import ObjectStore
from tests.checkpoint.samples import key, no_sleep, write_point
from tests.storage.servers import FAULTS, Fault, Proxy, Rule, new_bucket, no_fault

SILENT: tuple[Fault, ...] = ("silence", "silence after")
STARTERS = 40
# what nobody answers is given up soon, and asked as often as a slow machine may need
LIMITS = Limits(request_s=2.0, retry_s=60.0, again_s=60.0)


def faults(seed: int, share: float, silent: float) -> Rule:
    """This share of all requests fails, before its effect or after, and that one has no answer at all."""
    numbers, lock = random.Random(seed), threading.Lock()

    def rule(method: str, path: str) -> Fault | None:
        with lock:
            if numbers.random() < silent:
                return numbers.choice(SILENT)
            return numbers.choice((*FAULTS, "501")) if numbers.random() < share else None

    return rule


class Launches:
    """Launches that begin anew as soon as they have ended, until so many claims were tried."""

    def __init__(self, root: str, num_claims: int, store: type[ObjectStore] = ObjectStore) -> None:
        self._root, self._store = root, store
        self._numbers = iter(range(num_claims))
        self._lock = threading.Lock()
        self.won: dict[int, list[str]] = {}  # by attempt, who was told that it has it
        self.unknown = set[str]()  # those that heard of an error instead of an answer

    def run(self) -> None:
        with ThreadPoolExecutor(STARTERS) as pool:
            for launched in [pool.submit(self._launch) for _ in range(STARTERS)]:
                launched.result()

    def _launch(self) -> None:
        store = RunStore(Storage.on(self._store(self._root, no_sleep, LIMITS)))
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            self._claim(store, f"launch-{number}")

    def _claim(self, store: RunStore, launch: str) -> None:
        try:
            taken = store.claim_numbers()
            attempt = taken[-1] + 1 if taken else 1
            store.claim(attempt, launch, RESUME if taken else START, "host")
        except BusyError:
            return
        except StorageError:
            with self._lock:
                self.unknown.add(launch)
            return
        with self._lock:
            self.won.setdefault(attempt, []).append(launch)
        try:
            names = store.point_names() if attempt > 1 else []  # the point is of attempt 1
            parent = store.read_point(names[-1]).key if names else None
            store.write_parent(ClaimParent(attempt=attempt, parent=parent, inherited=tuple(names)))
        except StorageError:
            return  # its launch ends; what it claimed nobody continues

    def wrong(self) -> list[str]:
        """What is not as it was told, or no history."""
        store, found = RunStore(Storage.on(ObjectStore(self._root, no_sleep))), list[str]()
        numbers = store.claim_numbers()
        if numbers != list(range(1, len(numbers) + 1)):
            found.append(f"the claims have gaps: {numbers}")
        for attempt in sorted({*numbers, *self.won}):
            holder, told = store.read_claim(attempt).launch, self.won.get(attempt, [])
            if told != [holder] and not (told == [] and holder in self.unknown):
                found.append(f"attempt {attempt} is {holder}'s, and was given to {told}")
        parents, unreadable = store.parents()
        found += map(str, unreadable)
        if {parent.attempt for parent in parents} - self.won.keys():
            found.append("a launch continues what it does not hold")
        if len({parent.parent for parent in parents if parent.attempt > 1}) > 1:
            found.append("two histories")
        return found


@pytest.mark.parametrize("num_claims", [100, pytest.param(1000, marks=pytest.mark.chaos)])
def test_racing_launches_make_one_history_whatever_becomes_of_their_requests(
    proxy: Proxy, num_claims: int
) -> None:
    root = f"{new_bucket(proxy.url)}/run"
    write_point(RunStore(Storage.on(ObjectStore(root))), key(10))
    launches = Launches(root, num_claims)
    proxy.rule = faults(num_claims, share=0.2, silent=0.002)
    launches.run()
    proxy.rule = no_fault
    assert launches.wrong() == []
    assert len(launches.won) > num_claims // 30


@pytest.mark.chaos
def test_launches_that_race_on_a_server_that_overwrites_claim_nothing(proxy: Proxy) -> None:
    proxy.forgets = ("if-none-match",)
    launches = Launches(f"{new_bucket(proxy.url)}/run", 200)
    launches.run()
    assert (launches.won, len(launches.unknown)) == ({}, 200)
    assert launches.wrong() == []


class AsksNobody(ObjectStore):
    """Planted mistake: believes that every server refuses a second create."""

    def _require_conditional_create(self) -> None:
        pass


@pytest.mark.chaos
def test_the_race_on_such_a_server_catches_a_launch_that_trusts_it(proxy: Proxy) -> None:
    proxy.forgets = ("if-none-match",)
    launches = Launches(f"{new_bucket(proxy.url)}/run", 200, AsksNobody)
    launches.run()
    assert any("was given to" in text for text in launches.wrong())


class BelievesExists(ObjectStore):
    """Planted mistake: who is told "exists" has lost, whoever made what exists."""

    def _token(self, path: str) -> str | None:
        return None if super()._token(path) is None else "another's"


class PutsBlindly(ObjectStore):
    """Planted mistake: a create is a put that looks before it."""

    def _create(self, path: str, data: bytes) -> bool:
        there = self._token(path) is not None
        self.put(path, lambda: (data,), len(data))
        return not there


@pytest.mark.chaos
@pytest.mark.parametrize("planted", [BelievesExists, PutsBlindly])
def test_the_race_catches_a_planted_mistake(proxy: Proxy, planted: type[ObjectStore]) -> None:
    launches, seen = Launches(f"{new_bucket(proxy.url)}/run", 150, planted), set[str]()

    def first_answer_is_lost(method: str, path: str) -> Fault | None:
        first = method == "PUT" and path not in seen
        seen.update({path} if first else ())
        return "reset after" if first else None

    proxy.rule = first_answer_is_lost
    launches.run()
    proxy.rule = no_fault
    assert any("was given to" in text for text in launches.wrong())
